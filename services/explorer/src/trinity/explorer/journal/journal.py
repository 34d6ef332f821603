"""Reads and writes the turns of unfinished episodes.

    journal = await journals.open(task, attempt)   # turns of earlier attempts
    with journal.run():                            # each run of the workflow
        episode = current_episode(place)           # in the order in which a rollout plays them
        reply = episode.recorded(turn, seen)       # None: sample it, and write it by episode.keep(turn, seen, reply)

A turn is written while its episode plays the next one, and is durable before the next turn is written, so no turn is
stored without its predecessors. An answer with a state is written as soon as it comes: the explorer that finds it does
not act the reply again. The journal never fails an attempt: a failed write is logged and the turn is lost, and an
unreadable entry makes the episodes begin again.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import nats.js.errors
import structlog

from trinity.data.experience import Limits, Task, TaskKind
from trinity.explorer.environments.types import EnvironmentCause, StateRefused
from trinity.explorer.journal.turns import (
    OPEN,
    RETURNED,
    Entry,
    Kept,
    Known,
    RecordedAnswer,
    RecordedTurn,
    known_before,
)
from trinity.explorer.journal.wire import decode_entry, encode_abandoned, encode_answer, encode_turn
from trinity.explorer.types import Completion
from trinity.runtime import tracing
from trinity.runtime.broker import Broker, new_message_id, on_subject
from trinity.runtime.errors import FailureCause, InvalidInput, TrinityError
from trinity.runtime.metrics import Counter as Metric
from trinity.runtime.names import RunNames, owner_of
from trinity.sdk.contract import Answer

log = structlog.get_logger(__name__)

TURNS_KEPT = Metric("trinity_explorer_turns_kept_total", "Turns of unfinished episodes that were written down")
TURNS_CONTINUED = Metric(
    "trinity_explorer_turns_continued_total", "Turns that were played again as recorded, not sampled again"
)

_SECONDS = 5.0  # to write a turn
_RETURN_SECONDS = 1.0  # to write it during a drain
_EVALUATIONS = 2**62  # added to ordinals of evaluations, which have a separate queue
_HEADROOM_BYTES = 64 * 1024
_MOST_ENTRIES, _MOST_BYTES = 100_000, 2**28  # per task
_READ_AHEAD = 64

_journal: ContextVar["TaskJournal | None"] = ContextVar("journal", default=None)


def current_episode(place: str) -> "EpisodeJournal | None":
    """The journal of the next episode of the rollout at this place; None if no journal is kept."""
    journal = _journal.get()
    return journal.episode(place) if journal is not None else None


@dataclass(frozen=True)
class Journals:
    """The journals of one explorer.

    `usable(version)` says if its tokens may be trained now. `reaches(step)` waits until that step's weights are served
    here, and returns False if they cannot be. `flush_tokens`: tokens of a reply between two entries; 0 for one entry.
    `keeps`: keep turns of training tasks; returned leases are noted in any case.
    """

    broker: Broker
    names: RunNames
    explorer_id: str
    limits: Limits
    usable: Callable[[int], bool]
    reaches: Callable[[int], Awaitable[bool]]
    flush_tokens: int = 0
    keeps: bool = True

    async def open(self, task: Task, attempt: int) -> "TaskJournal":
        """The journal of an attempt, with the turns of earlier attempts."""
        known = await self._known(task, attempt) if attempt > 1 else Known()
        # Older weights never continue what newer ones began.
        if known.newest_version >= 0 and not await self.reaches(known.newest_version):
            known.episodes.clear()
        return TaskJournal(self, task, attempt, known)

    async def give_back(self, task: Task, attempt: int) -> None:
        """Note that an attempt returned its lease, so that it does not count as a death of its explorer."""
        subject = self.names.turn(_ordinal(task), attempt, owner_of(self.explorer_id))
        await _publish(self.broker, subject, encode_abandoned(RETURNED), _RETURN_SECONDS)

    async def _known(self, task: Task, attempt: int) -> Known:
        entries: list[Entry] = []
        size = 0
        subject = self.names.turns(_ordinal(task))
        try:
            async for message in on_subject(self.broker, self.names.turns_stream, subject, read_ahead=_READ_AHEAD):
                size += len(message.data)
                if len(entries) == _MOST_ENTRIES or size > _MOST_BYTES:
                    problem = f"are more than {_MOST_ENTRIES} of one task, or take more than {_MOST_BYTES} bytes"
                    raise InvalidInput("turns", problem)
                _, number, owner = self.names.turn_of(message.subject)
                entries.append(Entry(number, owner, decode_entry(message.data, self.limits)))
            return known_before(attempt, entries)
        except TrinityError as error:
            log.warning("explorer.journal.unreadable", task=task.task_id, attempt=attempt, reason=str(error))
            return Known()


class TaskJournal:
    """The journal of one attempt at a task."""

    def __init__(self, journals: Journals, task: Task, attempt: int, known: Known) -> None:
        self.flush_tokens, self.usable = journals.flush_tokens, journals.usable
        self.owner = owner_of(journals.explorer_id)
        self.progressed = known.progressed
        self._keeps = journals.keeps and task.kind is TaskKind.TRAIN
        self._broker, self._subject = journals.broker, journals.names.turn(_ordinal(task), attempt, self.owner)
        self._episodes = known.episodes
        self._opened: Counter[str] = Counter()
        self._writing: set[asyncio.Task[None]] = set()
        self._written = 0
        self._writes = True

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Run the workflow in this context. It also continues episodes of an earlier run of this attempt."""
        self._opened.clear()
        token = _journal.set(self if self._keeps else None)
        try:
            yield
        finally:
            _journal.reset(token)

    def episode(self, place: str) -> "EpisodeJournal":
        name = f"{place}/{self._opened[place]}"
        self._opened[place] += 1
        return EpisodeJournal(self, name, self._episodes.setdefault(name, []))

    def forget(self) -> None:
        """Make the next run of this attempt begin again."""
        self._episodes.clear()

    async def abandon(self, cause: FailureCause) -> None:
        """Note that the attempt failed, so that no later one continues it."""
        await self.settle()
        if self._written or any(self._episodes.values()):
            await self._publish(encode_abandoned(cause))

    async def settle(self) -> None:
        """Wait for pending writes."""
        if self._writing:
            await asyncio.wait(self._writing)

    def start_writing(self, entry: RecordedTurn | RecordedAnswer) -> "asyncio.Task[None]":
        writing = asyncio.create_task(self._write(entry))
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)
        return writing

    async def _write(self, entry: RecordedTurn | RecordedAnswer) -> None:
        """Write an entry, unless an earlier write failed: there would be a gap between them."""
        if self._writes:
            data = encode_turn(entry) if isinstance(entry, RecordedTurn) else encode_answer(entry)
            written = await self._publish(data)
            is_last = isinstance(entry, RecordedAnswer) and entry.answer.done  # nothing comes after it
            self._writes &= written or is_last
            TURNS_KEPT.inc(written and isinstance(entry, RecordedTurn))

    async def _publish(self, data: bytes) -> bool:
        self._written += 1
        return await _publish(self._broker, self._subject, data, _SECONDS)


