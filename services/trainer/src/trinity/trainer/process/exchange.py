"""Shares what rank 0 learns from the services with the other ranks: bytes and JSON, never pickles (invariant I9).

It uses gloo: a rank that waits in a broadcast of NCCL keeps a kernel running, which takes half the time of an engine on
the same GPU.
"""

import contextlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from trinity.trainer.process.ranks import LONGEST_EXCHANGE, Ranks, read_store
from trinity.weights.group_store import Store

T = TypeVar("T")
Together = Callable[[str], contextlib.AbstractContextManager[object]]  # Control.together
_SHOW_SECONDS = 1.0
_stores: list[Store] = []  # of this process's group, which keeps no reference


def meet_in_store(ranks: Ranks, backend: str) -> None:
    """Forms torch's group of ranks on several machines; does nothing for ranks of one machine or a launcher.

    Raises GroupBroken if the first node's store does not answer.
    """
    if ranks.store_file is None:
        return
    address, secret = read_store(ranks.store_file)
    store = Store.connect(address, secret, LONGEST_EXCHANGE.total_seconds())
    _stores.append(store)
    place = store.prefixed("ranks")
    dist.init_process_group(
        backend, store=place, rank=ranks.rank, world_size=ranks.world_size, timeout=LONGEST_EXCHANGE
    )


class Exchange:
    """Gives every rank the values of rank 0. The constructor and all methods are collectives."""

    def __init__(
        self, ranks: Ranks, timeout: timedelta = LONGEST_EXCHANGE, together: Together = contextlib.nullcontext
    ) -> None:
        """`together`: context in which rank 0 waits for the other ranks."""
        self._ranks = ranks
        self._together = together
        with self._waiting():
            self._group = dist.new_group(backend="gloo", timeout=timeout) if ranks.world_size > 1 else None

    def _waiting(self) -> contextlib.AbstractContextManager[object]:
        return self._together(f"an exchange of {self._ranks.world_size} ranks")

    @property
    def is_first(self) -> bool:
        return self._ranks.is_first

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @property
    def world_size(self) -> int:
        return self._ranks.world_size

    def share(self, value: T) -> T:
        """Returns rank 0's value, of JSON's types."""
        if self.world_size == 1:
            return value
        shared: T = json.loads(self._bytes(json.dumps(value).encode()))
        return shared

    def collect(self, value: T) -> list[T]:
        """Returns the values of all ranks, of JSON's types, in their order."""
        if self.world_size == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        with self._waiting():
            dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
        rows = [torch.empty(max(int(size) for size in sizes), dtype=torch.uint8) for _ in sizes]
        row = torch.zeros_like(rows[0])
        row[: len(data)] = data
        with self._waiting():
            dist.all_gather(rows, row, group=self._group)
        return [json.loads(row[: int(size)].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def collect_when_done(self, work: Callable[[], T]) -> list[T]:
        """Returns the values of `work` of all ranks, in their order. It may take long, and raises nothing.

        Meanwhile the ranks show each other that they live, since a wait in a collective would look like a hang.
        """
        if self.world_size == 1:
            return [work()]
        with ThreadPoolExecutor(1, "work") as thread:
            working = thread.submit(work)
            while True:
                wait([working], _SHOW_SECONDS)
                found = self.collect([working.result()] if working.done() else [])
                if all(found):
                    return [value for (value,) in found]

    def share_when_known(
        self, poll: Callable[[], T | None], encode: Callable[[T], bytes], decode: Callable[[bytes], T]
    ) -> T:
        """Repeats rank 0's `poll` until its result is not None; returns it. `encode` returns at least one byte.

        Every rank joins in each try: torch ends a rank that waits in a collective beyond its timeout.
        """
        while True:
            found = poll() if self.is_first else None
            if self.world_size > 1:
                data = self._bytes(b"" if found is None else encode(found))
                found = decode(data) if data and not self.is_first else found
            if found is not None:
                return found

    def barrier(self) -> None:
        if self.world_size > 1:
            with self._waiting():
                dist.barrier(self._group)

    def _bytes(self, data: bytes) -> bytes:
        size = torch.tensor([len(data)])
        with self._waiting():
            dist.broadcast(size, src=0, group=self._group)
        if not int(size):
            return b""
        payload = torch.empty(int(size), dtype=torch.uint8)
        if self.is_first:
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        with self._waiting():
            dist.broadcast(payload, src=0, group=self._group)
        return payload.numpy().tobytes()
