"""Exit codes and the one sentence of commands that do not end by themselves."""

import errno
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from trinity.cli import satellites
from trinity.cli.main import app
from trinity.reading.errors import RunError, ending_well

pytestmark = pytest.mark.core

RECORDED = Path(__file__).parents[2] / "tests/support/fakes/pages/recorded"


def test_ctrl_c_before_anything_started_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert ending_well(interrupted) == 130
    assert capsys.readouterr().err == "trinity: ended by SIGINT\n"


INTERRUPTED_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "trinity.cli.main":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from trinity.cli.start import start
start()
"""


def test_ctrl_c_while_the_command_is_imported_is_no_traceback() -> None:
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


NO_NOHUP = "signal.signal(signal.SIGHUP, signal.SIG_DFL)"  # the tests themselves may run under it
ENDED_BY_SIGNAL = """
import asyncio, os, signal
from trinity.reading.ending import Ending, Interrupted, ended_by_signals
async def supervise():
    stop = Ending()
    with ended_by_signals(stop):
        print("supervising", flush=True)
        {signal}
        await asyncio.wait_for(stop.wait(), 30)
        print("draining", flush=True)
{before}
try:
    asyncio.run(supervise())
except Interrupted as error:
    raise SystemExit(error.code)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_a_script_started_in_the_background_ends_by_signals(signum: signal.Signals) -> None:
    """Such a shell starts it with SIGINT ignored; the supervisor obeys it nevertheless."""
    before = f"signal.signal(signal.SIGINT, signal.SIG_IGN); {NO_NOHUP}"
    code = ENDED_BY_SIGNAL.format(signal=f"os.kill(os.getpid(), {int(signum)})", before=before)
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 128 + signum


def test_under_nohup_the_end_of_the_terminal_is_ignored() -> None:
    both = f"os.kill(os.getpid(), {int(signal.SIGHUP)}); os.kill(os.getpid(), {int(signal.SIGTERM)})"
    code = ENDED_BY_SIGNAL.format(signal=both, before="signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 128 + signal.SIGTERM


def test_a_run_whose_terminal_is_closed_drains() -> None:
    """A write to a terminal that hung up is an error."""
    terminal, shown = pty.openpty()
    code = ENDED_BY_SIGNAL.format(signal="", before=NO_NOHUP)
    run = subprocess.Popen([sys.executable, "-c", code], stdin=shown, stdout=shown, stderr=shown)
    os.close(shown)
    assert b"supervising" in os.read(terminal, 100)
    time.sleep(0.5)  # the write itself must have returned
    os.close(terminal)
    run.send_signal(signal.SIGHUP)
    assert run.wait(60) == 128 + signal.SIGHUP


DISOWNED = """
import sys
from trinity.cli.supervise.stage.display import make_display
with make_display() as display:
    display.say("supervising")
    sys.stdin.read()
    display.say("step 2")
    display.say("step 3")
"""


def test_a_disowned_run_goes_on_without_its_terminal() -> None:
    terminal, shown = pty.openpty()
    run = subprocess.Popen([sys.executable, "-c", DISOWNED], stdin=subprocess.PIPE, stdout=shown, stderr=shown)
    os.close(shown)
    assert b"supervising" in os.read(terminal, 100)
    os.close(terminal)
    run.communicate(timeout=60)
    assert run.returncode == 0


def test_the_first_error_of_a_group_is_the_one_said(capsys: pytest.CaptureFixture[str]) -> None:
    def failing() -> int:
        raise ExceptionGroup("tasks", [ExceptionGroup("more", [RunError("the disk is full", 7)]), RunError("second")])

    assert ending_well(failing) == 7
    assert capsys.readouterr().err == "trinity: the disk is full\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file", "/proc/nope\x1b"), "/proc/nope\\x1b: No such file"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (ExceptionGroup("tasks", [PermissionError(errno.EACCES, "Permission denied", "/x")]), "/x: Permission denied"),
    ],
)
def test_an_error_of_a_file_is_one_sentence(error: Exception, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    def failing() -> int:
        raise error

    assert ending_well(failing) == 1
    assert capsys.readouterr().err == f"trinity: {said}\n"


def test_a_time_that_is_over_keeps_its_traceback() -> None:
    def late() -> int:
        raise TimeoutError  # to Python it is an error of the system

    with pytest.raises(TimeoutError):
        ending_well(late)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["run", "x.yaml", "--dry-run", "--stage", "nosuch"], "--dry-run shows the plan of all stages"),
        (["run", "x.yaml", "--dry-run", "--wait", "0"], "--dry-run shows the plan of all stages"),
        (["run", "x.yaml", "--wait", "0"], "--wait 0: it is --stage that waits"),
        (["ui", "--demo", "--config", "x.yaml"], "--demo shows recorded runs"),
        (["ui", "--demo", "--job", "jobs/a"], "--demo shows recorded runs"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: list[str], said: str) -> None:
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"trinity: {said}") and done.stderr.count("\n") == 1


def test_a_defect_keeps_its_traceback() -> None:
    def broken() -> int:
        raise ExceptionGroup("tasks", [ZeroDivisionError()])

    with pytest.raises(ExceptionGroup):
        ending_well(broken)


def test_a_command_of_a_distribution_that_is_not_installed_names_it() -> None:
    code = "import sys; sys.modules['trinity.ui'] = None; from trinity.cli.main import app; app(['ui'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "trinity: this command is in trinity-ui, which is not installed: pip install trinity-ui\n"


@pytest.mark.parametrize("arguments", [["--help"], ["status", "--job", str(RECORDED)]], ids=["help", "a finished run"])
def test_what_reads_no_service_imports_no_client(arguments: list[str]) -> None:
    heavy = ("nats", "numpy", "omegaconf", "torch")
    code = f"""import sys
from trinity.cli.main import app
try:
    app({arguments!r})
finally:
    print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"


def test_a_command_of_another_distribution_is_listed_with_its_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = SimpleNamespace(dist=SimpleNamespace(metadata={"Summary": "Dice for runs."}), load=lambda: 7)
    monkeypatch.setattr(satellites, "_entry", {"dice": entry}.get)
    assert satellites.help_of("dice") == "Dice for runs." and satellites.help_of("cards") is None
    assert satellites.load("dice") == 7
    with pytest.raises(satellites.NotInstalled, match="pip install trinity-cluster"):
        satellites.load("launch")
