"""The context of one run, shared by the parts of the buffer: its names, its LIVE version, an event for every change."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import cached_property

import structlog

from trinity.buffer.window.groups import Lineage
from trinity.config import Plan
from trinity.config.experts import mixture_of
from trinity.config.memory import vocabulary_of
from trinity.data.experience import Limits
from trinity.data.vision import image_rules
from trinity.runtime.broker import Broker, Bucket, Entry
from trinity.runtime.errors import DataLoss
from trinity.runtime.names import RunNames
from trinity.weights.pointer import Live, Rollback, decode_live, verdict_of
from trinity.weights.wire import VersionState

log = structlog.get_logger(__name__)

# A replica of KV hears of what was written from the bucket's leader, which tells it once a second at least.
_BEHIND_SECONDS, _AGAIN_SECONDS = 3.0, 0.1

# A version that the trainer has published by then is LIVE, or never will be.
_RETURN_SECONDS = 30.0

# Part of the log's limit that is given away in advance, to tasks whose groups are not there yet.
_SAFE = 0.8


class ChangeEvent:
    """Notified at every change of state; waiters check their condition again."""

    def __init__(self) -> None:
        self._condition = asyncio.Condition()

    async def notify(self) -> None:
        async with self._condition:
            self._condition.notify_all()

    async def wait_for(self, holds: Callable[[], bool], timeout_seconds: float | None = None) -> bool:
        """Until `holds()`; False after the timeout."""
        try:
            async with asyncio.timeout(timeout_seconds), self._condition:
                await self._condition.wait_for(holds)
            return True
        except TimeoutError:
            return False


@dataclass
class LogCapacity:
    """Fill of the log at the last look. `ended`: tasks that had ended by then.

    `is_low`: tasks wait until a newer checkpoint or an archive lets the log be cut. `blobs_limit_bytes`: limit of all
    blobs; blobs of evaluations do not count as log.
    """

    limit_bytes: int = 0
    blobs_limit_bytes: int = 0
    bytes: int = 0
    entries: int = 0
    ended: int = 0
    is_low: bool = False

    def has_room_for(self, fed: int, longest: int) -> bool:
        """Returns True if the groups of `fed` tasks fit, assuming 1.25 times the usual length.

        `longest`: most bytes of a group, used until the first group is stored.
        """
        usual = self._usual if self.entries else longest
        return self.bytes + (fed - self.ended) * usual <= _SAFE * self.limit_bytes

    @property
    def is_full(self) -> bool:
        """True if not even one further group fits."""
        return self.entries > 0 and self.bytes + self._usual > self.limit_bytes

    @property
    def _usual(self) -> float:
        return 1.25 * self.bytes / self.entries


@dataclass(frozen=True)
class Origin:
    """Where a fork begins: the last shared step, the number of tasks fed by then, and the tasksets' position."""

    step: int
    fed: int = 0
    position: int = 0


@dataclass
class RunContext:
    """One run in this process. `last_step` is where it ends; `fed` counts training tasks. `origin`: of a fork.

    `live` is the pointer of its versions as this process heard of it last; rollbacks up to number `fenced_through` are
    fenced. `wanted_step` is the newest step that the trainer requested. Log entries up to sequence `stored_before` were
    there when this process began, and ledger entries up to step `written_before`. `holds`: why the log is not
    read further now.
    """

    broker: Broker
    names: RunNames
    plan: Plan
    origin: Origin | None = None
    last_step: int = 0
    live: Live = field(default_factory=Live)
    stored_before: int = 0
    written_before: int = 0
    holds: str = ""
    fenced_through: int = 0
    committed_step: int = 0
    fed: int = 0
    wanted_step: int = 0
    capacity: LogCapacity = field(default_factory=LogCapacity)
    changed: ChangeEvent = field(default_factory=ChangeEvent)
    _waits: list[tuple[int, float]] = field(default_factory=list)  # step, and since when: of the trainer's streams

    @contextlib.asynccontextmanager
    async def wanted(self, step: int, ahead: bool = False) -> AsyncIterator[None]:
        """While a stream of the trainer's waits for a step. `ahead`: the trainer has others to train until then."""
        wait = step, time.monotonic()
        if not ahead:
            self._waits.append(wait)
        try:
            if step > self.wanted_step:
                self.wanted_step = step
                await self.changed.notify()
            yield
        finally:
            if not ahead:
                self._waits.remove(wait)

    def wanted_since(self, step: int | None = None) -> float | None:
        """Since when the trainer waits for this very step, or for any, in monotonic seconds; None: it does not.

        By its newest stream: one whose trainer died may last for a while.
        """
        return max((since for wanted, since in self._waits if step in (None, wanted)), default=None)

    @property
    def run(self) -> str:
        return self.names.run

    @cached_property
    def limits(self) -> Limits:
        """Limits of a group of this run. Reads the model's config.json once, if this machine has it."""
        advantage = self.plan.algorithm.advantage
        read = advantage.args.get("step_reward_key") if advantage is not None else None
        model, explorer = self.plan.config.model, self.plan.config.explorer
        numbers = (read,) if isinstance(read, str) else ()
        teacher = "teacher" in self.plan.algorithm.advantage_traits
        return Limits(
            self.plan.lengths.model, vocabulary_of(model.model_path), numbers, teacher,
            image_rules(model.model_path, model.images), explorer.reward_bound, explorer.logprob_bound,
            mixture_of(model.model_path), self.plan.algorithm.teacher_top,
        )  # fmt: skip

    @property
    def live_step(self) -> int:
        """Optimizer step of the LIVE version; -1 until there is one. It falls at a rollback."""
        return self.live.step

    @property
    def newest_live_step(self) -> int:
        """The newest step whose weights may ever have been LIVE; -1 for none."""
        return max([self.live.step, *(newest for _, newest in self.live.withdrawn)])

    @property
    def lineage(self) -> Lineage:
        return Lineage.of(self.live)

    @property
    def unfenced(self) -> Rollback | None:
        """The oldest rollback whose experience is to be kept out of batches, and is not yet."""
        due = (r for r in self.live.rollbacks if r.number > self.fenced_through and not r.keep_experience)
        return next(due, None)


