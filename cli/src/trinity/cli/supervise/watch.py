"""The current state of a run, from its services."""

import asyncio
from dataclasses import dataclass, field

import grpc
import grpc.aio

from trinity.api.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from trinity.api.sync.v1 import sync_pb2, sync_pb2_grpc
from trinity.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from trinity.cli.supervise.services import Addresses
from trinity.cli.tail import visible
from trinity.runtime import rpc

_CALL_SECONDS = 2.0
_SHOWN_ERROR = 200  # characters


@dataclass
class View:
    """The newest answers; None where a service has not answered yet or cannot now."""

    buffer: buffer_pb2.StatsResponse | None = None
    trainer: trainer_pb2.StatusResponse | None = None
    members: list[sync_pb2.Member] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return sum(member.tokens_per_second for member in self.members)

    @property
    def finished(self) -> bool:
        return self.buffer is not None and self.buffer.finished


def failing(stats: buffer_pb2.StatsResponse) -> str:
    """How many attempts failed since the buffer started, their commonest cause and the newest error; else empty."""
    if not stats.failure_causes:
        return ""
    cause = max(stats.failure_causes, key=lambda name: (stats.failure_causes[name], name))
    count = sum(stats.failure_causes.values())
    error = visible(" ".join(stats.last_failure.split()))[:_SHOWN_ERROR]
    return f"{count} attempts failed, mostly of {visible(cause)}; the newest: {error}"


class Watcher:
    """Asks the services of one stage. Keeps the last answer of each."""

    def __init__(self, run: str, addresses: Addresses) -> None:
        self._run = run
        self.view = View()
        self._channels: list[grpc.aio.Channel] = []
        self._buffer = buffer_pb2_grpc.BufferServiceStub(self._open(addresses.buffer)) if addresses.buffer else None
        self._sync = sync_pb2_grpc.SyncServiceStub(self._open(addresses.sync)) if addresses.sync else None
        trainer = addresses.trainer
        self._trainer = trainer_pb2_grpc.TrainerServiceStub(self._open(trainer)) if trainer else None

    def _open(self, address: str) -> grpc.aio.Channel:
        channel = rpc.channel(address)
        self._channels.append(channel)
        return channel

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def refresh(self) -> View:
        """Ask every service once. A service that does not answer keeps its last answer, members excepted."""
        await asyncio.gather(self._ask_buffer(), self._ask_trainer(), self._ask_sync())
        return self.view

    async def _ask_buffer(self) -> None:
        if self._buffer is not None:
            request = buffer_pb2.StatsRequest(run=self._run)
            self.view.buffer = await _or_none(self._buffer.Stats(request, timeout=_CALL_SECONDS)) or self.view.buffer

    async def _ask_trainer(self) -> None:
        if self._trainer is not None:
            request = trainer_pb2.StatusRequest()
            answer = await _or_none(self._trainer.Status(request, timeout=_CALL_SECONDS))
            self.view.trainer = answer or self.view.trainer

    async def _ask_sync(self) -> None:
        if self._sync is not None:
            request = sync_pb2.ListMembersRequest(run=self._run)
            answer = await _or_none(self._sync.ListMembers(request, timeout=_CALL_SECONDS))
            self.view.members = list(answer.members) if answer is not None else []

    async def versions(self) -> int:
        """Weight versions the run has made, the base model included."""
        if self._sync is None:
            return 0
        request = sync_pb2.ListVersionsRequest(run=self._run, limit=1_000_000)
        answer = await _or_none(self._sync.ListVersions(request, timeout=10))
        return len(answer.versions) if answer is not None else 0

    async def rewards(self, last_step: int, count: int) -> tuple[float | None, float | None]:
        """Mean reward over the first and over the last `count` steps."""
        if self._buffer is None or last_step < 1:
            return None, None
        count = max(1, min(count, last_step // 2))
        first = await self._reward_mean(range(1, count + 1))
        return first, await self._reward_mean(range(last_step - count + 1, last_step + 1))

    async def _reward_mean(self, steps: range) -> float | None:
        assert self._buffer is not None
        values = []
        for step in steps:
            request = buffer_pb2.GetLedgerEntryRequest(run=self._run, step=step)
            answer = await _or_none(self._buffer.GetLedgerEntry(request, timeout=10))
            if answer is not None and answer.entry.groups:
                values.append(answer.entry.reward_mean)
        return sum(values) / len(values) if values else None


async def _or_none(call):  # type: ignore[no-untyped-def]
    try:
        return await call
    except grpc.aio.AioRpcError:
        return None
