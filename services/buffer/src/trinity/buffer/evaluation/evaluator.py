"""Evaluations: every row of every evaluation taskset, once for each version that is due.

Results above NATS's message size lie in blobs. Once an evaluation is reported, KV has its metrics, and its tasks,
results and blobs go; a process that starts later takes the metrics from there. KV has the newest KEPT evaluations.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import structlog

from trinity.buffer.evaluation.tally import Series, Tally
from trinity.buffer.log.reader import check_owner, whole_entry
from trinity.buffer.log.wire import LogEntry
from trinity.buffer.state.commit import CommitRecord
from trinity.buffer.state.context import RunContext
from trinity.buffer.state.streams import append_past_others, newest_of_ours
from trinity.data.experience import AttemptFailure, Group, Outcome, Task, TaskKind
from trinity.data.task_source import TaskSource
from trinity.data.wire import decode_task, task_to_proto
from trinity.runtime import headers, tracing
from trinity.runtime.broker import Message, SequenceConflict, StoredMessage, blobs, tail
from trinity.runtime.errors import FailureCause, InvalidInput, NotFound, PermissionDenied
from trinity.runtime.names import BlobReference

log = structlog.get_logger(__name__)

EVALUATIONS = "evaluations"  # field of the commit record
KEPT = 256
_LONGEST_MARK = 16  # digits
_LONGEST_REFERENCE = 1024  # bytes

_Blob = tuple[str, BlobReference]  # with its owner


class Evaluator:
    """Feeds evaluation tasks and tallies their results. All state is in the two streams and the commit record."""

    def __init__(
        self, context: RunContext, sources: list[TaskSource], record: CommitRecord, on_complete: Callable[[Tally], None]
    ) -> None:
        self._context = context
        self._record = record
        self._on_complete = on_complete
        self._sources = sources
        self._rows = [(source, row) for source in sources for row in range(len(source.rows))]
        self._fed = 0
        self._step = self._recovered = -1
        self._index = 0
        self._storing = asyncio.Lock()
        self.read_through = 0  # sequence of the newest result that was read
        self._is_recorded = True  # the record had room for all kept evaluations
        self._stored_before = 0  # and of the newest one when this process began
        self._series = Series()
        self.tallies: dict[tuple[int, str], Tally] = {}

    @property
    def outstanding(self) -> int:
        """Tasks without a result."""
        return sum(tally.missing for tally in self.tallies.values() if not self._is_over(tally))

    @property
    def finished(self) -> list[Tally]:
        """Evaluations that are over and have results, oldest first."""
        over = [tally for tally in self.tallies.values() if self._is_over(tally)]
        return sorted((tally for tally in over if tally.ended or tally.kept is not None), key=lambda tally: tally.step)

    def _is_over(self, tally: Tally) -> bool:
        """True if every result has come.

        Results missing from an earlier process's evaluation may belong to rows that the taskset did not have then. The
        newest evaluation feeds these rows.
        """
        is_earlier = tally.step <= self._recovered and tally.step < self._step
        return tally.missing == 0 or (is_earlier and self._is_read)

    @property
    def _is_read(self) -> bool:
        """True once all results stored before this process began are read."""
        return self.read_through >= self._stored_before

    @property
    def tokens(self) -> int:
        """That the policy sampled."""
        return sum(tally.tokens for tally in self.tallies.values())

    @property
    def blob_bytes(self) -> int:
        """Total size of the blobs whose results are still needed."""
        return sum(sum(tally.blobs.values()) for tally in self.tallies.values())

    @property
    def idle(self) -> bool:
        """Nothing is due, nothing is running."""
        is_fed = self._index == 0 and self._due() is None
        return not self._rows or (is_fed and self._is_read and self.outstanding == 0)

    async def recover(self, kept: Any) -> None:
        """Read which evaluation was fed last, and how far. `kept`: what the commit record has under EVALUATIONS."""
        names = self._context.names
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):  # then no buffer wrote it
            for tally in [Tally.of_record(record) for record in kept or ()]:
                self.tallies[tally.step, tally.taskset] = tally
        results = await self._context.broker.state(names.evaluations_stream)
        self._stored_before, self.read_through = results.last_sequence, max(0, results.first_sequence - 1)
        self._fed = (await self._context.broker.state(names.evaluation_tasks_stream)).last_sequence
        if self._context.origin is not None:
            self._step = self._context.origin.step  # its parent has evaluated until there
        newest = await newest_of_ours(self._context.broker, names.evaluation_tasks_stream, self._is_fed)
        if newest is not None and self._rows:
            self._step = self._recovered = int(newest.headers[headers.EVALUATION_STEP])
            index = int(newest.headers[headers.EVALUATION_INDEX]) + 1
            self._index = index if index < len(self._rows) else 0  # there may be fewer rows than before
            for source in self._sources:
                self._tally(self._step, source.taskset.name)
        if self._is_read:
            await self._cut(self.read_through)  # an earlier process may have ended before it did

    def _due(self) -> int | None:
        """The step to evaluate now, if any: the LIVE one, when an interval, the start or the end was reached."""
        config = self._context.plan.config
        live, explorer = self._context.live_step, config.explorer
        if live < 0 or live <= self._step:
            return None
        if live == 0:
            return 0 if explorer.eval_on_startup else None
        if config.mode == "bench":
            return live
        crossed = live // explorer.eval_interval > max(self._step, 0) // explorer.eval_interval
        return live if crossed or live >= self._context.last_step else None

    async def feed(self) -> None:
        if not self._rows:
            return
        while True:
            await self._context.changed.wait_for(lambda: self._index > 0 or self._due() is not None)
            if self._index == 0:
                self._step = self._due() or 0
                log.info("buffer.evaluation.begun", step=self._step, tasks=len(self._rows))
            for index in range(self._index, len(self._rows)):
                async with self._storing:
                    await self._feed_one(index)
            self._index = 0
            await self._context.changed.notify()

    def unreported(self) -> Iterable[tuple[int, int]]:
        """(step, row) of tasks without a result, once all of the newest evaluation are fed."""
        if self._index:
            return
        for index, (source, row) in enumerate(self._rows):
            tally = self.tallies.get((self._step, source.taskset.name))
            if tally is not None and tally.missing and source.evaluation_id(row, self._step) not in tally.ended:
                yield self._step, index

    async def offer_again(self, task: tuple[int, int]) -> None:
        """Put a task of `unreported` behind the others of the queue."""
        async with self._storing:
            if self._index == 0 and task[0] == self._step:
                await self._store(task[1], again=True)

    async def _feed_one(self, index: int) -> None:
        try:
            await self._store(index)
        except SequenceConflict as error:
            if not error.stored_at:
                raise  # else it was fed when the tasksets had other rows, and its index was another
        self._index = index + 1

    async def _store(self, index: int, again: bool = False) -> None:
        source, row = self._rows[index]
        names = self._context.names
        task = await asyncio.to_thread(source.evaluation_task, row, self._fed + 1, self._step)
        tally = self._tally(task.evaluation_step, task.taskset)
        if tally.step > self._recovered:  # else an earlier process may have fed some of them
            tally.first_task = tally.first_task or self._fed + 1

        def data(sequence: int) -> bytes:
            return task_to_proto(replace(task, ordinal=sequence)).SerializeToString()

        newest = len(self._rows) - 1 if again else index
        marks = {headers.EVALUATION_STEP: str(self._step), headers.EVALUATION_INDEX: str(newest)}
        with tracing.span("evaluation.feed", task_id=task.task_id):
            self._fed = await append_past_others(
                self._context.broker,
                names.evaluation_task(task.taskset),
                names.evaluation_tasks_stream,
                data,
                message_id=f"{task.task_id}/again/{self._fed}" if again else task.task_id,
                last_sequence=self._fed,
                is_ours=self._is_fed,
                headers=tracing.inject(marks),
            )

    def _tally(self, step: int, taskset: str) -> Tally:
        expected = sum(len(s.rows) for s in self._sources if s.taskset.name == taskset)
        return self.tallies.setdefault((step, taskset), Tally(step, taskset, expected, series=self._series))

    async def _is_fed(self, message: StoredMessage) -> bool:
        """Returns True for a task that a buffer of this run fed."""
        marks = [message.headers.get(name, "") for name in (headers.EVALUATION_STEP, headers.EVALUATION_INDEX)]
        if (task := _task_in(message.data)) is None:
            return False
        is_here = message.subject == self._context.names.evaluation_task(task.taskset) and task.run == self._context.run
        return is_here and all(mark.isdecimal() and len(mark) < _LONGEST_MARK for mark in marks)

    async def _read(self, message: Message) -> Outcome | None:
        """Returns the result. An unusable result becomes a final failure of its task, or None without a task."""
        found = None
        try:
            found, _ = await whole_entry(self._context, message.subject, message.data)
            outcome = found.decoded()
            check_owner(self._context.names, message.subject, found)
            await self._check_fed(outcome.task)
            if isinstance(outcome, Group):
                outcome.check(replace(self._context.limits, teacher=False, teacher_top=0))
            return outcome
        except InvalidInput as error:
            log.warning("buffer.evaluation.refused", sequence=message.sequence, reason=str(error))
            with contextlib.suppress(InvalidInput):
                if found is not None and found.kind in ("group", "failure"):
                    await self._check_fed(task := found.task.decoded())
                    cause = FailureCause.INVALID_EXPERIENCE
                    return AttemptFailure(task, 1, "", cause, str(error), True, time.time())
            return None

    async def _check_fed(self, task: Task) -> None:
        """Raises InvalidInput unless the task is one of an evaluation that was fed."""
        source = next((s for s in self._sources if s.taskset.name == task.taskset), None)
        if task.run != self._context.run or task.kind is not TaskKind.EVALUATION or source is None:
            raise InvalidInput("task", f"{task.task_id[:80]!r} is of no evaluation of this run")
        step = task.evaluation_step
        if task.row < 0 or task.task_id != source.evaluation_id(task.row, step):
            raise InvalidInput("task.task_id", f"is {task.task_id[:80]!r}; no such task was fed")
        if task.row < len(source.rows) and (step, task.taskset) in self.tallies:
            return
        stream = self._context.names.evaluation_tasks_stream  # fed by an earlier process, which had more rows perhaps
        with contextlib.suppress(NotFound):
            fed = _task_in((await self._context.broker.get(stream, max(1, task.ordinal))).data)
            if fed is not None and (fed.run, fed.task_id) == (task.run, task.task_id):
                return
        raise InvalidInput("task.evaluation_step", f"is {step}, of row {task.row}; no such evaluation was fed")

    async def collect(self) -> None:
        """Follow the results from the first one that is there."""
        async for message in tail(self._context.broker, self._context.names.evaluations_stream, self.read_through):
            await self._take(message)
            self.read_through = message.sequence
            if message.sequence == self._stored_before:
                await self._cut(message.sequence)

    async def _take(self, message: Message) -> None:
        blob = self._blob_of(message)
        if blob is not None and await self._is_gone(message):
            await self._remove(blob[0], blob[1].key)
            return
        outcome = await self._read(message)
        if outcome is None:
            return
        tally = self._tally(outcome.task.evaluation_step, outcome.task.taskset)
        if tally.kept is not None:
            return
        tally.first_result = tally.first_result or message.sequence
        before = tally.missing
        if isinstance(outcome, Group):
            tally.add(outcome)
        else:
            tally.fail(outcome)
        if blob is not None:
            tally.blobs[blob[0], blob[1].key] = blob[1].size_bytes
        if before and not tally.missing:
            log.info("buffer.evaluation.done", step=tally.step, taskset=tally.taskset, **tally.for_log())
            if tally.step >= self._recovered:  # earlier ones were reported before a restart
                self._on_complete(tally)
            await self._keep(tally)
            await self._cut(message.sequence)
            await self._context.changed.notify()

    async def _keep(self, tally: Tally) -> None:
        """Keep the metrics of a reported evaluation, and let its blobs go; they stay where the record has no room."""
        tally.keep(self._context.plan.config.monitor.detailed_stats)
        kept = sorted((step, name) for (step, name), one in self.tallies.items() if one.kept is not None)
        for old in [old for old in kept[:-KEPT] if not self.tallies[old].blobs]:
            del self.tallies[old]
        records = [one.to_record() for one in self.tallies.values() if one.kept is not None]
        self._is_recorded = await self._record.write(**{EVALUATIONS: records})
        if not self._is_recorded:
            log.warning("buffer.evaluation.blobs_kept", step=tally.step, taskset=tally.taskset, kept=len(records))
            return
        for owner, key in tally.blobs:
            await self._remove(owner, key)
        tally.blobs.clear()

    async def _cut(self, read_through: int) -> None:
        """Removes the tasks and results that no unfinished evaluation needs; the newest task stays for its counts."""
        if not self._is_recorded:
            return
        names, running = self._context.names, [tally for tally in self.tallies.values() if not self._is_over(tally)]
        results = min([tally.first_result or read_through + 1 for tally in running], default=read_through + 1)
        tasks = min([tally.first_task for tally in running], default=self._fed)
        with contextlib.suppress(PermissionDenied):  # credentials of an earlier release
            for stream, below in ((names.evaluations_stream, results), (names.evaluation_tasks_stream, tasks)):
                if below > 1:
                    await self._context.broker.purge_below(stream, below)

    async def _remove(self, owner: str, key: str) -> None:
        names = self._context.names
        await self._context.broker.purge_subject(names.blobs_stream, names.blob_chunks(owner, key))

    def _blob_of(self, message: Message) -> _Blob | None:
        """Returns owner and reference of a result in a blob; None for other messages and impossible references."""
        owner = self._context.names.owner_in(message.subject)
        with contextlib.suppress(InvalidInput):
            entry = LogEntry.parse(message.data) if len(message.data) <= _LONGEST_REFERENCE else None
            if owner and entry is not None and entry.kind == "blob":
                reference = entry.reference
                blobs.check(reference)
                return owner, reference
        return None

    async def _is_gone(self, message: Message) -> bool:
        """True if a result's blob is gone or may go, because the metrics of its evaluation are kept."""
        ordinal = message.headers.get(headers.ORDINAL, "")
        if not ordinal.isdecimal() or len(ordinal) >= _LONGEST_MARK:
            return False
        try:
            stream = self._context.names.evaluation_tasks_stream
            task = _task_in((await self._context.broker.get(stream, max(1, int(ordinal)))).data)
        except NotFound:
            return int(ordinal) < self._fed  # it went with its evaluation
        tally = None if task is None else self.tallies.get((task.evaluation_step, task.taskset))
        return tally is not None and tally.kept is not None and not tally.blobs


def _task_in(data: bytes) -> Task | None:
    """The task in a message; None if there is none."""
    try:
        return decode_task(data)
    except InvalidInput:
        return None
