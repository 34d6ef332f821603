"""Ranks that a process starts end with it, also if it ended before they asked for it, and do not hang for long."""

import os
import queue
import signal
import subprocess
import time
from typing import Any

import pytest

from trinity.trainer import rank_main, service
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
