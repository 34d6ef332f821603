"""Reads and validates the experience log: bytes, fields, versions. Runs the operators, keeps the newest payloads."""

import itertools
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import replace

from trinity.buffer.log.wire import LogEntry, TaskMessage
from trinity.buffer.operators.pipeline import Pipeline, Processed
from trinity.buffer.state.context import LiveVersions, RunContext
from trinity.buffer.window.groups import Kept, StoredGroup
from trinity.data.experience import LONGEST_NAME, AttemptFailure, Limits, is_number, reward_problem
from trinity.runtime import headers
from trinity.runtime.broker import Message, StoredMessage, blobs
from trinity.runtime.errors import DataLoss, InvalidInput, NotFound
from trinity.runtime.names import RunNames, owner_of

# Far more than lie between two checkpoints; their list is part of every later cursor.
MOST_FENCED = 10_000
_SHOWN = 80


class LogReader:
    """Reads payloads by sequence, and checks them. Up to `cache_bytes` that the trainer still needs stay in memory."""

    def __init__(self, context: RunContext, cache_bytes: int) -> None:
        self._context = context
        self._cache: OrderedDict[int, tuple[bytes, str]] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._cached = 0

    async def take(self, message: Message | StoredMessage) -> LogEntry:
        """The entry in a message of the log, whole. Raises InvalidInput."""
        return (await self._whole(message))[0]

    async def take_for_batch(self, message: Message) -> LogEntry:
        """Like `take`. A group's payload stays in memory, until `forget`."""
        entry, payload = await self._whole(message)
        if entry.kind == "group":
            self._remember(message.sequence, payload)
        return entry

    async def _whole(self, message: Message | StoredMessage) -> tuple[LogEntry, tuple[bytes, str]]:
        data = message.data
        if message.headers.get(headers.CRC32) not in (None, str(zlib.crc32(data))):
            data = await self._once_more(message.sequence)
        entry, data = await whole_entry(self._context, message.subject, data)
        return entry, (data, message.headers.get(headers.TRACEPARENT, ""))

    async def _once_more(self, sequence: int) -> bytes:
        """The payload of an entry whose checksum was wrong, from another replica perhaps. InvalidInput if it stays."""
        try:
            message = await self._context.broker.get(self._context.names.experiences_stream, sequence)
        except NotFound:
            raise InvalidInput("checksum", f"of log entry {sequence} is another than its payload's") from None
        expected, found = message.headers.get(headers.CRC32), zlib.crc32(message.data)
        if expected != str(found):
            raise InvalidInput("checksum", f"of log entry {sequence} is {expected}, of its payload {found}")
        return message.data

    async def payload(self, sequence: int) -> tuple[bytes, str]:
        """A stored group as it was stored, and its trace context. DataLoss if the log does not hold it any more."""
        if sequence in self._cache:
            return self._cache[sequence]
        stream = self._context.names.experiences_stream
        try:
            message = await self._context.broker.get(stream, sequence)
        except NotFound:
            raise DataLoss(f"{stream} {sequence}: the group is gone") from None
        try:
            entry, payload = await self._whole(message)
        except InvalidInput as error:
            raise DataLoss(f"{stream} {sequence}: {error}") from None
        if entry.kind != "group":
            raise DataLoss(f"{stream} {sequence} is no group")
        return payload

    def forget(self, sent: Iterable[int], below: int) -> None:
        """Lets go of the groups that were sent to the trainer, and of all below a sequence, which no batch will use."""
        for sequence in [*sent, *itertools.takewhile(lambda sequence: sequence < below, self._cache)]:
            if sequence in self._cache:
                self._cached -= len(self._cache.pop(sequence)[0])

    def _remember(self, sequence: int, payload: tuple[bytes, str]) -> None:
        self._cache[sequence] = payload
        self._cached += len(payload[0])
        while self._cached > self._cache_bytes and len(self._cache) > 1:
            _, (gone, _) = self._cache.popitem(last=False)
            self._cached -= len(gone)


async def whole_entry(context: RunContext, subject: str, data: bytes) -> tuple[LogEntry, bytes]:
    """The entry in a payload, or in the blob that it refers to, and its own payload. Raises InvalidInput."""
    entry = LogEntry.parse(data)
    if entry.kind != "blob":
        return entry, data
    if not (owner := context.names.owner_in(subject)):
        raise InvalidInput("subject", f"is {subject}; a blob is an explorer's and lies under the explorer's subjects")
    reference = entry.reference
    try:
        data = await blobs.fetch(context.broker, context.names, owner, reference)
    except NotFound as error:
        raise InvalidInput("blob", f"{reference.key} is not there: {error}") from None
    entry = LogEntry.parse(data)
    if entry.kind not in ("group", "failure"):
        raise InvalidInput("blob", f"holds {entry.kind or 'nothing'}; only groups and failures lie in blobs")
    return entry, data


def check_owner(names: RunNames, subject: str, entry: LogEntry) -> None:
    """Raises InvalidInput unless the outcome is of the explorer below whose subjects it lies, or of the buffer.

    NATS lets an explorer publish only below its own subjects.
    """
    if entry.kind not in ("group", "failure"):
        if subject != names.control:
            raise InvalidInput(
                "subject", f"is {subject}; a {entry.kind} is the buffer's own and lies under {names.control}"
            )
        return
    explorer_id, owner = entry.explorer_id, names.owner_in(subject)
    if owner != owner_of(explorer_id):
        named = repr(explorer_id[:LONGEST_NAME])
        raise InvalidInput(
            "explorer_id", f"is {named}, but the entry lies under the subject of {owner or 'the buffer'}"
        )


