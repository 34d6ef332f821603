"""Ranks that a process starts end with it, also if it ended before they asked for it, and do not hang for long."""

import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trinity.trainer import rank_main, service
from trinity.trainer.process import ranks as module
from trinity.trainer.process.ranks import Ranks, launch, launch_others
from trinity.trainer.settings import TrainerSettings

pytestmark = pytest.mark.core


def test_a_rank_is_told_which_process_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real, told = subprocess.Popen, []

    def start(command: list[str], env: dict[str, str]) -> Any:
        told.append((env["RANK"], env["TRINITY_PARENT_PID"]))
        return real(["true"])

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setenv("TRINITY_LAUNCHES_RANKS", "1")
    for child in launch_others(Ranks(0, 3, 0), lambda rank, code: None):
        child.wait(30)
    assert told == [("1", str(os.getpid())), ("2", str(os.getpid()))]


def test_a_rank_that_a_signal_has_stopped_is_killed_and_a_busy_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    deaths: queue.Queue[tuple[int, int]] = queue.Queue()
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: popen(["sleep", "60"], **how))
    ranks = Ranks(3, 8, 0, local_world_size=2)
    stopped, busy = launch(ranks, range(2), lambda *death: deaths.put(death), 1.5)
    try:
        os.kill(stopped.pid, signal.SIGSTOP)
        begin = time.monotonic()
        assert deaths.get(timeout=20) == (3, -signal.SIGKILL)
        assert time.monotonic() - begin > 1.4
        assert busy.poll() is None
    finally:
        busy.kill()
    assert deaths.get(timeout=20) == (4, -signal.SIGKILL)


def test_a_launchers_further_ranks_train_and_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> None:
        raise SystemExit("trains")

    monkeypatch.setattr(rank_main, "main", train)
    monkeypatch.setattr(service, "TrainerService", lambda settings: "serves")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit, match="trains"):
        service.make_service(TrainerSettings())
    monkeypatch.setenv("RANK", "0")
    assert service.make_service(TrainerSettings()) == "serves"  # type: ignore[comparison-overlap]


WAITS = """
import os, sys
from pathlib import Path
from trinity.runtime import spares
loaded = []
spares.wait(lambda: loaded.append(os.environ.get("RANK")))
Path(sys.argv[1], os.environ["RANK"]).write_text(f"{os.getpid()} {os.environ['LOCAL_RANK']} {loaded}")
"""


def test_a_spare_becomes_the_rank_of_its_order_and_others_begin_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "_RANK", [sys.executable, "-c", WAITS, str(tmp_path)])
    monkeypatch.setattr(module, "_spares", [])
    monkeypatch.delenv("RANK", raising=False)
    for _ in range(2):
        module.keep_spares(1)
    (spare,) = module._spares
    for child in launch(Ranks(3, 8, 0, local_world_size=2), range(2), lambda *_: None, 0.0):
        assert child.wait(60) == 0
    found = [(tmp_path / str(rank)).read_text() for rank in (3, 4)]
    assert found[0] == f"{spare._process.pid} 0 [None]", "it loaded before it was a rank"
    assert found[1].endswith(" 1 []")
    assert module._spares == []
