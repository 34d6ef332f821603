"""Explorers that announce themselves and never connect cost one deadline, and are excluded for a while."""

import pytest
import torch

from trinity.trainer.weights import collective
from trinity.trainer.weights.collective import CollectiveSender
from trinity.weights.client import Call
from trinity.weights.collective import GroupBroken, Store
from trinity.weights.pointer import Epoch, EpochMember

pytestmark = pytest.mark.core


@pytest.fixture
def formed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Epochs whose group was tried, each of which hangs."""
    tried: list[int] = []

    def hang(store: Store, epoch: int, *_: object) -> None:
        tried.append(epoch)
        raise GroupBroken("was not formed in time")

    monkeypatch.setattr(collective, "Group", hang)
    return tried


def test_a_member_that_comes_again_under_new_names_costs_few_deadlines() -> None:
    """A leaked identity may join as often as it likes, and an honest member is in the group beside it."""
    number = 0
    asked: list[int] = []

    def form(call: Call[Epoch | None]) -> Epoch | None:
        nonlocal number
        number += 1
        asked.append(number)
        names = ["honest", f"phantom-{number}"]
        Store.connect(call.request.store_address, call.request.store_secret, 5).say(f"here/{number}/honest")
        members = tuple(EpochMember(name, rank, 1) for rank, name in enumerate(names, 1))
        return Epoch(number, "gloo", call.request.store_address, members)

    sender = CollectiveSender(form, "127.0.0.1", torch.device("cpu"), 1000, 0.2)
    tried = []
    for _ in range(16):
        assert sender.offer("lease") is None
        tried.append(len(asked))
    sender.close()
    assert tried == [2, 4, 4, 6, 6, 6, 6, 8, 8, 8, 8, 8, 8, 8, 8, 10]


def test_they_are_left_out_for_one_version_then_for_two(formed: list[int]) -> None:
    number = 0

    def form(call: Call[Epoch | None]) -> Epoch | None:
        nonlocal number
        number += 1
        if "a" in call.request.excluded:
            return None
        Store.connect(call.request.store_address, call.request.store_secret, 5).say(f"here/{number}/a")
        return Epoch(number, "gloo", call.request.store_address, (EpochMember("a", 1, 1),))

    sender = CollectiveSender(form, "127.0.0.1", torch.device("cpu"), 1000, 5.0)
    tried = []
    for _ in range(8):
        assert sender.offer("lease") is None
        tried.append(len(formed))
    sender.close()
    assert tried == [1, 1, 2, 2, 2, 3, 3, 3]
