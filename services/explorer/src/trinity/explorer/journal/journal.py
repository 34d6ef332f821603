"""Reads and writes the turns of unfinished episodes.

    journal = await journals.open(task, attempt)   # what earlier attempts left
    with journal.run():                            # each run of the workflow
        episode = current_episode(place)           # in the order in which a rollout plays them
        reply = episode.recorded(turn, seen)       # None: it is sampled, and written by episode.keep(turn, seen, reply)

A turn is written while its episode plays the next one, and is durable before the turn after it is written: no turn is
stored without those before it. The journal never fails an attempt: what cannot be written is not kept, with a log line,
and what cannot be read makes the episodes begin again.
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
from trinity.explorer.environments.types import EnvironmentCause, StateRefused, Step
from trinity.explorer.journal.turns import OPEN, RETURNED, Entry, Kept, Known, RecordedTurn, known_before
from trinity.explorer.journal.wire import decode_entry, encode_abandoned, encode_turn
from trinity.explorer.types import Completion
from trinity.runtime import tracing
from trinity.runtime.broker import Broker, on_subject
from trinity.runtime.errors import FailureCause, InvalidInput, TrinityError
from trinity.runtime.metrics import Counter as Metric
from trinity.runtime.names import RunNames, owner_of

log = structlog.get_logger(__name__)

TURNS_KEPT = Metric("trinity_explorer_turns_kept_total", "Turns of unfinished episodes that were written down")
TURNS_CONTINUED = Metric(
    "trinity_explorer_turns_continued_total", "Turns that were played again as recorded, not sampled again"
)

_SECONDS = 5.0  # that a turn may take to be written
_RETURN_SECONDS = 1.0  # that a drain has for it
_EVALUATIONS = 2**62  # is added to their ordinals, which are of another queue
_HEADROOM_BYTES = 64 * 1024
_MOST_ENTRIES, _MOST_BYTES = 100_000, 2**28  # of one task
_READ_AHEAD = 64

_journal: ContextVar["TaskJournal | None"] = ContextVar("journal", default=None)


def current_episode(place: str) -> "EpisodeJournal | None":
    """The journal of the next episode that the rollout at this place plays; None where none is kept."""
    journal = _journal.get()
    return journal.episode(place) if journal is not None else None


@dataclass(frozen=True)
class Journals:
    """The journals of one explorer.

    `usable`: whether tokens of a version may be trained now. `reaches`: waits until that step's weights are served
    here; false if they cannot be. `flush_tokens`: between two entries of a reply; 0: it is one. `keeps`: whether turns
    are kept, of training; leases that are given back are noted in any case.
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
        """Of an attempt at a task."""
        known = await self._known(task, attempt) if attempt > 1 else Known()
        # Older weights never continue what newer ones began.
        if known.newest_version >= 0 and not await self.reaches(known.newest_version):
            known.episodes.clear()
        return TaskJournal(self, task, attempt, known)

    async def give_back(self, task: Task, attempt: int) -> None:
        """Note that an attempt gives its lease back: it is none of those that died."""
        subject = self.names.turn(_ordinal(task), attempt, owner_of(self.explorer_id))
        await _publish(self.broker, subject, encode_abandoned(RETURNED), f"{subject}/returned", _RETURN_SECONDS)

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
    """Of one attempt at a task."""

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
        """A run of the workflow in this context. It continues what an earlier run of this attempt left, too."""
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
        """The next run of this attempt begins again."""
        self._episodes.clear()

    async def abandon(self, cause: FailureCause) -> None:
        """The attempt failed: no later one continues it."""
        await self.settle()
        if self._written or any(self._episodes.values()):
            await self._publish(encode_abandoned(cause))

    async def settle(self) -> None:
        """Wait for the writes that are under way."""
        if self._writing:
            await asyncio.wait(self._writing)

    def start_writing(self, turn: RecordedTurn) -> "asyncio.Task[None]":
        writing = asyncio.create_task(self._write(turn))
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)
        return writing

    async def _write(self, turn: RecordedTurn) -> None:
        """Once a turn could not be written, no later one is: turns would be missing between them."""
        if self._writes:
            written = await self._publish(encode_turn(turn))
            self._writes &= written
            TURNS_KEPT.inc(written)

    async def _publish(self, data: bytes) -> bool:
        self._written += 1
        return await _publish(self._broker, self._subject, data, f"{self._subject}/{self._written}", _SECONDS)


def _ordinal(task: Task) -> int:
    return task.ordinal + (_EVALUATIONS if task.kind is TaskKind.EVALUATION else 0)


async def _publish(broker: Broker, subject: str, data: bytes, name: str, seconds: float) -> bool:
    """Whether it was written."""
    try:
        if len(data) > broker.client.max_payload - _HEADROOM_BYTES:
            raise InvalidInput("turn", f"has {len(data)} bytes, NATS takes {broker.client.max_payload}")
        await broker.publish(subject, data, message_id=name, deadline_seconds=seconds)
    except (TrinityError, nats.js.errors.Error) as error:
        log.warning("explorer.journal.unwritten", subject=subject, reason=str(error))
        return False
    return True


