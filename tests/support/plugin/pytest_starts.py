"""A plugin of pytest: its last lines say how many vLLM engines and trainers the tests started, and which files did."""

import os
import tempfile
from pathlib import Path

import pytest

from support.plugin import starts

_KEY = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Before pytest-xdist starts its workers, which inherit the environment, as does a pytest that a test calls."""
    if not os.environ.get(starts.FILE):
        folder = config.stash[_KEY] = Path(tempfile.mkdtemp(prefix="trinity-starts-"))
        starts.count_into(folder / "starts")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if (folder := config.stash.get(_KEY, None)) is not None and (count := starts.read(folder / "starts")):
        for line in starts.report(count):
            terminalreporter.write_line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    if (folder := config.stash.get(_KEY, None)) is not None:
        (folder / "starts").unlink(missing_ok=True)
        folder.rmdir()
