"""A plugin of pytest: the tests of a run that failed, one a line in build/failed-tests, for `make test-again`.

The file is there only where nothing but a few tests failed: a run that broke off, or that failed in many places, is not
judged by them.
"""

from pathlib import Path

import pytest

AT_MOST = 5


class FailedTests:
    """Writes the list in the process that reports."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._failed: set[str] = set()
        file.unlink(missing_ok=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.TESTS_FAILED and len(self._failed) <= AT_MOST:
            self._file.parent.mkdir(exist_ok=True)
            self._file.write_text("".join(f"{node}\n" for node in sorted(self._failed)))


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        config.pluginmanager.register(FailedTests(config.rootpath / "build/failed-tests"), "failed-tests")
