"""The turns of an unfinished task's episodes, merged from the entries of all attempts at it.

Each attempt writes under a separate subject, so a process whose lease ended cannot change the next holder's entries.
From its first turn on, a later attempt replaces the entries of earlier ones. When a turn is played again, its digest
shows whether the reply still answers the same tokens.
"""

import hashlib
import itertools
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from trinity.data.experience import Experience, Limits, Truncation
from trinity.data.images import PlacedImage
from trinity.explorer.types import Completion, spans_of
from trinity.explorer.weights.load_history import WeightsWithdrawn
from trinity.runtime.errors import FailureCause, InvalidInput
from trinity.sdk.contract import Answer

OPEN = "open"
RETURNED = FailureCause.LEASE_LOST  # cause of an attempt whose explorer returned the lease: its turns are kept
_REASONS = ("stop", "length", OPEN)
DIGEST_BYTES = 16
LONGEST_NAME = 200
# Attempts in a row without a further turn, after which episodes begin again: the kept turns may crash explorers.
_FRUITLESS = 3


@dataclass(frozen=True)
class RecordedTurn:
    """Reply number `turn` (from 0) of an episode. `seen`: `digest` of the tokens and rewards before it.

    A long reply has several entries: `begin` counts its tokens in earlier entries, and all but the last entry have the
    finish reason OPEN. `answer`: the answer before the reply, of an environment that keeps states; None if an earlier
    entry has it.
    """

    episode: str
    turn: int
    seen: bytes
    completion: Completion
    begin: int = 0
    answer: Answer | None = None

    @property
    def reply(self) -> bytes:
        """Digest of the reply: of its context and its tokens."""
        tokens = np.asarray(self.completion.token_ids, np.int64).tobytes()
        return hashlib.blake2b(self.seen + tokens, digest_size=DIGEST_BYTES).digest()

    def check(self, limits: Limits) -> None:
        """Raises InvalidInput naming the wrong field."""
        _check_place(self.episode, self.turn)
        if len(self.seen) != DIGEST_BYTES:
            raise InvalidInput("turn.seen", f"has {len(self.seen)} bytes, must have {DIGEST_BYTES}")
        if self.begin < 0:
            raise InvalidInput("turn.begin", f"is {self.begin}, must be >= 0")
        made = self.completion
        if made.finish_reason not in _REASONS:
            raise InvalidInput("turn.finish_reason", f"is {made.finish_reason[:40]!r}, must be {' or '.join(_REASONS)}")
        if not len(made.token_ids):
            raise InvalidInput("turn.token_ids", "is empty, must have at least one token")
        as_experience = Experience(
            rollout=0,
            step=0,
            token_ids=np.concatenate([np.zeros(1, np.int32), made.token_ids]),
            prompt_length=1,
            logprobs=made.logprobs,
            action_mask=np.ones(len(made.token_ids), bool),
            reward=0.0,
            version_spans=made.version_spans,
            truncation=Truncation.NONE,
        )
        as_experience.check("turn", limits)


@dataclass(frozen=True)
class RecordedAnswer:
    """The answer to the reply of a turn, of an environment that keeps states. `reply`: the reply's digest."""

    episode: str
    turn: int
    reply: bytes
    answer: Answer

    def check(self) -> None:
        """Raises InvalidInput naming the wrong field."""
        _check_place(self.episode, self.turn)


def _check_place(episode: str, turn: int) -> None:
    if not 1 <= len(episode) <= LONGEST_NAME:
        raise InvalidInput("turn.episode", f"has {len(episode)} characters, must have 1 to {LONGEST_NAME}")
    if turn < 0:
        raise InvalidInput("turn.turn", f"is {turn}, must be >= 0")


@dataclass(frozen=True)
class Entry:
    """An entry of one attempt: a turn, the answer to it, or the cause of the attempt's end. `owner`: the explorer's
    token in the subject."""

    attempt: int
    owner: str
    turn: RecordedTurn | RecordedAnswer | str


@dataclass(frozen=True)
class Kept:
    """A turn and its explorers: `parts` has (first token, explorer) for each explorer that sampled a part.

    `answered`: the answer to the reply; None if it is unknown or not kept.
    """

    turn: RecordedTurn
    parts: tuple[tuple[int, str], ...]
    answered: Answer | None = None

    @property
    def owner(self) -> str:
        """The explorer of the last tokens."""
        return self.parts[-1][1]

    @property
    def reached(self) -> tuple[int, int, bool]:
        """(finished turns, tokens of the open turn, is answered), if the episode ended with this turn."""
        if self.turn.completion.finish_reason == OPEN:
            return self.turn.turn, len(self.turn.completion.token_ids), False
        return self.turn.turn + 1, 0, self.answered is not None

    @property
    def answers(self) -> list[Answer]:
        """The known answers before and after the reply."""
        return [step for step in (self.turn.answer, self.answered) if step is not None]

    def continued(self, turn: RecordedTurn, owner: str) -> "Kept":
        """Append a further entry of the same turn. Raises InvalidInput if the entry does not continue it."""
        made, begin = self.turn.completion, len(self.turn.completion.token_ids)
        if made.finish_reason != OPEN or turn.begin != begin or turn.seen != self.turn.seen:
            raise InvalidInput("turn.begin", f"is {turn.begin} of a reply with {begin} tokens ({made.finish_reason})")
        parts = self.parts if owner == self.owner else (*self.parts, (begin, owner))
        whole = replace(turn, begin=0, completion=joined(made, turn.completion), answer=self.turn.answer)
        return Kept(whole, parts)

    def without_states(self, but: Container[int]) -> "Kept":
        """The same without the answers' states, except those after these numbers of actions."""

        def bare(step: Answer | None) -> Answer | None:
            return step if step is None or step.turn in but else replace(step, state=b"")

        return replace(self, turn=replace(self.turn, answer=bare(self.turn.answer)), answered=bare(self.answered))

    @property
    def versions(self) -> set[int]:
        return {span.version for span in self.turn.completion.version_spans}


