"""A conversation as tokens: prompts, and every reply exactly as it was sampled.

prompt -> replied(completion) -> told(next_turn) -> replied ... Each call returns a new conversation, so a conversation
may branch. Sampled text is never tokenised again: other tokens could spell it, with other log-probabilities.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trinity.data.experience import Experience, Truncation, VersionSpan
from trinity.data.images import PlacedImage
from trinity.data.routes import Routes
from trinity.explorer.types import Completion, spans_of
from trinity.explorer.weights.load_history import WeightsWithdrawn


@dataclass(frozen=True)
class Exchange:
    """A reply and the tokens `told` between it and the previous reply (none for the first). `trained` is false if the
    reply was sampled at another temperature than the trainer computes with."""

    told: tuple[int, ...]
    completion: Completion
    trained: bool = True


@dataclass(frozen=True)
class Conversation:
    """`pending`: tokens after the last reply that have no reply yet. `images`: all images of the tokens, in order."""

    prompt: tuple[int, ...]
    exchanges: tuple[Exchange, ...] = ()
    pending: tuple[int, ...] = ()
    images: tuple[PlacedImage, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """Token ids so far: the prompt of the next reply."""
        found = list(self.prompt)
        for exchange in self.exchanges:
            found += [*exchange.told, *exchange.completion.token_ids.tolist()]
        return [*found, *self.pending]

    @property
    def turns(self) -> int:
        """Replies so far."""
        return len(self.exchanges)

    @property
    def sampled_tokens(self) -> int:
        return sum(len(exchange.completion.token_ids) for exchange in self.exchanges)

    def replied(self, completion: Completion, trained: bool = True) -> "Conversation":
        """Append a reply to the pending tokens. Raises WeightsWithdrawn if its weights are older than the last ones."""
        spans = [s for e in self.exchanges[-1:] for s in e.completion.version_spans]
        if spans and completion.version_spans and completion.version_spans[0].version < spans[-1].version:
            was, now = spans[-1].version, completion.version_spans[0].version
            raise WeightsWithdrawn(f"weights went back from version {was} to {now} in the middle of a conversation")
        return replace(self, exchanges=(*self.exchanges, Exchange(self.pending, completion, trained)), pending=())

    def told(self, next_turn: Sequence[int], images: Sequence[PlacedImage] = ()) -> "Conversation":
        """Append the template's tokens between the last reply and the next one, with their images.

        A reply that was sampled to its end already has the token that ends a turn.
        """
        last = self.exchanges[-1].completion.token_ids
        ended = len(last) > 0 and len(next_turn) > 0 and int(last[-1]) == next_turn[0]
        before = self.before_turn(self.turns)
        begin = len(before.tokens) - ended
        shown = (*before.images, *(image.moved(begin) for image in images))
        return replace(self, pending=tuple(next_turn[1:] if ended else next_turn), images=shown)

    def before_turn(self, turn: int) -> "Conversation":
        """The conversation up to its first `turn` replies, without pending tokens."""
        return self._cut(turn, ())

    def before_reply(self, turn: int) -> "Conversation":
        """The conversation up to the prompt of reply number `turn` (from 0)."""
        return self._cut(turn, self.exchanges[turn].told)

    def _cut(self, turn: int, pending: tuple[int, ...]) -> "Conversation":
        cut = replace(self, exchanges=self.exchanges[:turn], pending=pending)
        end = len(cut.tokens)
        return replace(cut, images=tuple(image for image in self.images if image.start < end))

    def experience(self, rollout: int, reward: float, untrained_turns: int = 0) -> Experience:
        """All turns as one experience. The mask excludes tokens that were not sampled and the first `untrained_turns`.

        Log-probabilities of tokens that were not sampled are 0. The version span of a reply includes the tokens told
        before it, so that spans cover the response without a gap.
        """
        token_ids: list[np.ndarray] = [np.asarray(self.prompt, np.int32)]
        logprobs, mask = [np.zeros(0, np.float32)], [np.zeros(0, bool)]
        ends: list[tuple[VersionSpan, int]] = []
        at = 0
        for turn, exchange in enumerate(self.exchanges):
            told, completion = np.asarray(exchange.told, np.int32), exchange.completion
            token_ids += [told, completion.token_ids]
            logprobs += [np.zeros(len(told), np.float32), completion.logprobs]
            mask += [
                np.zeros(len(told), bool),
                np.full(len(completion.token_ids), turn >= untrained_turns and exchange.trained),
            ]
            at += len(told)
            ends += [(span, at + span.end) for span in completion.version_spans]
            at += len(completion.token_ids)
        return Experience(
            rollout=rollout,
            step=0,
            token_ids=np.concatenate(token_ids),
            prompt_length=len(self.prompt),
            logprobs=np.concatenate(logprobs),
            action_mask=np.concatenate(mask),
            reward=reward,
            version_spans=spans_of(ends),
            truncation=self.truncation,
            images=self.before_turn(self.turns).images,
            routes=self._routes(),
        )

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Begin and end of each reply, counted from the end of the prompt."""
        ends = [(end - len(self.prompt), len(made.token_ids)) for end, made in self._ends()]
        return [(end - length, end) for end, length in ends]

    def _routes(self) -> Routes | None:
        """Experts of all tokens but the last, by the reply that first read each; None if some are unknown."""
        parts: list[np.ndarray] = []
        end = known = 0
        for end, made in self._ends():
            if made.routes is not None and len(made.routes) == end - 1:
                parts.append(made.routes[known:])
                known = end - 1
        return Routes.of(np.concatenate(parts)) if parts and known == end - 1 else None

    def _ends(self) -> Iterator[tuple[int, Completion]]:
        """Yields each reply with the number of tokens up to its end."""
        end = len(self.prompt)
        for exchange in self.exchanges:
            end += len(exchange.told) + len(exchange.completion.token_ids)
            yield end, exchange.completion

    def step_experience(self, turn: int, rollout: int, reward: float) -> Experience:
        """Reply number `turn` as a separate experience, with everything before it as the prompt."""
        before, exchange = self.before_reply(turn), self.exchanges[turn]
        single = Conversation(tuple(before.tokens), (replace(exchange, told=()),), images=before.images)
        return replace(single.experience(rollout, reward), step=turn)

    @property
    def truncation(self) -> Truncation:
        """RESPONSE if the last reply reached its limit."""
        cut = bool(self.exchanges) and self.exchanges[-1].completion.finish_reason == "length"
        return Truncation.RESPONSE if cut else Truncation.NONE
