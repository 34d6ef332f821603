"""Follows the experience log, validates every entry, and writes the ledger entries that are due."""

import asyncio
import math
import time
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import structlog

from trinity.buffer.ledger.auxiliary import Auxiliary
from trinity.buffer.ledger.entries import Ledger
from trinity.buffer.ledger.failures import Failures, about_drops
from trinity.buffer.ledger.wire import CutTask, Entry, Pool, cursor_of, window_at
from trinity.buffer.log.dead_letters import letter_in
from trinity.buffer.log.reader import EntryValidator
from trinity.buffer.log.wire import Letter, LogEntry
from trinity.buffer.state.context import RunContext
from trinity.buffer.state.streams import StoreCut, is_there
from trinity.buffer.window.groups import StoredGroup
from trinity.buffer.window.policy import policy_of
from trinity.buffer.window.window import Verdict, Window
from trinity.data.experience import LONGEST_NAME
from trinity.data.wire import LONGEST_ERROR
from trinity.runtime import tracing
from trinity.runtime.broker import Message, tail
from trinity.runtime.errors import FailureCause, InvalidInput, NotFound
from trinity.runtime.metrics import Counter

log = structlog.get_logger(__name__)

VALIDATED = Counter("trinity_buffer_log_entries_total", "Log entries read, by verdict", ["verdict"])

# Entries are written so many steps before the trainer asks, so that it never waits for the buffer itself. Replay
# chooses as late as it can.
_AHEAD = {"fifo": 2, "arrival": 2, "replay": 0}
_CLOCK_SECONDS = 0.25


class Observer(Protocol):
    """Is told what the writer did."""

    def stored(self, group: StoredGroup, values: dict[str, list[float]]) -> None: ...

    def written(self, entry: Entry) -> None: ...