class EntryValidator:
    """Knows nothing of batches. `fed_task` finds the task of an ordinal (and taskset) as it was fed (NotFound)."""

    def __init__(
        self,
        context: RunContext,
        reader: LogReader,
        pipeline: Pipeline,
        fed_task: Callable[..., Awaitable[TaskMessage]],
        versions: LiveVersions,
    ) -> None:
        self._context = context
        self.reader = reader
        self.pipeline = pipeline
        self._fed_task = fed_task
        self._versions = versions

    def check_kind(self, message: Message, entry: LogEntry) -> None:
        """Raises InvalidInput unless the entry belongs to this log and to its explorer."""
        if not entry.kind:
            raise InvalidInput("outcome", "holds nothing")
        check_owner(self._context.names, message.subject, entry)
        if entry.kind == "fence":
            check_fence(entry.fenced_versions)
            return
        task = entry.task
        if task.fields.run != self._context.run:
            raise InvalidInput("task.run", f"is {_shortened(task.fields.run)}, this log is of {self._context.run!r}")
        if task.ordinal < 1:  # else it would count as ended
            raise InvalidInput("task.ordinal", f"is {task.ordinal}; no such task was fed")
        if not task.is_training:
            raise InvalidInput("task.kind", f"is {task.fields.kind}; only training tasks enter this log")
        if entry.kind == "requeue":
            task.decoded()  # it is fed again

    async def _check_fed(self, task: TaskMessage) -> None:
        """Raises InvalidInput unless the task is as it was fed."""
        try:
            fed = await self._fed_task(task.ordinal, task.fields.taskset)
        except NotFound:
            raise InvalidInput("task.ordinal", f"is {task.ordinal}; no such task was fed") from None
        for field, found, expected in task.differences(fed):
            problem = f"is {_shortened(found)}; task {task.ordinal} was fed with {_shortened(expected)}"
            raise InvalidInput(f"task.{field}", problem)

    async def failure(self, entry: LogEntry) -> AttemptFailure:
        """The failure in an entry. Raises InvalidInput."""
        await self._check_fed(entry.task)
        return entry.failure()

    def ordinal(self, message: Message) -> int:
        """The task that a refused message claims to end; 0 if it is none of this run."""
        text = message.headers.get(headers.ORDINAL, "")
        ordinal = int(text) if text.isdecimal() and len(text) < 16 else 0
        return ordinal if ordinal <= self._context.fed else 0

    async def task(self, ordinal: int) -> TaskMessage:
        """Returns the task as it was fed, or only its ordinal if it is gone from the queue."""
        try:
            return await self._fed_task(ordinal)
        except NotFound:
            return TaskMessage.unknown(ordinal)

    async def group(self, sequence: int, entry: LogEntry, fenced: Collection[int]) -> tuple[StoredGroup, str]:
        """The group as it may enter a batch, and the operator that keeps it out of all. Raises InvalidInput."""
        await self._check_fed(entry.task)
        stored = entry.summary(sequence, self._context.limits)
        await self._check_versions(stored, entry.task.fields.gate_step, fenced, sequence <= self._context.stored_before)
        if not self.pipeline.names:
            return stored, ""
        return judged(stored, self.pipeline.run(entry.group()), self._context.limits)

    async def _check_versions(self, group: StoredGroup, gate_step: int, fenced: Collection[int], is_old: bool) -> None:
        """`is_old`: the entry was there when this process began; KV may have lost its version since, unless no step of
        the ledger can have made that."""
        is_old = is_old and group.newest_version <= self._context.written_before
        # Weights that the task asks for may be withdrawn, so that older ones may start it.
        if gate_step not in fenced and not await self._versions.meets(group.oldest_version, gate_step):
            raise InvalidInput(
                "version_spans",
                f"begin at version {group.oldest_version}; weights of step {gate_step} or newer may start this task",
            )
        known = self._versions.returns if is_old else self._versions.was_live
        if group.newest_version not in fenced and not await known(group.newest_version):
            newest = self._context.newest_live_step
            raise InvalidInput(
                "version_spans", f"name version {group.newest_version}; the newest that was ever LIVE is {newest}"
            )


def check_fence(versions: Collection[int]) -> None:
    """Raises InvalidInput for versions that no rollback withdraws."""
    if len(versions) > MOST_FENCED:
        raise InvalidInput("versions", f"are {len(versions)}; at most {MOST_FENCED} can be fenced in one call")
    if any(version < 1 for version in versions):
        raise InvalidInput("versions", f"hold {min(versions)}; version 0 and lower cannot be withdrawn")


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def judged(group: StoredGroup, result: Processed, limits: Limits) -> tuple[StoredGroup, str]:
    """Returns what `processed` does. Raises InvalidInput for a reward out of bounds."""
    shaped, dropped_by = processed(group, result)
    for draft in shaped.kept:
        if not is_number(draft.reward, limits.reward):
            problem = reward_problem(draft.reward, limits.reward)
            raise InvalidInput(f"group.experiences[{draft.index}].reward", f"{problem}; operators made it so")
    return shaped, dropped_by


def processed(group: StoredGroup, result: Processed) -> tuple[StoredGroup, str]:
    """Returns the group after the operators, and the operator that dropped it or ""."""
    if result.is_unchanged or not result.drafts:
        return group, result.dropped_by
    kept = tuple(Kept(draft.index, draft.reward, draft.masked) for draft in result.drafts)
    return replace(group, kept=kept, reward_mean=sum(draft.reward for draft in kept) / len(kept)), ""
