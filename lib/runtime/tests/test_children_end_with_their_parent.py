"""Children end with their parent: also if it ended before they asked for it, and not because it is process 1."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from trinity.runtime.process import as_parent, tied

pytestmark = pytest.mark.core

ASK = "from trinity.runtime import process; process.die_with_parent(); "
START = f"""
import os, subprocess, sys
from trinity.runtime.process import as_parent, tied
print(os.getpid(), subprocess.run(tied(["/bin/true"])).returncode)
for environment in (os.environ, {{**os.environ, **as_parent()}}):
    print(subprocess.run([sys.executable, "-c", {ASK!r}], env=environment).returncode)
"""


def test_the_parent_may_be_process_1() -> None:
    """As `trinity run` is in a container."""
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no new namespace of processes here")
    done = subprocess.run([*unshare, sys.executable, "-c", START], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["1", "0", "0", "0"], done.stderr


@pytest.mark.parametrize("start", [tied, lambda command: command], ids=["tied", "asks itself"])
@pytest.mark.parametrize("lives", [True, False])
def test_a_parent_that_ended_before_the_request_is_noticed(
    start: Callable[[list[str]], list[str]], lives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child is told of another process than the one that its parent is by then."""
    if not lives:
        ended = subprocess.Popen(["true"])
        ended.wait()
        monkeypatch.setattr(os, "getpid", lambda: ended.pid)
    command, environment = start([sys.executable, "-c", ASK]), {**os.environ, **as_parent()}
    monkeypatch.undo()
    assert subprocess.run(command, env=environment, timeout=60).returncode == (0 if lives else -signal.SIGKILL)


def test_who_the_parent_is_is_not_told_to_grandchildren() -> None:
    code = ASK + "import os; print(os.environ.get('TRINITY_PARENT_PID'))"
    environment = {**os.environ, **as_parent()}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "None\n", done.stderr
