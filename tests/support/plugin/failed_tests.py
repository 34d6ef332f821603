"""A plugin of pytest: the tests of a run that failed, one a line in build/failed-tests, for `make test-again`.

The file is there only where tests of a few files failed: a run that broke off, or that failed in many places, is not
judged by them. Files count, because a fixture that fails once fails every test of its file.
"""

from pathlib import Path

import pytest

MOST_FILES = 5


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
        files = {node.partition("::")[0] for node in self._failed}
        if exitstatus == pytest.ExitCode.TESTS_FAILED and len(files) <= MOST_FILES:
            self._file.parent.mkdir(exist_ok=True)
            self._file.write_text("".join(f"{node}\n" for node in sorted(self._failed)))


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        config.pluginmanager.register(FailedTests(config.rootpath / "build/failed-tests"), "failed-tests")
