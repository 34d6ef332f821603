"""A session's sample tree: every reply once, with the tokens before it, and the branches of the conversation.

    recognise(messages) -> place(segments, replies) -> add(place, completion, reply) ... -> branches()

An assistant's message that equals a recorded reply is replaced by its tokens, which are never encoded again. If a
history was changed, the next reply begins a branch at the last unchanged turn. A branch is the path from the beginning
to a reply without successor; a turn in several branches is trained once, in the newest.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trinity.data.images import PlacedImage
from trinity.explorer.types import Completion
from trinity.explorer.workflows.conversation import Conversation, Exchange


@dataclass(frozen=True)
class Said:
    """The parts of a message that count when two are compared. `calls` are (name, arguments) of tools, with the
    arguments as JSON with sorted keys; call ids do not count."""

    role: str
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> "Said":
        """Parse a message of chat completions, in any form that clients return."""
        calls = message.get("tool_calls")
        functions = [call.get("function") or {} for call in calls if isinstance(call, Mapping)] if calls else []
        named = tuple((str(f.get("name", "")), _sorted(f.get("arguments"))) for f in functions)
        return cls(str(message.get("role", "")), _text(message.get("content")), named)


@dataclass(frozen=True, eq=False)
class Turn:
    """One reply. `told`: tokens between the parent's reply and this one; all tokens before it without a parent.

    `shown`: images among these tokens, with positions that begin at 0.
    `trained` is false if it was sampled from another distribution than the trainer computes with.
    """

    parent: "Turn | None"
    told: tuple[int, ...]
    shown: tuple[PlacedImage, ...]
    completion: Completion
    reply: Said
    trained: bool

    @property
    def before(self) -> tuple[int, ...]:
        """The tokens before this reply."""
        return tuple(Place(self.parent, self.told, self.shown).tokens)

    @property
    def path(self) -> list["Turn"]:
        """The turns from the beginning to this one."""
        found: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            found.append(turn)
            turn = turn.parent
        return found[::-1]


@dataclass(frozen=True)
class Place:
    """The place of the next reply: after `parent` and the tokens told since, with the images among these."""

    parent: Turn | None
    told: tuple[int, ...]
    shown: tuple[PlacedImage, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """The prompt."""
        before = self.parent.path if self.parent is not None else []
        return [t for turn in before for t in (*turn.told, *turn.completion.token_ids.tolist())] + [*self.told]

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        """All images of the prompt."""
        found: list[PlacedImage] = []
        at = 0
        for turn in self.parent.path if self.parent is not None else []:
            found += [image.moved(at) for image in turn.shown]
            at += len(turn.told) + len(turn.completion.token_ids)
        return (*found, *(image.moved(at) for image in self.shown))


class SampleTree:
    """All replies of one session, in the order of their completion."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._by_reply: dict[Said, list[Turn]] = {}

    def recognise(self, messages: Sequence[Mapping[str, Any]]) -> list[tuple[int, Turn]]:
        """(index, turn) of the assistant's messages that equal recorded replies.

        Among equal replies, the successor of the turn recognised before is chosen, or the newest.
        """
        found: list[tuple[int, Turn]] = []
        for index, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            candidates = self._by_reply.get(Said.of(message), [])
            before = found[-1][1] if found else None
            following = [turn for turn in candidates if turn.parent is before]
            if candidates:
                found.append((index, (following or candidates)[-1]))
        return found

    def place(
        self,
        segments: Sequence[Sequence[int]],
        replies: Sequence[Turn],
        images: Sequence[Sequence[PlacedImage]] = (),
    ) -> Place:
        """The place after a history. `segments` are the tokens before, between and after these replies; `images` are
        those of each segment.

        A reply that was sampled to its end has the token that ends a turn, with which the next segment begins. An equal
        reply that was sampled at this very place takes the place of another one, as of a second sub-agent.
        """
        parent: Turn | None = None
        images = images or [()] * len(segments)
        told, shown = list(segments[0]), list(images[0])
        for segment, seen, turn in zip(segments[1:], images[1:], replies, strict=True):
            here = Place(parent, tuple(told), tuple(shown))
            fitting = [one for one in self._by_reply[turn.reply] if Place(one.parent, one.told, one.shown) == here]
            sampled = turn.completion.token_ids.tolist()
            if fitting:
                parent, told, shown = turn if turn in fitting else fitting[-1], [], []
                sampled = parent.completion.token_ids.tolist()
            else:
                told += sampled
            ended = bool(sampled) and bool(segment) and sampled[-1] == segment[0]
            shown += [image.moved(len(told) - ended) for image in seen]
            told += segment[1:] if ended else segment
        return Place(parent, tuple(told), tuple(shown))

    def add(self, place: Place, completion: Completion, reply: Said, trained: bool = True) -> Turn:
        """Add a reply that was sampled at a place."""
        turn = Turn(place.parent, place.told, place.shown, completion, reply, trained)
        self.turns.append(turn)
        self._by_reply.setdefault(reply, []).append(turn)
        return turn

    def branches(self) -> list[Conversation]:
        """The branches in the order of their last replies. Each turn is trained in one, and context in the others."""
        parents = {turn.parent for turn in self.turns}
        leaves = [turn for turn in self.turns if turn not in parents]
        taken: set[Turn] = set()
        made = []
        for leaf in reversed(leaves):
            path = leaf.path
            exchanges = tuple(
                Exchange(turn.told if turn.parent else (), turn.completion, turn.trained and turn not in taken)
                for turn in path
            )
            taken.update(path)
            made.append(Conversation(path[0].told, exchanges, images=Place(leaf, ()).images))
        return made[::-1]


def _text(content: Any) -> str:
    """The text of a message's content, which is a text, nothing or parts. Other values are rendered as JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        return json.dumps(content, sort_keys=True, default=str)
    parts = [part if isinstance(part, Mapping) else {"text": str(part)} for part in content]
    return "".join(p["text"] if isinstance(p.get("text"), str) else json.dumps(p, default=str) for p in parts)


def _sorted(arguments: Any) -> str:
    """A call's arguments, an object or its JSON, as JSON with sorted keys. Invalid JSON is kept as it is."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return str(arguments)
    return json.dumps(arguments, sort_keys=True, default=str)
