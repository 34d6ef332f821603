"""A GPU that a step has filled has no room for a bucket: the group ends, and explorers load from storage."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trinity.trainer.weights import collective
from trinity.trainer.weights.collective import CollectiveSender
from trinity.weights.client import Call
from trinity.weights.collective import Store
from trinity.weights.pointer import Epoch, EpochMember

pytestmark = pytest.mark.core


def no_room(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.02 GiB.")


@pytest.fixture
def sender() -> Iterator[CollectiveSender]:
    """Its one member says yes to everything."""

    def form(call: Call[Epoch | None]) -> Epoch:
        store = Store.connect(call.request.store_address, call.request.store_secret, 5)
        store.say("here/1/a")
        store.say("ready/1/7/a")
        return Epoch(1, "gloo", call.request.store_address, (EpochMember("a", 1, 1),))

    made = CollectiveSender(form, "127.0.0.1", torch.device("cpu"), 1000, 5.0)
    yield made
    made.close()


def test_a_broadcast_that_has_no_room_breaks_the_epoch(
    sender: CollectiveSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(collective, "Group", lambda *_: SimpleNamespace(close=lambda: closed.append(True)))
    monkeypatch.setattr(collective, "send", no_room)
    assert sender.offer("lease") is not None
    manifest: Any = SimpleNamespace(version=7, tensors=())
    assert sender.send(manifest, iter(())) is False
    assert closed == [True]


def test_a_group_that_has_no_room_is_not_offered(sender: CollectiveSender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "Group", no_room)
    assert sender.offer("lease") is None