class LedgerWriter:
    """Owner of the window and the only writer of the ledger and the dead letters."""

    def __init__(
        self, context: RunContext, ledger: Ledger, validator: EntryValidator, auxiliary: Auxiliary, observer: Observer
    ) -> None:
        self._context = context
        self._observer = observer
        self._ledger = ledger
        self._validator = validator
        self._auxiliary = auxiliary
        self._writing = asyncio.Lock()
        self._policy = policy_of(context.plan)
        timeout = context.plan.experience_buffer.max_read_timeout
        self._read_timeout_seconds = math.inf if context.plan.config.reproducible else timeout
        self._enough_since: float | None = None  # monotonic; the next batch has its fewest groups
        self._pool = Pool()
        self._ended_through: dict[int, int] = {}  # by step, since the newest checkpoint
        self.failures = Failures(context.plan)
        self.window = Window(self._policy)

    async def recover(self) -> None:
        """Continue from the cursor of the newest ledger entry."""
        if self._ledger.newest is not None:
            self.window = window_at(await self._ledger.cursor(), self._policy)
            log.info("buffer.ledger.recovered", step=self._ledger.newest_step, log_sequence=self.window.log_sequence)
        stream = self._context.names.experiences_stream
        newest, read = (await self._context.broker.state(stream)).last_sequence, self.window.log_sequence
        if newest > read and not await is_there(self._context.broker, stream, newest):
            raise StoreCut(
                f"{stream}: entry {newest}, the newest, cannot be read: NATS has lost experience that no step of the "
                "ledger has yet; restore its store, or begin another run"
            )
        if newest < read:
            step = self._ledger.newest_step
            raise StoreCut(
                f"{stream} ends at sequence {newest}, but step {step} of the ledger was written after {read} had been "
                "read: NATS has lost experience; restore its store, or begin another run"
            )
        self.failures.since = self._context.stored_before = newest
        self._context.written_before = self._ledger.newest_step
        self._ended_through = {self._ledger.newest_step: self.window.ended_through}

    def ended_through(self, step: int) -> int:
        """Returns the last of the tasks that had all ended when the ledger got this step; 0 if another process wrote
        it. A later buffer that begins from the step's entry asks for no task up to there."""
        self._ended_through = {known: ended for known, ended in self._ended_through.items() if known >= step}
        return self._ended_through.get(step, 0)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._write_what_is_asked_for())

    async def _follow(self) -> None:
        stream = self._context.names.experiences_stream
        async for message in tail(self._context.broker, stream, self.window.log_sequence):
            async with self._writing:
                verdict = await self._take(message)
            written = await self._write_batches()
            if written or verdict is not Verdict.STORED:  # no waiter depends on a single stored group
                await self._context.changed.notify()

    async def _write_what_is_asked_for(self) -> None:
        """Writes entries due without a log entry: the trainer asks, a time limit is over, a used group has rested."""
        while True:
            asked = self._context.wanted_step
            await self._context.changed.wait_for(partial(self._asked_beyond, asked), _CLOCK_SECONDS)
            if await self._write_batches():
                await self._context.changed.notify()

    def about_drops(self) -> str:
        """Returns the dropped groups and the reasons as text; empty without any."""
        return about_drops(self.window, self._validator.pipeline)

    def _asked_beyond(self, step: int) -> bool:
        return self._context.wanted_step > step

    async def _take(self, message: Message) -> Verdict:
        with tracing.span("buffer.judge", parent=tracing.extract(message.headers)) as span:
            entry: LogEntry | None = None
            try:
                entry = await self._validator.reader.take_for_batch(message)
                verdict = await self._judge(message, entry)
            except InvalidInput as error:
                verdict = await self._refuse(message, entry, error)
            span.set_attribute("verdict", str(verdict))
            log.debug("buffer.entry.validated", sequence=message.sequence, verdict=str(verdict))
        VALIDATED.labels(verdict).inc()
        return verdict

    async def _judge(self, message: Message, entry: LogEntry) -> Verdict:
        self._validator.check_kind(message, entry)
        kind, sequence = entry.kind, message.sequence
        if kind == "failure":
            return await self._judge_failure(sequence, entry)
        if kind == "requeue":
            return self.window.requeue(sequence, entry.task.ordinal)
        if kind == "fence":
            return self.window.fence(sequence, entry.fenced_versions)
        if self.window.has_ended(entry.task.ordinal):
            return self.window.repeated(sequence, entry.task.ordinal, entry.num_response_tokens)
        group, dropped_by = await self._validator.group(sequence, entry, self.window.fenced)
        verdict = self.window.group(group, dropped_by)
        self.failures.stored(entry.explorer_id)
        self._observer.stored(group, entry.rollout_values())
        if group.prompt_cut:
            self._warn_of_a_cut_prompt(group.task_id)
        if dropped_by:
            self.failures.dropped(sequence, self.window, self._validator.pipeline)
        return verdict

    def _warn_of_a_cut_prompt(self, task_id: str) -> None:
        """At the first, and whenever their number has doubled."""
        cut = self.window.prompts_cut
        if cut.bit_count() == 1:
            limit = self._context.plan.config.model.max_prompt_tokens
            log.warning("buffer.prompt.cut", task=task_id, cut=cut, groups=self.window.stored, max_prompt_tokens=limit)

    async def _judge_failure(self, sequence: int, entry: LogEntry) -> Verdict:
        if self.window.has_ended(ordinal := entry.task.ordinal):
            return self.window.failure(sequence, ordinal, max_attempts=1)  # a late one
        failure = await self._validator.failure(entry)
        verdict = self.window.failure(sequence, ordinal, failure.task.max_attempts, failure.final)
        self.failures.note(sequence, failure.cause, failure.error)
        if verdict is Verdict.DEAD:
            await self._write_dead_letter(Letter.of(failure))
            self.failures.dead(sequence, failure.cause, failure.explorer_id, failure.error)
        return verdict

    async def _refuse(self, message: Message, entry: LogEntry | None, error: InvalidInput) -> Verdict:
        """An entry that cannot be used ends its task as a dead letter: retrying would make the same again."""
        ordinal, made_by, reason = self._validator.ordinal(message), _maker(entry), str(error)[:LONGEST_ERROR]
        log.warning("buffer.log.refused", sequence=message.sequence, ordinal=ordinal, reason=reason, **made_by)
        self.failures.note(message.sequence, FailureCause.INVALID_EXPERIENCE, reason)
        if not ordinal:
            return self.window.skip(message.sequence)
        verdict = self.window.failure(message.sequence, ordinal, max_attempts=1, final=True)
        if verdict is Verdict.DEAD:
            task = await self._validator.task(ordinal)
            await self._write_dead_letter(Letter.of_refused(task, reason, **made_by))
        return verdict

    async def _write_dead_letter(self, letter: Letter) -> None:
        """Writes the dead letter, once."""
        names = self._context.names
        subject = names.dead_letter(letter.ordinal)
        try:
            written = letter_in(names, await self._context.broker.last(names.dead_letters_stream, subject)) is not None
        except NotFound:
            written = False
        if not written:
            await self._context.broker.publish(subject, letter.encode(), message_id=f"dead/{letter.ordinal}")
        fields = letter.fields
        log.warning("buffer.task.dead", task=fields.task.task_id, cause=fields.cause, error=fields.error)

    async def _write_batches(self) -> bool:
        """Every entry that is due; whether there was one."""
        before = self._ledger.newest_step
        async with self._writing:
            while self._is_due(step := self._ledger.newest_step + 1):
                late = self._time_is_over(step)
                groups = self.window.next_batch(step, time.time(), late, self._context.lineage)
                if groups is not None:
                    await self._append(self._entry(step, self.window, groups, partial=late))
                elif self._has_waited_enough(step):
                    await self._append_short(step)
                else:
                    break
                self.window.covered()
                self._enough_since = None
        return self._ledger.newest_step > before

    async def _append(self, entry: Entry) -> None:
        with tracing.span("buffer.batch", step=entry.step):
            await self._ledger.append(entry)
            self._ended_through[entry.step] = self.window.ended_through
            self._observer.written(entry)
            self.failures.written()
            self._say(entry)

    async def _append_short(self, step: int) -> None:
        """Cut tasks end with the entry and not before: until it is written they must stay in the queue."""
        fed, after = self._context.fed, window_at(cursor_of(self.window), self._policy)
        groups, ordinals = after.short_batch(fed)
        ids = [(await self._validator.task(ordinal)).fields.task_id for ordinal in ordinals]
        cut = tuple(map(CutTask, ordinals, ids))
        await self._append(self._entry(step, after, groups, cut=cut))
        self.window.short_batch(fed)
        self.window.fresh_drops.clear()

    def _is_due(self, step: int) -> bool:
        last = self._context.last_step
        if self._context.unfenced is not None:
            return False  # what it withdrew must not enter the entry
        if self.window.log_sequence < self.failures.since:
            return False  # an earlier process may have said that a fence holds which this one has not read
        return (not last or step <= last) and step <= self._context.wanted_step + _AHEAD[self._policy.kind]

    def _time_is_over(self, step: int) -> bool:
        """Returns True if the trainer has waited for this step for longer than max_read_timeout."""
        since = self._context.wanted_since(step)
        return since is not None and time.monotonic() - since > self._read_timeout_seconds

    def _has_waited_enough(self, step: int) -> bool:
        """Returns True if the step has had its fewest groups for wait_after_min, a trainer waits, and it may be cut."""
        fed, now = self._context.fed, time.monotonic()
        if not self.window.has_fewest(fed):
            self._enough_since = None
            return False
        self._enough_since = now if self._enough_since is None else self._enough_since
        has_had = now - self._enough_since >= self._policy.wait_after_min_seconds
        return has_had and self._context.wanted_since(step) is not None and self.window.may_cut(fed)

    def _say(self, entry: Entry) -> None:
        facts = {"step": entry.step, "groups": len(entry.groups), "reward_mean": round(entry.reward_mean, 4)}
        if entry.partial:
            log.error("buffer.ledger.partial", **facts, wanted=self._policy.groups_per_step, reason="max_read_timeout")
        else:
            cut = [task.task_id for task in entry.cut]
            log.info("buffer.ledger.written", **facts, dropped=len(entry.dropped), cut=cut)

    def _entry(
        self,
        step: int,
        after: Window,
        groups: list[StoredGroup],
        *,
        partial: bool = False,
        cut: tuple[CutTask, ...] = (),
    ) -> Entry:
        """`after`: the window without the groups, whose fresh drops the entry takes."""
        experiences = sum(len(group.kept) or group.num_experiences for group in groups)
        lineage, drops = self._context.lineage, tuple(after.fresh_drops)
        after.fresh_drops.clear()
        return Entry(
            run=self._context.run,
            step=step,
            groups=tuple(replace(group, staleness_steps=group.staleness(step, lineage)) for group in groups),
            created_at_seconds=time.time(),
            policy=self._policy.kind,
            reward_mean=sum(g.reward_mean * (len(g.kept) or g.num_experiences) for g in groups) / experiences,
            operators=tuple(self._validator.pipeline.names),
            dropped=drops,
            auxiliary=tuple(self._auxiliary.rows(step)),
            partial=partial,
            cut=cut,
            floor_sequence=after.floor(),
            cursor=cursor_of(after, self._pool),
        )


def _maker(entry: LogEntry | None) -> dict[str, Any]:
    """Explorer and attempt of a refused entry, as far as it names them; the name in printable characters, cut."""
    if entry is None or entry.kind not in ("group", "failure"):
        return {}
    name = "".join(c if c.isprintable() else "?" for c in entry.explorer_id[:LONGEST_NAME])
    return {"explorer_id": name, "attempt": max(0, entry.attempt)}