def _ordinal(task: Task) -> int:
    return task.ordinal + (_EVALUATIONS if task.kind is TaskKind.EVALUATION else 0)


async def _publish(broker: Broker, subject: str, data: bytes, seconds: float) -> bool:
    """Returns False if the entry could not be written."""
    try:
        if len(data) > broker.client.max_payload - _HEADROOM_BYTES:
            raise InvalidInput("turn", f"has {len(data)} bytes, NATS takes {broker.client.max_payload}")
        await broker.publish(subject, data, message_id=new_message_id(), deadline_seconds=seconds)
    except (TrinityError, nats.js.errors.Error) as error:
        log.warning("explorer.journal.unwritten", subject=subject, reason=str(error))
        return False
    return True


class EpisodeJournal:
    """The journal of one episode. `flush_tokens`: tokens of a reply between two entries; 0 for one entry."""

    def __init__(self, journal: TaskJournal, name: str, kept: list[Kept]) -> None:
        self._journal, self._name, self._kept = journal, name, kept
        self._sampled_by = ""  # explorer of the last turn that was played again
        self._turn = -1  # of the reply that the environment is about to answer
        self._acts = False  # the environment answered this explorer
        self._heard: Answer | None = None
        self._branched: set[int] = set()
        self._complete = True
        while (last := self._newest(len(kept))) and not last.state and not last.done:  # no episode continues from there
            reply = kept.pop()
            if reply.answered is not None:
                kept.append(replace(reply, answered=None))
        self.flush_tokens = journal.flush_tokens
        self._writing: list[asyncio.Task[None]] = []  # the newest reply's entry, and its answer's

    @property
    def moves(self) -> list[dict[str, int | str]]:
        """Moves between explorers: the `turn` (from 0), the explorers before and after it (`from`, `to`), and the
        `token` (from 0) in the middle of a reply."""
        parts = [(turn, token, owner) for turn, kept in enumerate(self._kept) for token, owner in kept.parts]
        newest = self._newest(len(self._kept))
        if self._acts or newest is None or not newest.done:
            parts.append((len(self._kept), 0, self._journal.owner))
        return [
            {"turn": turn, "from": before, "to": after, **({"token": token} if token else {})}
            for (_, _, before), (turn, token, after) in pairwise(parts)
            if before != after
        ]

    def recorded(self, turn: int, seen: bytes) -> Completion | None:
        """The recorded reply of this turn; None from the first turn on that is unknown or had another context.

        A reply with the finish_reason OPEN is incomplete.
        """
        self._turn = turn
        if turn >= len(self._kept):
            return None
        kept = self._kept[turn]
        self._heard = kept.turn.answer or self._heard
        same = kept.turn.seen == seen
        if not same or not all(map(self._journal.usable, kept.versions)):
            reason = "its versions were withdrawn, or are stale" if same else "the environment answered otherwise"
            log.warning("explorer.episode.begins_again", episode=self._name, turn=turn, reason=reason)
            del self._kept[turn:]
            return None
        TURNS_CONTINUED.inc(kept.turn.completion.finish_reason != OPEN)
        self._sampled_by = kept.owner
        return kept.turn.completion

    def answer(self, turn: int) -> Answer | None:
        """The answer after `turn` actions, of an environment that keeps states; None if it is unknown."""
        return next((step for step in self._answers(len(self._kept)) if step.turn == turn), None)

    def heard(self, answer: Answer) -> None:
        """Keep an answer of an environment with states for the entry of the next reply. After an answer without a state
        no turn is kept."""
        self._heard = answer
        if self._complete and not answer.state and not answer.done:
            self._complete = False
            log.info("explorer.journal.stateless", episode=self._name, actions=answer.turn)

    def answered(self, answer: Answer) -> None:
        """Keep the answer to the reply of the current turn, and begin to write it."""
        self.heard(answer)
        if self._turn < 0:  # to another episode's action, which a branch played again
            return
        reply, self._acts = self._kept[self._turn], True
        self._kept[self._turn :] = [replace(reply, answered=answer)]
        if self._complete:
            entry = RecordedAnswer(self._name, self._turn, reply.turn.reply, answer)
            # Sent at once after the reply's entry: a kill may follow. Without that entry it has no effect.
            self._writing.append(self._journal.start_writing(entry))

    def branched(self, answer: Answer) -> None:
        """Keep the state of an answer from which other episodes continue, for the next run of this attempt."""
        self._branched.add(answer.turn)

    def forget(self, reason: str) -> None:
        """Forget the turns, because the episode begins again."""
        log.warning("explorer.episode.begins_again", episode=self._name, turn=0, reason=reason)
        self._kept.clear()
        self._heard, self._complete = None, True

    def _answers(self, turns: int) -> Iterator[Answer]:
        return (step for kept in self._kept[:turns] for step in kept.answers)

    def _newest(self, turns: int) -> Answer | None:
        return max(self._answers(turns), key=lambda step: step.turn, default=None)

    async def keep(self, turn: int, seen: bytes, sampled: Completion, begin: int = 0) -> Completion:
        """Begin to write a new reply, or its part from token `begin` on. Returns the reply so far.

        Waits until the previous entries are written. Raises WeightsWithdrawn if older weights sampled the part.
        """
        if self._writing:
            await asyncio.wait(self._writing)
        owner, before, self._sampled_by = self._journal.owner, self._sampled_by, ""
        if before:
            log.info("explorer.episode.continued", episode=self._name, turn=turn, token=begin, sampled_by=before)
            with tracing.span("episode.continued", turn=turn, token=begin, sampled_by=before, to=owner):
                pass
        newest = self._newest(turn)
        new = self._heard is not None and (newest is None or newest.turn < self._heard.turn)
        entry = RecordedTurn(self._name, turn, seen, sampled, begin, self._heard if new and not begin else None)
        kept = self._kept[turn].continued(entry, owner) if begin else Kept(entry, ((0, owner),))
        newest = entry.answer or newest
        if newest is not None and newest.state:  # of states without branches only the newest is needed
            needed = self._branched | {newest.turn}
            self._kept[:turn] = [one.without_states(needed) for one in self._kept[:turn]]
        self._kept[turn:] = [kept]
        if self._complete:
            self._writing = [self._journal.start_writing(entry)]
        return kept.turn.completion


