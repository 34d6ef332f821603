"""NCCL groups may hang in calls without a deadline; here every call has one."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trinity.weights import collective
from trinity.weights.collective import Group, GroupBroken, Store

pytestmark = pytest.mark.core

CPU = torch.device("cpu")


class Hanging:
    """A process group whose calls end when they are let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def broadcast(self, *_: Any) -> Any:
        self.let_go.wait(60)

    def abort(self) -> None:
        self.let_go.wait(60)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    made = Hanging()
    monkeypatch.setattr(collective, "_process_group", lambda *_: made)
    monkeypatch.setattr(collective, "_ABORT_SECONDS", 0.5)
    yield made
    made.let_go.set()


def test_a_group_that_never_connects_is_aborted(hanging: Hanging) -> None:
    begin = time.monotonic()
    with pytest.raises(GroupBroken, match="epoch 3 was not formed within 1 s"):
        Group(Store.serve("127.0.0.1"), 3, "nccl", 0, 2, CPU, 1.0)
    assert time.monotonic() - begin < 5


def test_an_abort_that_hangs_is_not_waited_for(hanging: Hanging) -> None:
    group = Group.__new__(Group)
    group.device, group._group = CPU, hanging
    begin = time.monotonic()
    group.close()
    assert time.monotonic() - begin < 5
    with pytest.raises(GroupBroken, match="aborted"):
        group.broadcast(torch.zeros(1))


def test_the_end_of_a_group_is_not_waited_for() -> None:
    """The destructor of NCCL's joins threads of torch."""
    ended: list[str] = []

    class Slow:
        def abort(self) -> None:
            pass

        def __del__(self) -> None:
            time.sleep(6)
            ended.append(threading.current_thread().name)

    group = Group.__new__(Group)
    group.device, group._group = CPU, Slow()
    begin = time.monotonic()
    group.close()
    assert time.monotonic() - begin < 5
    end = time.monotonic() + 20
    while not ended and time.monotonic() < end:
        time.sleep(0.05)
    assert ended == ["group"]


def test_a_process_may_end_right_after_it_has_closed_its_groups() -> None:
    """The destructor of gloo's, in a thread of ours, asks for Python's lock: it would abort the process."""
    script = """
import torch
from trinity.weights.collective import Group, Store
store = Store.serve("127.0.0.1")
for group in [Group(store, epoch, "gloo", 0, 1, torch.device("cpu"), 30.0) for epoch in range(8)]:
    group.close()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_breaks_the_forming_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no route to host")

    group = SimpleNamespace(broadcast=broken, abort=lambda: None)
    monkeypatch.setattr(collective, "_process_group", lambda *_: group)
    with pytest.raises(GroupBroken, match="no route to host"):
        Group(Store.serve("127.0.0.1"), 3, "nccl", 0, 2, CPU, 1.0)


def test_torch_never_finds_a_collective_of_nccl_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the process, or stop for a minute to write down what it knows."""
    seen: dict[str, Any] = {}

    class Nccl:
        class Options:
            _timeout = timedelta(minutes=10)

        def __init__(self, place: Any, rank: int, world_size: int, options: Any) -> None:
            seen.update({name: value for name, value in os.environ.items() if name.startswith("TORCH_NCCL")})
            seen["timeout"] = options._timeout

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    before = dict(os.environ)
    collective._process_group("nccl", None, "", 0, 2, CPU, 5.0)
    assert seen["timeout"] > timedelta(days=30)
    for name in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT", "WAIT_TIMEOUT_DUMP_MILSEC"):
        assert seen[f"TORCH_NCCL_{name}"] == "0"
    assert dict(os.environ) == before, "the trainer's own groups keep theirs"
