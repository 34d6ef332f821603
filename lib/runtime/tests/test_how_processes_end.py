"""Exit codes of service processes: they tell a supervisor whether to start the process again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trinity.runtime import files
from trinity.runtime.errors import EXIT_FOR_GOOD, EXIT_UNEXPECTED

pytestmark = pytest.mark.core

SERVICE = """
import asyncio
import atexit
import os
import signal
import threading
from pathlib import Path
from pydantic_settings import SettingsConfigDict
from trinity.runtime import errors, host
from trinity.runtime.settings import ServiceSettings

class Settings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="TRINITY_TEST_", extra="forbid", frozen=True)
    plugin_dirs: str = ""

calling = threading.Event()

def call_torch():
    from trinity.weights.collective import Store
    store = Store.serve("127.0.0.1")
    calling.set()
    while True:
        store.heard("nothing")

class Ending:
    name, run_id = "test", ""

    def register(self, server):
        return []

    async def work(self, ready, address):
        ready.set()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.end())

    async def end(self):
        {end}

    async def drain(self, grace_seconds):
        pass

log = Path({log!r})
announced = log.with_name("announced.json")
host.main(Ending(), Settings(listen="127.0.0.1:0", log_file=log, announce_file=announced, **{settings!r}))
"""


def run(end: str, log: Path, **settings: object) -> "subprocess.CompletedProcess[str]":
    """A service that ends in this way once it is ready."""
    script = SERVICE.format(end=end, log=str(log), settings=settings)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)


def announced(log: Path) -> dict[str, object]:
    found = files.read_json(log.with_name("announced.json"))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("failure", "code", "reason"),
    [
        ("errors.InvalidInput('model.model_path', 'is no folder')", EXIT_FOR_GOOD, "model.model_path: is no folder"),
        ("errors.Unavailable('no server answers')", 1, "no server answers"),
        ("OSError('a disk')", 1, "OSError: a disk"),
        ("RuntimeError('a card')", 1, "RuntimeError: a card"),
        ("KeyError('betas')", EXIT_UNEXPECTED, "KeyError: 'betas'"),
        ("ValueError('betas')", EXIT_UNEXPECTED, "betas"),
        ("SystemExit(2)", EXIT_UNEXPECTED, "SystemExit: 2"),
        ("AssertionError('betas')", EXIT_UNEXPECTED, "AssertionError: betas"),
    ],
)
def test_only_what_a_restart_would_not_mend_says_so(failure: str, code: int, reason: str, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    done = run(f"raise {failure}", log)
    assert done.returncode == code, done.stderr
    assert "finished" not in announced(log)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["reason"] for line in lines if line["event"] == "service.failed"] == [reason]


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        ("RuntimeError('shapes')", EXIT_UNEXPECTED),  # as torch says that tensors do not fit
        ("type('Mine', (Exception,), {})('mine')", EXIT_UNEXPECTED),
        ("OSError('a disk')", 1),
    ],
)
def test_what_a_plugin_raises_is_not_tried_again_and_again(failure: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "its_loss.py").write_text(f"def loss():\n    raise {failure}\n")
    end = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import its_loss; its_loss.loss()"
    assert run(end, tmp_path / "log.jsonl", plugin_dirs=f"/nowhere:{tmp_path}").returncode == code


def test_a_service_whose_work_returns_says_that_it_is_finished(tmp_path: Path) -> None:
    done = run("return", tmp_path / "log.jsonl", exit_code_when_stopped=143)
    assert done.returncode == 0, done.stderr
    assert announced(tmp_path / "log.jsonl")["finished"] is True


@pytest.mark.parametrize("code", [0, 143])
def test_a_service_that_is_stopped_is_not_finished(code: int, tmp_path: Path) -> None:
    stopped = "os.kill(os.getpid(), signal.SIGTERM); await asyncio.sleep(60)"
    done = run(stopped, tmp_path / "log.jsonl", exit_code_when_stopped=code)
    assert done.returncode == code, done.stderr
    assert "service.drained" in done.stderr
    assert "finished" not in announced(tmp_path / "log.jsonl")


@pytest.mark.parametrize(("end", "code"), [("return", 0), ("raise OSError('a disk')", 1)])
def test_the_exit_code_holds_while_a_daemon_thread_is_in_a_library(end: str, code: int, tmp_path: Path) -> None:
    """Python would end the thread by force, in a destructor of torch's: SIGABRT."""
    begun = "threading.Thread(target=call_torch, daemon=True).start(); await asyncio.to_thread(calling.wait)"
    done = run(f"{begun}; {end}", tmp_path / "log.jsonl")
    assert done.returncode == code, done.stderr
    assert "terminate called" not in done.stderr


def test_exit_handlers_run_and_what_was_printed_is_there(tmp_path: Path) -> None:
    end = "atexit.register(print, 'handled'); threading.Timer(0.5, print, ['joined']).start()"
    done = run(end, tmp_path / "log.jsonl")
    assert (done.returncode, done.stdout) == (0, "joined\nhandled\n")


@pytest.mark.parametrize(
    ("config", "message"), [(None, "config_file: is not set"), ("moodel: {}\n", "moodel")], ids=["none", "misspelt"]
)
def test_a_service_whose_yaml_cannot_be_used_says_why_and_that_it_is_for_good(
    config: str | None, message: str, tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRINITY_")}
    if config is not None:
        (tmp_path / "run.yaml").write_text(config)
        environment["TRINITY_TRAINER_CONFIG_FILE"] = str(tmp_path / "run.yaml")
    command = [sys.executable, "-m", "trinity.trainer.main", "serve"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_FOR_GOOD, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