class Continued:
    """An episode whose environment keeps states: begin once -> step until done, as environments.episode.Episode.

    Answers come from the journal of the interrupted episode. At the first unknown answer the environment is restored to
    the state of the last known one, and continues.
    """

    def __init__(self, remote: Any, journal: EpisodeJournal) -> None:
        """`remote`: the episode at its provider, not reset yet."""
        self._remote, self._journal = remote, journal
        self._live = False
        self._last: Answer | None = None
        self._earned = 0.0  # by the journal's answers

    @property
    def durable(self) -> bool:
        """True if another explorer could continue the episode."""
        return not self._live or self._remote.snapshots or self._remote.deterministic

    async def reset(self, keep_states: bool = True) -> Answer:
        """Raises EnvironmentFailed."""
        self._last = self._journal.answer(0)
        if self._last is None:
            self._live = True
            return self._heard(await self._remote.reset(keep_states=True), self._journal.heard)
        return self._last

    @property
    def snapshots(self) -> bool:
        """True if the environment announces that states can be restored, as far as is known."""
        return not self._live or self._remote.snapshots

    @property
    def deterministic(self) -> bool:
        """True if the environment is known to announce that the same actions give the same episode."""
        return bool(self._remote.deterministic)

    async def restore(self, answer: Answer, earned: float) -> None:
        """Begin at an answer of another episode, with its state. `earned`: the sum of the rewards so far."""
        self._last, self._earned = answer, earned
        self._journal.heard(answer)

    async def step(self, text: str) -> Answer:
        """Raises EnvironmentFailed, and StateRefused if the episode has to begin again."""
        assert self._last is not None
        if not self._live:
            known = self._journal.answer(self._last.turn + 1)
            if known is not None:
                self._last = known
                self._earned += known.reward
                return known
            await self._restore(self._last)
        return self._heard(await self._remote.step(text), self._journal.answered)

    async def _restore(self, last: Answer) -> None:
        if not last.state:
            raise StateRefused(f"the journal has no state after {last.turn} actions", EnvironmentCause.REFUSED)
        await self._remote.restore(last, self._earned)
        self._live = True

    def _heard(self, step: Answer, keep: Callable[[Answer], None]) -> Answer:
        if self._remote.snapshots:
            keep(step)
        self._last = replace(step, state=b"") if self._remote.snapshots else step  # in the journal
        return step
