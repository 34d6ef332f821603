"""Clients of the services for commands. Answers are plain values; refusals are raised as RunError."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc.aio

from trinity.api.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from trinity.api.environment.v1 import environment_pb2, environment_pb2_grpc
from trinity.api.sync.v1 import sync_pb2, sync_pb2_grpc
from trinity.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from trinity.config.run_record import Addresses
from trinity.reading import wire
from trinity.reading.errors import RunError, not_accepted
from trinity.reading.wire import Facts, Letter, Member, VersionRow
from trinity.runtime import rpc
from trinity.runtime.errors import TrinityError, Unauthenticated
from trinity.weights import client as calls
from trinity.weights.client import Call
from trinity.weights.manifest import Manifest
from trinity.weights.pointer import Rollback

_CALL_SECONDS = 60.0
_PROVIDER_SECONDS = 2.0
_REFRESH_SECONDS = 2.0
_END_SECONDS = 0.5  # a process that closed its connections has ended by then
_ALL_VERSIONS = 1_000_000

T = TypeVar("T")


class NoAnswer(RunError):
    """The service is away or too slow, and may be back later."""


async def _ask(
    call: Callable[..., Awaitable[Any]], request: Any, seconds: float = _CALL_SECONDS, *, waits: bool = False
) -> Any:
    """Returns the answer. Raises NoAnswer, or RunError with the reason of a refusal."""
    with _refusals():
        return await rpc.ask(call, request, seconds=seconds, waits=waits)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except Unauthenticated as error:
        raise not_accepted(str(error)) from None
    except rpc.NO_ANSWER as error:
        raise NoAnswer(f"{error}; `trinity status` shows the run") from None
    except TrinityError as error:
        raise RunError(str(error)) from None


class Buffer:
    """The buffer of one run: dead letters, ledger, fences."""

    def __init__(self, channel: grpc.aio.Channel, run: str) -> None:
        self._stub = buffer_pb2_grpc.BufferServiceStub(channel)
        self._run = run

    async def letters(self, limit: int) -> list[Letter]:
        """Returns dead letters, oldest first."""
        request = buffer_pb2.ListDeadLettersRequest(run=self._run, limit=limit)
        return [wire.letter(one) for one in (await _ask(self._stub.ListDeadLetters, request)).dead_letters]

    async def letter(self, ordinal: int) -> Facts:
        """Returns one letter with all fields. Raises RunError if the task has none."""
        request = buffer_pb2.ListDeadLettersRequest(run=self._run, ordinal=ordinal)
        return wire.whole_letter((await _ask(self._stub.ListDeadLetters, request)).dead_letters[0])

    async def retry_letters(self, ordinals: Sequence[int]) -> list[int]:
        request = buffer_pb2.RetryDeadLettersRequest(run=self._run, ordinals=ordinals)
        return list((await _ask(self._stub.RetryDeadLetters, request)).ordinals)

    async def drop_letters(self, ordinals: Sequence[int]) -> list[int]:
        request = buffer_pb2.DropDeadLettersRequest(run=self._run, ordinals=ordinals)
        return list((await _ask(self._stub.DropDeadLetters, request)).ordinals)

    async def newest_step(self) -> int:
        """Returns the newest step with a ledger entry; 0 without entries."""
        return int((await _ask(self._stub.Stats, buffer_pb2.StatsRequest(run=self._run))).ledger_step)

    async def counts(self) -> Facts:
        """Returns the counts in the form of `wire.counts`."""
        return wire.counts(await _ask(self._stub.Stats, buffer_pb2.StatsRequest(run=self._run)))

    async def accounted_entry(self, step: int) -> tuple[Facts, Facts | None]:
        """Returns the ledger entry of a step and its `wire.account`. Raises RunError if there is none."""
        entry = await self._entry(step)
        return wire.batch(entry), wire.account(entry)

    async def entry(self, step: int) -> Facts:
        """Returns the ledger entry of a step in the form of `wire.batch`. Raises RunError if there is none."""
        return wire.batch(await self._entry(step))

    async def entry_with_texts(self, step: int, most: int) -> Facts:
        """Returns the entry with the first `most` experiences of every group, and as many dataset rows."""
        entry = await self._entry(step)
        found = wire.batch(entry) | {"examples": []}
        members = iter(zip(entry.groups, found["groups"], strict=True))
        try:
            async for part in self._parts(step):
                if part.WhichOneof("part") == "group":
                    member, shown = next(members)
                    shown["experiences"] = wire.experiences(member, part.group.outcome)[:most]
                elif part.WhichOneof("part") == "example" and len(found["examples"]) < most:
                    messages = json.loads(part.example.messages_json)
                    found["examples"].append(
                        {"buffer": part.example.buffer, "row": part.example.row, "messages": messages}
                    )
        except RunError as error:
            raise RunError(f"{error}; the ledger's part of step {step} is shown without --texts") from None
        return found

    async def attempts(self, step: int) -> dict[int, Facts]:
        """Returns `wire.attempt` of every group of a step, by ordinal.

        Raises RunError once the log has released them.
        """
        ordinals = iter([group.ordinal for group in (await self._entry(step)).groups])
        parts = [part.group.outcome async for part in self._parts(step) if part.WhichOneof("part") == "group"]
        return {ordinal: wire.attempt(outcome) for ordinal, outcome in zip(ordinals, parts, strict=True)}

    async def _entry(self, step: int) -> buffer_pb2.LedgerEntry:
        request = buffer_pb2.GetLedgerEntryRequest(run=self._run, step=step)
        return (await _ask(self._stub.GetLedgerEntry, request)).entry

    async def _parts(self, step: int) -> AsyncIterator[buffer_pb2.BatchPart]:
        """Yields the parts of a step's batch, without its end."""
        call = self._stub.StreamBatches(buffer_pb2.StreamBatchesRequest(run=self._run, from_step=step))
        try:
            with _refusals(), rpc.translate(self._stub.StreamBatches):
                while (part := await call.read()).WhichOneof("part") != "end":
                    yield part
        finally:
            call.cancel()

    async def entry_content(self, step: int) -> tuple[bytes, str]:
        """Returns the content of an entry, of which its digest is SHA-256, and the digest as the buffer says it."""
        entry = await self._entry(step)
        digest = entry.sha256.hex()
        for name in ("run", "cursor", "cursor_sequence", "floor_sequence", "skip_reason", "sha256"):
            entry.ClearField(name)
        return entry.SerializeToString(deterministic=True), digest

    async def outcomes(self, step: int) -> AsyncIterator[bytes]:
        """Yields the groups of a step as the log has them. Raises RunError once it has released them."""
        async for part in self._parts(step):
            if part.WhichOneof("part") == "group":
                yield part.group.outcome

    async def fork_parts(self, step: int, through_step: int = 0) -> AsyncIterator[bytes]:
        """Yields the encoded parts that a run needs to go on after a step. Raises RunError if some are gone.

        `through_step`: last step whose groups are regraded.
        """
        call = self._stub.Fork(buffer_pb2.ForkRequest(run=self._run, step=step, through_step=through_step))
        with _refusals(), rpc.translate(self._stub.Fork):
            async for part in call:
                yield part.SerializeToString()

    async def skip(self, step: int, reason: str) -> Facts:
        """Marks a step as skipped in the ledger and returns its entry."""
        request = buffer_pb2.SkipStepRequest(run=self._run, step=step, reason=reason)
        return wire.batch((await _ask(self._stub.SkipStep, request)).entry)

    async def rewind(self, step: int) -> None:
        """Raises RunError unless the experience after a step still exists."""
        await _ask(self._stub.Rewind, buffer_pb2.RewindRequest(run=self._run, step=step))

    async def fenced(self) -> int:
        """Returns how many groups fences have dropped. Returns 0 if the buffer does not answer; it fences later."""
        try:
            stats = await _ask(self._stub.Stats, buffer_pb2.StatsRequest(run=self._run))
        except RunError:
            return 0
        return int(stats.dropped.get("fenced", 0))

    async def waiting_after(self, version: int) -> int | None:
        """Returns `wire.waiting_after`; None if the buffer does not answer."""
        try:
            return wire.waiting_after(await self.counts(), version)
        except RunError:
            return None

    async def fence(self, versions: range, seconds: float) -> int:
        """Keeps the experience of versions out of later batches. Returns how many groups all fences have dropped."""
        request = buffer_pb2.FenceRequest(run=self._run, versions=versions)
        return int((await _ask(self._stub.Fence, request, seconds)).dropped)


