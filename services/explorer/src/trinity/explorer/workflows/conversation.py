"""A conversation as tokens: prompts, and every reply exactly as it was sampled.

prompt -> replied(completion) -> told(next_turn) -> replied ... ; each gives a new conversation, so one may branch. Text
that was sampled is never tokenised again: other tokens could spell it, with other log-probabilities.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trinity.data.experience import Experience, Truncation
from trinity.data.images import PlacedImage
from trinity.explorer.types import Completion, spans_of
from trinity.explorer.weights.load_history import WeightsWithdrawn


@dataclass(frozen=True)
class Exchange:
    """`told`: tokens between the previous reply and this one (empty for the first), and the reply. `trained`: false
    where it was sampled at another temperature than the trainer computes with."""

    told: tuple[int, ...]
    completion: Completion
    trained: bool = True


@dataclass(frozen=True)
class Conversation:
    """`pending`: tokens after the last reply that have no reply yet. `images`: those among all tokens, in order."""

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
        """With a reply to what is pending. Raises WeightsWithdrawn if older weights sampled it than the one before."""
        spans = [s for e in self.exchanges[-1:] for s in e.completion.version_spans]
        if spans and completion.version_spans and completion.version_spans[0].version < spans[-1].version:
            was, now = spans[-1].version, completion.version_spans[0].version
            raise WeightsWithdrawn(f"weights went back from version {was} to {now} in the middle of a conversation")
        return replace(self, exchanges=(*self.exchanges, Exchange(self.pending, completion, trained)), pending=())

    def told(self, next_turn: Sequence[int], images: Sequence[PlacedImage] = ()) -> "Conversation":
        """With what the chat template writes between the last reply and the next one, and the images in that.

        A reply that was sampled up to its end has the token that ends a turn already.
        """
        last = self.exchanges[-1].completion.token_ids
        ended = len(last) > 0 and len(next_turn) > 0 and int(last[-1]) == next_turn[0]
        before = self.before_turn(self.turns)
        begin = len(before.tokens) - ended
        shown = (*before.images, *(image.moved(begin) for image in images))
        return replace(self, pending=tuple(next_turn[1:] if ended else next_turn), images=shown)

    def before_turn(self, turn: int) -> "Conversation":
        """As it was when the first `turn` replies had been given, and nothing was told since."""
        return self._cut(turn, ())

    def before_reply(self, turn: int) -> "Conversation":
        """As it was when reply number `turn` (from 0) was asked for."""
        return self._cut(turn, self.exchanges[turn].told)

    def _cut(self, turn: int, pending: tuple[int, ...]) -> "Conversation":
        cut = replace(self, exchanges=self.exchanges[:turn], pending=pending)
        end = len(cut.tokens)
        return replace(cut, images=tuple(image for image in self.images if image.start < end))

    def experience(self, rollout: int, reward: float, untrained_turns: int = 0) -> Experience:
        """All turns as one experience. Trained: the sampled tokens, but for those of the first `untrained_turns`.

        Log-probabilities are those of the sampled tokens, 0 elsewhere. What was told is in the version span of the
        reply after it: spans cover the response without a gap.
        """
        token_ids: list[np.ndarray] = [np.asarray(self.prompt, np.int32)]
        logprobs, mask = [np.zeros(0, np.float32)], [np.zeros(0, bool)]
        ends: list[tuple[int, int]] = []  # (version, end) of each span
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
            ends += [(span.version, at + span.end) for span in completion.version_spans]
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
        )

    def step_experience(self, turn: int, rollout: int, reward: float) -> Experience:
        """Reply number `turn` as an experience of its own, with all before it as its prompt."""
        before, exchange = self.before_reply(turn), self.exchanges[turn]
        alone = Conversation(tuple(before.tokens), (replace(exchange, told=()),), images=before.images)
        return replace(alone.experience(rollout, reward), step=turn)

    @property
    def truncation(self) -> Truncation:
        """RESPONSE if the last reply reached its limit."""
        cut = bool(self.exchanges) and self.exchanges[-1].completion.finish_reason == "length"
        return Truncation.RESPONSE if cut else Truncation.NONE
