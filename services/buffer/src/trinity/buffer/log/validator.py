"""Validates log entries: bytes, fields, versions; and runs the operators on them."""

from collections.abc import Collection
from dataclasses import replace
from typing import Protocol

from trinity.buffer.log.reader import LogReader, check_owner
from trinity.buffer.log.wire import LogEntry, TaskMessage
from trinity.buffer.operators.pipeline import Pipeline, Processed
from trinity.buffer.state.context import RunContext
from trinity.buffer.window.groups import Kept, StoredGroup
from trinity.data.experience import AttemptFailure, Limits, is_number, reward_problem
from trinity.runtime import headers
from trinity.runtime.broker import Message
from trinity.runtime.errors import InvalidInput, NotFound

# Far more than lie between two checkpoints; their list is part of every later cursor.
MOST_FENCED = 10_000
_SHOWN = 80


class FedTask(Protocol):
    """Returns the task of an ordinal (and taskset) as it was fed. Raises NotFound."""

    async def __call__(self, ordinal: int, taskset: str = "") -> TaskMessage: ...


class Versions(Protocol):
    """The part of LiveVersions that is needed here."""

    async def was_live(self, version: int) -> bool: ...

    async def returns(self, version: int) -> bool: ...

    async def meets(self, version: int, gate_step: int) -> bool: ...


class EntryValidator:
    """Knows nothing of batches. `fed_task` finds a task as it was fed (NotFound)."""

    def __init__(
        self, context: RunContext, reader: LogReader, pipeline: Pipeline, fed_task: FedTask, versions: Versions
    ) -> None:
        self._context = context
        self._reader = reader
        self.pipeline = pipeline
        self._fed_task = fed_task
        self._versions = versions

    async def read(self, message: Message) -> LogEntry:
        """The outcome in a message. Raises InvalidInput."""
        return await self._reader.take_for_batch(message)

    def check_kind(self, message: Message, entry: LogEntry) -> None:
        """Raises InvalidInput unless the entry belongs to this log and to its explorer."""
        if not entry.kind:
            raise InvalidInput("outcome", "holds nothing")
        check_owner(self._context.names, message.subject, entry)
        if entry.kind == "fence":
            check_fence(entry.fenced_versions)
            return
        task = entry.task
        if task.run != self._context.run:
            raise InvalidInput("task.run", f"is {_shortened(task.run)}, this log is of {self._context.run!r}")
        if task.ordinal < 1:  # else it would count as ended
            raise InvalidInput("task.ordinal", f"is {task.ordinal}; no such task was fed")
        if not task.is_training:
            raise InvalidInput("task.kind", f"is {task.kind}; only training tasks enter this log")
        if entry.kind == "requeue":
            task.decoded()  # it is fed again

    async def _check_fed(self, task: TaskMessage) -> None:
        """Raises InvalidInput unless the task is as it was fed."""
        try:
            fed = await self._fed_task(task.ordinal, task.taskset)
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
        stored = entry.summary(sequence, self._context.limits, task_is_sound=True)
        await self._check_versions(stored, entry.task.gate_step, fenced, sequence <= self._context.stored_before)
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