class Sync:
    """The sync service of one run: versions and explorers."""

    def __init__(self, channel: grpc.aio.Channel, run: str) -> None:
        self._stub = sync_pb2_grpc.SyncServiceStub(channel)
        self._run = run

    async def _send(self, call: Call[T], seconds: float = _CALL_SECONDS) -> T:
        return call.read(await _ask(getattr(self._stub, call.method), call.of_run(self._run), seconds))

    async def versions(self, limit: int = _ALL_VERSIONS, seconds: float = _CALL_SECONDS) -> list[VersionRow]:
        """Returns the newest versions, newest first."""
        return [wire.version_row(one) for one in await self._send(calls.versions(limit), seconds)]

    async def version(self, number: int) -> Facts:
        """Returns all fields of one version. Raises RunError if there is none."""
        return wire.whole_version(await self._send(calls.version(number)))

    async def members(self) -> list[Member]:
        request = sync_pb2.ListMembersRequest(run=self._run)
        return [wire.member(one) for one in (await _ask(self._stub.ListMembers, request)).members]

    async def pin(self, number: int, pinned: bool) -> None:
        await self._send(calls.pin(number, pinned))

    async def roll_back(
        self, number: int, keep_experience: bool, reason: str
    ) -> tuple[Rollback | None, tuple[int, ...]]:
        """The rollback, and the versions that it withdrew; None: the version is LIVE without one."""
        return await self._send(calls.roll_back(number, keep_experience, reason))

    async def publish(self, manifest: Manifest) -> None:
        """Makes a manifest the LIVE version; waits until the service serves."""
        call = calls.publish(manifest)
        await _ask(self._stub.Publish, call.request, call.seconds, waits=True)


