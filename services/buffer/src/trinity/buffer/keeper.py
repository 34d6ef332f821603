"""The keeper follows the experience log, judges every entry, and writes each step's ledger entry as soon as it can."""

import time
from typing import Protocol

import structlog

from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.api.common.v1 import experience_pb2
from trinity.buffer.ledger import Ledger
from trinity.buffer.log import LogReader
from trinity.buffer.shared import RunContext
from trinity.buffer.summary import summarise
from trinity.buffer.window import StoredGroup, Verdict, Window
from trinity.buffer.wire import cursor_of, group_to_proto, window_at
from trinity.runtime import headers, tracing
from trinity.runtime.broker import Message, tail
from trinity.runtime.errors import FailureCause, InvalidInput, NotFound
from trinity.runtime.metrics import Counter

log = structlog.get_logger(__name__)

JUDGED = Counter("trinity_buffer_log_entries_total", "Log entries judged", ["verdict"])


class Observer(Protocol):
    """Who hears of what the keeper did."""

    def stored(self, group: StoredGroup, message: experience_pb2.Group) -> None: ...

    def written(self, entry: pb.LedgerEntry) -> None: ...


class Keeper:
    """Owner of the window and the only writer of the ledger and the dead letters."""

    def __init__(self, context: RunContext, ledger: Ledger, reader: LogReader, observer: Observer) -> None:
        self._context = context
        self._observer = observer
        self._ledger = ledger
        self._reader = reader
        self.window = Window(context.plan.groups_per_step)

    def recover(self) -> None:
        """Go on from the cursor in the newest ledger entry."""
        if self._ledger.newest is not None:
            self.window = window_at(self._ledger.newest.cursor, self._context.plan.groups_per_step)
            log.info("buffer.keeper.recovered", step=self._ledger.newest_step, log_sequence=self.window.log_sequence)

    async def run(self) -> None:
        stream = self._context.names.experiences_stream
        async for message in tail(self._context.broker, stream, self.window.log_sequence):
            verdict = await self._judge(message)
            written = await self._write_batches()
            if written or verdict is not Verdict.STORED:  # a group alone changes nothing that anybody waits for
                await self._context.bell.ring()

    async def _judge(self, message: Message) -> Verdict:
        with tracing.span("buffer.judge", parent=tracing.extract(message.headers)) as span:
            try:
                outcome = await self._reader.take(message.sequence, message.data, message.headers)
                verdict = await self._judge_outcome(message.sequence, outcome)
            except InvalidInput as error:
                verdict = await self._refuse(message, error)
            span.set_attribute("verdict", str(verdict))
        JUDGED.labels(verdict).inc()
        return verdict

    async def _judge_outcome(self, sequence: int, outcome: experience_pb2.Outcome) -> Verdict:
        if outcome.WhichOneof("outcome") == "failure":
            failure = outcome.failure
            verdict = self.window.failure(sequence, failure.task.ordinal, failure.task.max_attempts, failure.final)
            if verdict is Verdict.DEAD:
                await self._bury(failure)
            return verdict
        group = summarise(sequence, outcome.group)
        verdict = self.window.group(group)
        if verdict is Verdict.STORED:
            self._observer.stored(group, outcome.group)
        return verdict

    async def _refuse(self, message: Message, error: InvalidInput) -> Verdict:
        """An entry that cannot be used ends its task as a dead letter: retrying would make the same again."""
        ordinal = int(message.headers.get(headers.ORDINAL, "0"))
        log.warning("buffer.log.refused", sequence=message.sequence, ordinal=ordinal, reason=str(error))
        if ordinal < 1:
            self.window.skip(message.sequence)
            return Verdict.DUPLICATE
        verdict = self.window.failure(message.sequence, ordinal, max_attempts=1, final=True)
        if verdict is Verdict.DEAD:
            failure = experience_pb2.AttemptFailure(
                cause=FailureCause.INVALID_EXPERIENCE, error=str(error), final=True, failed_at_seconds=time.time()
            )
            failure.task.ordinal = ordinal
            await self._bury(failure)
        return verdict

    async def _bury(self, failure: experience_pb2.AttemptFailure) -> None:
        """Write the dead letter, once."""
        names, ordinal = self._context.names, failure.task.ordinal
        letter = experience_pb2.AttemptFailure()
        letter.CopyFrom(failure)
        letter.final = True
        subject = names.dead_letter(ordinal)
        try:
            await self._context.broker.last(names.dead_letters_stream, subject)
        except NotFound:
            await self._context.broker.publish(subject, letter.SerializeToString(), message_id=f"dead/{ordinal}")
        log.warning("buffer.task.dead", task=failure.task.task_id, cause=failure.cause, error=failure.error)

    async def _write_batches(self) -> bool:
        """Every entry that is due; whether there was one."""
        last, before = self._context.last_step, self._ledger.newest_step
        while (not last or self._ledger.newest_step < last) and (groups := self.window.next_batch()) is not None:
            step = self._ledger.newest_step + 1
            entry = self._entry(step, groups)
            await self._ledger.append(entry)
            self._observer.written(entry)
            log.info("buffer.ledger.written", step=step, groups=len(groups), reward_mean=round(entry.reward_mean, 4))
        return self._ledger.newest_step > before

    def _entry(self, step: int, groups: list[StoredGroup]) -> pb.LedgerEntry:
        experiences = sum(group.num_experiences for group in groups)
        # A version's number is its optimizer step; the step that trains updates the weights of step - 1.
        members = [group_to_proto(g, max(0, step - 1 - g.oldest_version), use_count=1) for g in groups]
        return pb.LedgerEntry(
            run=self._context.run,
            step=step,
            groups=members,
            cursor=cursor_of(self.window),
            created_at_seconds=time.time(),
            policy="fifo",
            reward_mean=sum(g.reward_mean * g.num_experiences for g in groups) / experiences,
        )