class LiveVersions:
    """Keeps the pointer in the context, and answers what groups may say of versions."""

    def __init__(self, context: RunContext, versions: Bucket) -> None:
        self._context = context
        self._versions = versions
        self._rejected: set[int] = set()
        self._revision = 0
        self._caught_up_at: int | None = None  # sequence of the bucket that every replica has had the time to hear of

    async def look(self) -> Live:
        """The pointer as KV has it now."""
        entry = await self._versions.get(self._context.names.live_key)
        await self._take(entry)
        return self._context.live

    async def follow(self) -> None:
        async for entry in self._versions.watch(self._context.names.live_key):
            await self._take(entry)

    async def _take(self, entry: Entry) -> None:
        if entry.revision < self._revision:
            return  # of a replica that is behind
        self._revision = entry.revision
        try:
            live = decode_live(entry.value)
        except DataLoss as error:  # sync writes what it was once more
            log.warning("buffer.live.refused", reason=str(error), version=self._context.live.version)
            return
        if live == self._context.live:
            return
        if live.rollback is not None and live.rollback != self._context.live.rollback:
            log.warning("buffer.rollback.received", number=live.rollback.number, version=live.rollback.version)
        self._context.live = live
        await self._context.changed.notify()

    async def was_live(self, version: int) -> bool:
        """Returns True if a version may have sampled tokens: it is VERIFIED or no newer than the newest ever LIVE.

        Sync writes the record of a VERIFIED version before the pointer, so a group of it may be read between the two.
        """
        if version <= self._context.newest_live_step:
            return True

        async def is_known() -> bool:
            await self.look()
            known = version <= self._context.newest_live_step
            return known or await self._verdict(version) is VersionState.VERIFIED

        return await self._is_soon(is_known)

    async def returns(self, version: int) -> bool:
        """Waits while a version that KV does not know may become LIVE again. Returns True if it did.

        A store that lost its newest writes has entries of the log whose versions it has forgotten. The trainer learns
        the steps of the ledger again, and publishes their versions. Once it waits for a batch of a later step, no
        version that it can publish is missing.
        """
        try:
            while not await self.was_live(version):
                since = self._context.wanted_since()
                if since is not None and time.monotonic() - since > _RETURN_SECONDS:
                    return False
                if not self._context.holds:
                    log.warning("buffer.version.awaited", version=version, live=self._context.newest_live_step)
                self._context.holds = (
                    f"a stored group names version {version}, the newest that KV knows is "
                    f"{self._context.newest_live_step}: waiting until the trainer has published it again"
                )
                await asyncio.sleep(_AGAIN_SECONDS)
            return True
        finally:
            self._context.holds = ""

    async def meets(self, version: int, gate_step: int) -> bool:
        """Returns True if a version may start a task with this gate.

        An older version may, if the gate's own version was rejected or withdrawn.
        """
        if version >= gate_step or self._passed_over(gate_step):
            return True

        async def is_passed_over() -> bool:
            await self.look()
            return self._passed_over(gate_step) or await self._was_rejected(gate_step)

        return await self._is_soon(is_passed_over)

    async def _is_soon(self, holds: Callable[[], Awaitable[bool]]) -> bool:
        """Returns True if a condition on KV holds now or soon: a replica may be behind until there is a leader.

        Waits at most once per write to the bucket, so refused groups do not delay the log.
        """
        if await holds():
            return True
        newest = await self._versions.leader_sequence()
        if newest == self._caught_up_at:
            return await holds()
        deadline = time.monotonic() + _BEHIND_SECONDS
        while newest is not None and time.monotonic() < deadline:
            await asyncio.sleep(_AGAIN_SECONDS)
            if await holds():
                return True
        self._caught_up_at = newest
        return False

    def _passed_over(self, gate_step: int) -> bool:
        live = self._context.live
        return live.is_withdrawn(gate_step) or live.step < gate_step <= live.gate_step

    async def _was_rejected(self, version: int) -> bool:
        """Returns True if the version of a gate was ever rejected: sync keeps the record for ever."""
        if version not in self._rejected and await self._verdict(version) is VersionState.REJECTED:
            self._rejected.add(version)
        return version in self._rejected

    async def _verdict(self, version: int) -> VersionState | None:
        """Returns the verdict in the record of a version; None without a readable one."""
        entry = await self._versions.get(self._context.names.version_key(version))
        with contextlib.suppress(DataLoss):
            return verdict_of(entry.value)
        return None
