"""The current state of a run, from its services, and whether a provider plays what a YAML gives it."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from trinity.api.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from trinity.api.environment.v1 import environment_pb2, environment_pb2_grpc
from trinity.api.sync.v1 import sync_pb2, sync_pb2_grpc
from trinity.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from trinity.cli.errors import RunError, not_accepted
from trinity.cli.render import visible
from trinity.config.run_record import Addresses
from trinity.data.experience import Task
from trinity.data.wire import task_to_proto
from trinity.runtime import rpc
from trinity.runtime.errors import Conflict, InvalidInput, NotFound, TimedOut, TrinityError, Unavailable
from trinity.runtime.trust.identity import Identity
from trinity.sdk.conformance.result import Broken
from trinity.sdk.conformance.stream import Refused, Stream
from trinity.sdk.contract import score_problem

_CALL_SECONDS = 2.0
_SHOWN_ERROR, _LONGEST_REFUSAL = 200, 500  # characters
_DESCRIBE_SECONDS, _SCORE_SECONDS = 5.0, 60.0


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


def prompts_cut(stats: buffer_pb2.StatsResponse) -> str:
    """How many prompts were longer than model.max_prompt_tokens, and what becomes of them; empty if none was."""
    if not stats.prompts_cut:
        return ""
    if every_prompt_is_cut(stats):
        return (
            f"all {stats.stored} prompts are longer than model.max_prompt_tokens, so no token is trained: stop the "
            "run, and raise model.max_prompt_tokens or shorten the prompts (`trinity check --deep` measures them)"
        )
    return (
        f"{stats.prompts_cut} of {stats.stored} prompts are longer than model.max_prompt_tokens: they were cut, and "
        "nothing of them is trained"
    )


def every_prompt_is_cut(stats: buffer_pb2.StatsResponse) -> bool:
    """Whether the prompts of the first batch, and all since, were cut."""
    return 0 < max(1, stats.groups_per_step) <= stats.stored == stats.prompts_cut


class Watcher:
    """Asks the services of one stage. Keeps the last answer of each."""

    def __init__(self, run: str, addresses: Addresses) -> None:
        self._run = run
        self.view = View()
        self._refused = ""
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
            self.view.buffer = (
                await self._or_none(self._buffer.Stats(request, timeout=_CALL_SECONDS)) or self.view.buffer
            )

    async def _ask_trainer(self) -> None:
        if self._trainer is not None:
            request = trainer_pb2.StatusRequest()
            answer = await self._or_none(self._trainer.Status(request, timeout=_CALL_SECONDS))
            self.view.trainer = answer or self.view.trainer

    async def _ask_sync(self) -> None:
        if self._sync is not None:
            request = sync_pb2.ListMembersRequest(run=self._run)
            answer = await self._or_none(self._sync.ListMembers(request, timeout=_CALL_SECONDS))
            self.view.members = list(answer.members) if answer is not None else []

    async def save_checkpoint(self, wait_seconds: float) -> int | None:
        """Have the trainer save what it has learnt. The step of its newest checkpoint; None if it did not in time."""
        assert self._trainer is not None
        request = trainer_pb2.CheckpointRequest()
        answer = await self._or_none(self._trainer.Checkpoint(request, timeout=wait_seconds))
        return int(answer.step) if answer is not None else None

    async def versions(self) -> int:
        """Weight versions the run has made, the base model included."""
        if self._sync is None:
            return 0
        request = sync_pb2.ListVersionsRequest(run=self._run, limit=1_000_000)
        answer = await self._or_none(self._sync.ListVersions(request, timeout=10))
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
            answer = await self._or_none(self._buffer.GetLedgerEntry(request, timeout=10))
            if answer is not None and answer.entry.groups:
                values.append(answer.entry.reward_mean)
        return sum(values) / len(values) if values else None

    def raise_if_refused(self) -> None:
        """RunError if a service did not know this process as one of the run."""
        if self._refused:
            raise not_accepted(self._refused)

    async def _or_none(self, call):  # type: ignore[no-untyped-def]
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                self._refused = str(error.details())
            return None


async def publish_joined(
    address: str, run: str, name: str, weight: float, first: int, tasks: Sequence[Task], seconds: float
) -> int:
    """Offer tasks of an explorer's own taskset to a run's buffer for `seconds`; the position after those that it fed.

    Unavailable if the buffer cannot be reached; RunError if it refuses the taskset.
    """
    joined = buffer_pb2.JoinedTaskset(name=name, weight=weight, first_position=first)
    request = buffer_pb2.PublishTasksRequest(run=run, tasks=map(task_to_proto, tasks), joined=joined)
    async with rpc.channel(address) as channel:
        try:
            answer = await buffer_pb2_grpc.BufferServiceStub(channel).PublishTasks(request, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            refused = (
                grpc.StatusCode.FAILED_PRECONDITION,
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.PERMISSION_DENIED,
                grpc.StatusCode.UNAUTHENTICATED,
            )
            if error.code() in refused:
                raise RunError(visible(str(error.details()))[:_LONGEST_REFUSAL], code=2) from None
            raise Unavailable(str(error.details())) from None
        return int(answer.position)


async def try_provider(
    address: str, name: str, row: dict[str, Any], args: dict[str, Any], identity: Identity | None
) -> tuple[Exception | None, bool]:
    """Begin an episode of a dataset's row, or have an empty reply to it scored: what went wrong, or None; and whether
    it announces images."""
    shows = False
    async with rpc.channel(address, identity=identity) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        task, given = json.dumps(row), json.dumps(args)
        try:
            offer = await stub.Describe(environment_pb2.DescribeRequest(), timeout=_DESCRIBE_SECONDS)
            if described := next((one for one in offer.environments if one.name == name), None):
                shows = described.images
                async with Stream(stub, described) as stream:
                    reset = environment_pb2.Reset(environment=name, task_json=task, args_json=given, images=shows)
                    await stream.reset(reset)
                return None, shows
            if name not in offer.scorers:
                known = ", ".join(sorted([*(one.name for one in offer.environments), *offer.scorers])) or "nothing"
                return NotFound(f"it offers {known}"), shows
            items = [environment_pb2.ScoreItem(task_json=task)]
            request = environment_pb2.ScoreRequest(scorer=name, items=items, args_json=given)
            answer = await stub.Score(request, timeout=_SCORE_SECONDS)
            problem = score_problem(request, answer) or answer.scores[0].error
            return (TrinityError(problem) if problem else None), shows
        except (Refused, Broken) as error:
            return (_error_of(name, error.code, error.details) if isinstance(error, Refused) else error), shows
        except grpc.aio.AioRpcError as error:
            return _error_of(name, error.code(), str(error.details())), shows


def _error_of(name: str, code: grpc.StatusCode, details: str) -> Exception:
    """The exception that a status stands for; of INVALID_ARGUMENT the field is what stands before the colon."""
    details = details.removeprefix(f"{name}: ")  # of an attached provider
    field, colon, problem = details.partition(": ")
    if code is grpc.StatusCode.INVALID_ARGUMENT and colon:
        return InvalidInput(field, problem)
    kinds = (Conflict, NotFound, TimedOut, Unavailable)
    return next((kind(details) for kind in kinds if kind.code is code), TrinityError(f"{code.name}: {details}"))
