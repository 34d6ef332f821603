"""Ranks of one machine: no socket of theirs is open to another machine, and no store takes what a stranger sends."""

import json
import os
import stat
from pathlib import Path

import pytest

from support.checks.listeners import LOOPBACK
from support.checks.port_scan import Kind
from support.programs.forked import ForkedModule
from support.programs.trainer.training import make_model, wait_for

pytestmark = [pytest.mark.core, pytest.mark.timeout(300)]


def test_two_ranks_meet_in_a_file_and_gloo_listens_on_the_loopback(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "GLOO_SOCKET_IFNAME")}
    environment = {**kept, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    output = tmp_path / "out"
    ranks = ForkedModule("support.programs.trainer.listening_ranks", [str(tmp_path), str(model)], environment, output)
    assert wait_for([ranks], 250) == [0], output.read_text(errors="replace")[-4000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found, "gloo's own sockets are among them, so the test sees sockets"
        assert {host for host, _ in found} <= set(LOOPBACK), found
    met = json.loads((tmp_path / "strangers.json").read_text())
    assert met["kinds"] == [Kind.SILENT], "no socket answers a stranger"
    assert stat.S_IMODE(met["mode"]) == 0o700, "only their user reaches the file in which they meet"
    assert not list(tmp_path.glob("trinity-ranks-*")), "the file of the ranks is gone"