class EpisodeJournal:
    """Of one episode. `moves`: at which turns it came to another explorer. `flush_tokens`: of a reply, between two
    entries; 0: a reply is one entry."""

    def __init__(self, journal: TaskJournal, name: str, kept: list[Kept]) -> None:
        self._journal, self._name, self._kept = journal, name, kept
        self._sampled_by = ""  # the last turn that was played again
        self._heard: Step | None = None
        self._complete = True
        while (last := max(self._answers(len(kept)), key=lambda step: step.turn, default=None)) and not last.state:
            kept.pop()  # nothing continues from there
        self.flush_tokens = journal.flush_tokens
        self._writing: asyncio.Task[None] | None = None

    @property
    def moves(self) -> list[dict[str, int | str]]:
        """`turn` (from 0), `from`, the explorer that sampled what is before it, and `to`, which continued; `token`
        (from 0) in the middle of a reply."""
        parts = [(turn, token, owner) for turn, kept in enumerate(self._kept) for token, owner in kept.parts]
        parts.append((len(self._kept), 0, self._journal.owner))
        return [
            {"turn": turn, "from": before, "to": after, **({"token": token} if token else {})}
            for (_, _, before), (turn, token, after) in pairwise(parts)
            if before != after
        ]

    def recorded(self, turn: int, seen: bytes) -> Completion | None:
        """The reply that was given at this turn; None from the first turn on that is not known or answers another.

        With the finish_reason OPEN it is the beginning of one.
        """
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

    def answer(self, turn: int) -> Step | None:
        """What an environment that keeps states answered after `turn` actions; None where it is not known."""
        return next((step for step in self._answers(len(self._kept)) if step.turn == turn), None)

    def heard(self, answer: Step) -> None:
        """An environment that keeps states answered: it goes into the entry of the next reply. Without a state no later
        turn is kept."""
        self._heard = answer
        if self._complete and not answer.state and not answer.done:
            self._complete = False
            log.info("explorer.journal.stateless", episode=self._name, actions=answer.turn)

    def forget(self, reason: str) -> None:
        """The episode begins again."""
        log.warning("explorer.episode.begins_again", episode=self._name, turn=0, reason=reason)
        self._kept.clear()
        self._heard, self._complete = None, True

    def _answers(self, turns: int) -> Iterator[Step]:
        return (kept.turn.answer for kept in self._kept[:turns] if kept.turn.answer is not None)

    async def keep(self, turn: int, seen: bytes, sampled: Completion, begin: int = 0) -> Completion:
        """Begin to write a reply that was sampled now, or its part from token `begin` on; returns the reply so far.

        Waits until what was kept before is written. Raises WeightsWithdrawn if older weights sampled the part.
        """
        if self._writing is not None:
            await asyncio.wait([self._writing])
        owner, before, self._sampled_by = self._journal.owner, self._sampled_by, ""
        if before:
            log.info("explorer.episode.continued", episode=self._name, turn=turn, token=begin, sampled_by=before)
            with tracing.span("episode.continued", turn=turn, token=begin, sampled_by=before, to=owner):
                pass
        new = self._heard is not None and all(step.turn < self._heard.turn for step in self._answers(turn))
        entry = RecordedTurn(self._name, turn, seen, sampled, begin, self._heard if new and not begin else None)
        kept = self._kept[turn].continued(entry, owner) if begin else Kept(entry, ((0, owner),))
        if entry.answer is not None and entry.answer.state:  # one state for each episode is enough here
            self._kept[:turn] = [one.without_state() for one in self._kept[:turn]]
        self._kept[turn:] = [kept]
        if self._complete:
            self._writing = self._journal.start_writing(entry)
        return kept.turn.completion


class Continued:
    """reset once -> step until done, as trinity.explorer.environments.episode.Episode, where states are kept.

    What an interrupted episode was answered is in its journal. At the first answer that is not there the environment
    gets the state back in which the policy replied, and continues.
    """

    def __init__(self, remote: Any, journal: EpisodeJournal) -> None:
        """`remote`: the episode at its provider, which is not reset yet."""
        self._remote, self._journal = remote, journal
        self._live = False
        self._last: Step | None = None

    @property
    def durable(self) -> bool:
        """Whether another explorer can continue it. False before reset."""
        return not self._live or self._remote.snapshots or self._remote.deterministic

    async def reset(self) -> Step:
        """Raises EnvironmentFailed."""
        self._last = self._journal.answer(0)
        if self._last is None:
            self._live = True
            self._last = self._heard(await self._remote.reset(keep_states=True))
        return self._last

    async def step(self, text: str) -> Step:
        """Raises EnvironmentFailed, and StateRefused where the episode has to begin again."""
        assert self._last is not None
        if not self._live:
            known = self._journal.answer(self._last.turn + 1)
            if known is not None:
                self._last = known
                return known
            await self._restore(self._last)
        self._last = self._heard(await self._remote.step(text))
        return self._last

    async def _restore(self, last: Step) -> None:
        if not last.state:
            raise StateRefused(f"the journal has no state after {last.turn} actions", EnvironmentCause.REFUSED)
        await self._remote.restore(last.state, last.turn)
        self._live = True

    def _heard(self, step: Step) -> Step:
        if self._remote.snapshots:
            self._journal.heard(step)
            return replace(step, state=b"")  # in the journal
        return step