class ScorerEnded(RunError):
    """The process of the scoring function ended, perhaps by another call."""


class Scorers:
    """The scoring functions of an environment service.

    `serve` starts the service if it has ended, and returns how often it was started.
    """

    def __init__(self, channel: grpc.aio.Channel, reward_bound: float, serve: Callable[[], Awaitable[int]]) -> None:
        self._stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        self._reward_bound = reward_bound
        self._serve = serve

    async def score(self, name: str, items: Sequence[Facts], args_json: str) -> list[tuple[float, dict[str, float]]]:
        """Returns reward and metrics of each item, in the fields of ScoreItem.

        Raises ScorerEnded, or RunError if an item has no score.
        """
        starts = await self._serve()
        request = environment_pb2.ScoreRequest(
            scorer=name,
            items=[environment_pb2.ScoreItem(**item) for item in items],
            args_json=args_json,
            reward_bound=self._reward_bound,
        )
        try:
            scores = (await _ask(self._stub.Score, request)).scores
        except NoAnswer as error:
            await asyncio.sleep(_END_SECONDS)
            if await self._serve() != starts:
                raise ScorerEnded(f"{name} ended its process") from None
            raise RunError(f"{name}: {error}") from None
        if problem := next((one.error for one in scores if one.error), ""):
            raise RunError(f"{name}: {problem}")
        if len(scores) != len(items):
            raise RunError(f"{name}: the environment service gave {len(scores)} scores for {len(items)} answers")
        return [(one.reward, dict(one.metrics)) for one in scores]


async def provider_facts(service: str, named: list[tuple[str, str]]) -> list[Facts]:
    """Returns the known facts of each provider: those attached to the environment service, and (name, address) of the
    YAML.

    `health`: serving, failing or away. `since_seconds` (Unix time) is None if only the present state is known. A name
    that is to attach and has no provider yet is away.
    """
    found, problem = await _described(service, "own")
    facts = [
        _fact(one.provider, _health(one.health), [*one.environments, *one.scorers], one.reason, one.since_seconds)
        for one in (found.providers if found else ())
    ]
    brought = {name for one in facts for name in one["offers"]}
    for name, address in named:
        if address == "attached" and name not in brought:
            facts.append(_fact(name, "away", [name], problem or "no provider has brought it yet"))
    for address in dict.fromkeys(address for _, address in named if address != "attached"):
        _, problem = await _described(address, None)  # not the run's: it must not learn a token
        offers = [name for name, there in named if there == address]
        facts.append(_fact(address, "away" if problem else "serving", offers, problem))
    return facts


def _fact(provider: str, health: str, offers: list[str], reason: str, since: float | None = None) -> Facts:
    return {"provider": provider, "health": health, "since_seconds": since, "offers": offers, "reason": reason}


async def _described(address: str, identity: rpc.Shown) -> tuple[Any, str]:
    """Returns a provider's offer, or None and the reason why it does not answer."""
    async with rpc.channel(address, identity=identity) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        try:
            return await rpc.ask(stub.Describe, environment_pb2.DescribeRequest(), seconds=_PROVIDER_SECONDS), ""
        except TrinityError as error:
            return None, f"{address} does not answer ({error.code.name})"