@dataclass
class Known:
    """Turns of each of the `episodes`, by name. `progressed` counts attempts that got further than all before them or
    returned their lease; `fruitless` counts the newest attempts in a row that did neither."""

    episodes: dict[str, list[Kept]] = field(default_factory=dict)
    progressed: int = 0
    fruitless: int = 0

    @property
    def newest_version(self) -> int:
        """The newest version that sampled a turn; -1 without turns."""
        return max((v for turns in self.episodes.values() for kept in turns for v in kept.versions), default=-1)


def digest(token_ids: Sequence[int], rewards: Sequence[float], images: Sequence[PlacedImage] = ()) -> bytes:
    """Digest of a reply's context: the tokens before it, their images, and the rewards of the turns so far."""
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
    hashed.update(len(token_ids).to_bytes(8, "little") + np.asarray(token_ids, np.int64).tobytes())
    hashed.update(np.asarray(rewards, np.float64).tobytes())
    for image in images:
        hashed.update(image.digest)
    return hashed.digest()


def joined(first: Completion, then: Completion) -> Completion:
    """Join two parts of a reply. Raises WeightsWithdrawn if older weights sampled the second part."""
    was, now = first.version_spans[-1].version, then.version_spans[0].version
    if now < was:
        raise WeightsWithdrawn(f"weights went back from version {was} to {now} in the middle of a reply")
    ends = [(span, span.end) for span in first.version_spans]
    ends += [(span, len(first.token_ids) + span.end) for span in then.version_spans]
    return Completion(
        np.concatenate([first.token_ids, then.token_ids]),
        np.concatenate([first.logprobs, then.logprobs]),
        spans_of(ends),
        then.finish_reason,
        then.routes if first.routes is None or then.routes is None else np.concatenate(
            [first.routes, then.routes[len(first.routes) :]]
        ),
    )  # fmt: skip


def known_before(attempt: int, entries: Iterable[Entry]) -> Known:
    """Merge the entries of earlier attempts, from the newest failed attempt on.

    Forgets all turns after `_FRUITLESS` fruitless attempts in a row. Raises InvalidInput if a turn lacks its
    predecessor.
    """
    earlier = sorted((entry for entry in entries if entry.attempt < attempt), key=lambda entry: entry.attempt)
    known, furthest, last = Known(), dict[str, tuple[int, int, bool]](), 0
    for number, group in itertools.groupby(earlier, key=lambda entry: entry.attempt):
        known.fruitless += number - last - 1  # attempts without entries
        last, further = number, False
        early: dict[tuple[str, int, bytes], Answer] = {}  # answers that were stored before the replies to them
        for entry in group:
            if isinstance(entry.turn, str):
                if entry.turn == RETURNED:
                    further = True
                else:
                    known.episodes.clear()
                continue
            name = entry.turn.episode
            reached = _add(known.episodes.setdefault(name, []), entry.turn, entry.owner, early)
            if reached > furthest.get(name, (0, 0, False)):
                furthest[name], further = reached, True
        known.progressed += further
        known.fruitless = 0 if further else known.fruitless + 1
    known.fruitless += attempt - last - 1
    if known.fruitless >= _FRUITLESS:
        known.episodes.clear()
    return known


def _add(
    turns: list[Kept],
    entry: RecordedTurn | RecordedAnswer,
    owner: str,
    early: dict[tuple[str, int, bytes], Answer],
) -> tuple[int, int, bool]:
    """Add a further entry to the turns of its episode. Returns how far it `reached`. Raises as known_before does."""
    name, at = entry.episode, entry.turn
    if isinstance(entry, RecordedAnswer):
        # The reply comes later or not at all, or an attempt that had lost its lease sampled the turn again.
        if at >= len(turns) or turns[at].turn.reply != entry.reply:
            early[name, at, entry.reply] = entry.answer
            return 0, 0, False
        kept = replace(turns[at], answered=entry.answer)
    elif at > len(turns):
        raise InvalidInput("turn.turn", f"is {at} of episode {name}, which has {len(turns)} turns before it")
    elif not entry.begin:
        kept = Kept(entry, ((0, owner),))
    elif at < len(turns):
        kept = turns[at].continued(entry, owner)
    else:
        raise InvalidInput("turn.begin", f"is {entry.begin} of turn {at}, which has no entry before it")
    if kept.answered is None:
        kept = replace(kept, answered=early.pop((name, at, kept.turn.reply), None))
    turns[at:] = [kept]
    return kept.reached
