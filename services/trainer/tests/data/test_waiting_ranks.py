"""Ranks wait together for what only rank 0 can see, for longer than an exchange may last."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from support.programs.trainer.engine_actions import run_module
from support.programs.trainer.hanging_ranks import LOOK_SECONDS, LOOKS, WORK_SECONDS
from support.programs.trainer.waiting_ranks import LATE_SECONDS, TIMEOUT_SECONDS
from trinity.runtime.errors import InvalidInput
from trinity.trainer.process.exchange import Exchange
from trinity.trainer.process.ranks import Ranks, ranks_from_environment

pytestmark = pytest.mark.core


def test_a_batch_that_is_late_ends_no_rank(tmp_path: Path) -> None:
    assert LATE_SECONDS > 2 * TIMEOUT_SECONDS
    run_module("support.programs.trainer.waiting_ranks", tmp_path, 2, 60)
    assert [(tmp_path / str(rank)).read_bytes() for rank in range(2)] == [b"a batch"] * 2


def test_a_rank_that_works_long_for_a_checkpoint_is_no_hang_and_one_that_joins_no_exchange_is(tmp_path: Path) -> None:
    assert WORK_SECONDS > 2 * LOOKS * LOOK_SECONDS
    run_module("support.programs.trainer.hanging_ranks", tmp_path, 2, 60)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["[0, 1]"] * 2
    assert (tmp_path / "found").read_text() == "an exchange of 2 ranks"


def test_they_wait_on_the_host_and_not_in_a_kernel_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[Any] = []
    monkeypatch.setattr(dist, "new_group", lambda *, backend, timeout: f"the group over {backend}")
    monkeypatch.setattr(dist, "barrier", lambda group: waits.append(group))
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src, group: waits.append((group, tensor.device.type)))
    exchange = Exchange(Ranks(0, 2, 0))
    exchange.barrier()
    assert exchange.share({"step": 3}) == {"step": 3}
    assert waits == ["the group over gloo", ("the group over gloo", "cpu"), ("the group over gloo", "cpu")]


@pytest.mark.parametrize(("given", "taken"), [("lo", "lo"), ("=eth", None), ("no-such", None), (None, None)])
def test_gloo_takes_the_interface_that_nccl_is_given_by_name(
    monkeypatch: pytest.MonkeyPatch, given: str | None, taken: str | None
) -> None:
    """Under a launcher. NCCL also takes beginnings and exclusions, which gloo does not know."""
    values = {"RANK": "1", "WORLD_SIZE": "2", "NCCL_SOCKET_IFNAME": given, "GLOO_SOCKET_IFNAME": None}
    for name, value in values.items():
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    assert ranks_from_environment(2).world_size == 2
    assert os.environ.get("GLOO_SOCKET_IFNAME") == taken


def test_a_rank_of_an_unknown_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell may keep RANK after the job of a cluster that set it."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(InvalidInput, match=r"WORLD_SIZE: is not set, but RANK is; .*unset RANK"):
        ranks_from_environment(1)