def _health(number: int) -> str:
    """Returns serving, failing or away."""
    name = environment_pb2.ProviderHealth.Name(number)
    return name.removeprefix("PROVIDER_HEALTH_").lower()


@dataclass
class Answers:
    """The newest answers; None for a service that has not answered yet."""

    buffer: buffer_pb2.StatsResponse | None = None
    trainer: trainer_pb2.StatusResponse | None = None
    members: list[sync_pb2.Member] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return sum(member.tokens_per_second for member in self.members)

    @property
    def waiting_for(self) -> str:
        """Describes the trainer's wait. While no explorer serves, no group can come, so it waits for an explorer."""
        if self.trainer is None or self.trainer.state != "waiting":
            return ""
        fed = self.buffer is not None and self.buffer.fed and self.buffer.live_step >= 0
        if fed and self.trainer.step < self.trainer.last_step and not any(one.version >= 0 for one in self.members):
            return "an explorer: none serves the weights yet" if self.members else "an explorer: none has joined yet"
        return self.trainer.waiting_for

    @property
    def finished(self) -> bool:
        return self.buffer is not None and self.buffer.finished


class Watcher:
    """Polls the services of one stage, and keeps the last answer of each."""

    def __init__(self, run: str, addresses: Addresses) -> None:
        self._run = run
        self.view = Answers()
        self._refused = ""
        self._channels: list[grpc.aio.Channel] = []
        self._buffer = self._open(addresses.buffer, buffer_pb2_grpc.BufferServiceStub)
        self._sync = self._open(addresses.sync, sync_pb2_grpc.SyncServiceStub)
        self._trainer = self._open(addresses.trainer, trainer_pb2_grpc.TrainerServiceStub)

    def _open(self, address: str, stub: Callable[[grpc.aio.Channel], Any]) -> Any:
        """Returns a service's stub; None without an address."""
        if not address:
            return None
        self._channels.append(rpc.channel(address))
        return stub(self._channels[-1])

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def refresh(self) -> Answers:
        """Polls every service once. A service that does not answer keeps its last answer, except for members."""
        stats, status, members = await asyncio.gather(
            self._answer(self._buffer, "Stats", buffer_pb2.StatsRequest(run=self._run)),
            self._answer(self._trainer, "Status", trainer_pb2.StatusRequest()),
            self._answer(self._sync, "ListMembers", sync_pb2.ListMembersRequest(run=self._run)),
        )
        self.view.buffer, self.view.trainer = stats or self.view.buffer, status or self.view.trainer
        self.view.members = list(members.members) if members is not None else []
        return self.view

    async def save_checkpoint(self, wait_seconds: float) -> int | None:
        """Makes the trainer save a checkpoint. Returns the step of its newest one; None at the timeout."""
        answer = await self._answer(self._trainer, "Checkpoint", trainer_pb2.CheckpointRequest(), wait_seconds)
        return int(answer.step) if answer is not None else None

    async def versions(self) -> int:
        """Returns how many weight versions the run has made, with the base model."""
        request = sync_pb2.ListVersionsRequest(run=self._run, limit=_ALL_VERSIONS)
        answer = await self._answer(self._sync, "ListVersions", request, 10)
        return len(answer.versions) if answer is not None else 0

    async def rewards(self, last_step: int, count: int) -> tuple[float | None, float | None]:
        """Returns the mean reward over the first and over the last `count` steps."""
        if last_step < 1:
            return None, None
        count = max(1, min(count, last_step // 2))
        first = await self._reward_mean(range(1, count + 1))
        return first, await self._reward_mean(range(last_step - count + 1, last_step + 1))

    async def _reward_mean(self, steps: range) -> float | None:
        values = []
        for step in steps:
            request = buffer_pb2.GetLedgerEntryRequest(run=self._run, step=step)
            answer = await self._answer(self._buffer, "GetLedgerEntry", request, 10)
            if answer is not None and answer.entry.groups:
                values.append(answer.entry.reward_mean)
        return sum(values) / len(values) if values else None

    def raise_if_refused(self) -> None:
        """Raises RunError if a service rejected the identity of this process."""
        if self._refused:
            raise not_accepted(self._refused)

    async def _answer(self, stub: Any, method: str, request: Any, seconds: float = _REFRESH_SECONDS) -> Any:
        """Returns None for a service that does not answer, or has no address."""
        if stub is None:
            return None
        try:
            return await rpc.ask(getattr(stub, method), request, seconds=seconds)
        except Unauthenticated as error:
            self._refused = str(error)
        except TrinityError:
            pass
        return None
