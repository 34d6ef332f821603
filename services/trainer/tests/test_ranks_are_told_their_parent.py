"""Ranks that rank 0 starts end with it: also if it ended before they asked for it, which its pid shows them."""

import os
import subprocess
from typing import Any

import pytest

from trinity.trainer.process.ranks import Ranks, launch_others

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
