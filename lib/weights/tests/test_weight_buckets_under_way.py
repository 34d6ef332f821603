"""While one bucket is packed or used the next one travels, and no third one takes memory."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from trinity.weights.collective import Group, receive, receive_buckets, send
from trinity.weights.manifest import TensorInfo

pytestmark = pytest.mark.core

INFOS = [TensorInfo(str(index), "F32", (4,), 16, "") for index in range(5)]


class Rank:
    """A group of one, in which every bucket says "begun" and "over"."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.told: list[str] = []
        self._begun = 0

    def broadcast(self, buffer: torch.Tensor) -> int:
        self._begun += 1
        self.told.append(f"begin {self._begun}")
        buffer.view(torch.float32).fill_(self._begun)
        return self._begun

    def wait(self, work: int) -> None:
        self.told.append(f"over {work}")


def begun_and_not_over(told: list[str]) -> list[int]:
    counts, now = [], 0
    for word in told:
        now += {"begin": 1, "over": -1}.get(word.split()[0], 0)
        counts.append(now)
    return counts


def test_the_sender_packs_a_bucket_while_the_one_before_travels() -> None:
    rank = Rank()

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for info in INFOS:
            rank.told.append(f"pack {info.name}")
            yield info.name, torch.zeros(4)

    send(cast(Group, rank), INFOS, weights(), 16)
    assert rank.told[:7] == ["pack 0", "begin 1", "pack 1", "begin 2", "over 1", "pack 2", "begin 3"]
    assert max(begun_and_not_over(rank.told)) == 2 and begun_and_not_over(rank.told)[-1] == 0


def test_the_receiver_has_the_next_bucket_begun_before_one_is_used() -> None:
    rank = Rank()
    arriving = receive_buckets(cast(Group, rank), INFOS, 16)
    assert rank.told == ["begin 1", "begin 2"], "it begins when it is called"
    for bucket in arriving:
        rank.told.append(f"use {bucket[0][0]}")
    assert rank.told[2:6] == ["over 1", "use 0", "begin 3", "over 2"]
    assert max(begun_and_not_over(rank.told)) == 2 and begun_and_not_over(rank.told)[-1] == 0


def test_tensors_keep_their_values_as_long_as_they_are_held() -> None:
    group: Any = Rank()
    held = list(receive(group, INFOS, 32))
    assert [(name, tensor[0].item()) for name, tensor in held] == [("0", 1), ("1", 1), ("2", 2), ("3", 2), ("4", 3)]
