"""Maps experiences of Trinity-RFT's form to trajectories: it finds the engine's replies in their tokens.

A workflow may put experiences together as it likes. Trained tokens are searched in the recorded replies: a reply is
found where its tokens follow the tokens that it was sampled after. Log-probabilities and versions come from the reply.
A trained token that belongs to no reply is refused.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trinity.api.numbers import real_number
from trinity.common.experience import Experience as Made
from trinity.common.refusals import NotMapped
from trinity.data.experience import Experience, Truncation, VersionSpan
from trinity.explorer.types import Completion, spans_of

_REFUSED = (
    "advantages",
    "returns",
    "token_level_reward",
    "chosen",
    "rejected",
    "multi_modal_data",
    "multi_modal_inputs",
)


@dataclass(frozen=True)
class Reply:
    """`before`: the tokens that it was sampled after. `trained`: false if it was sampled from another distribution than
    the trainer computes with."""

    before: tuple[int, ...]
    completion: Completion
    text: str
    trained: bool

    @property
    def cut(self) -> bool:
        return self.completion.finish_reason == "length"

    def experience(self, prompt_text: str = "") -> Made:
        """Returns prompt and reply as an experience of Trinity-RFT."""
        return Made(
            tokens=[*self.before, *self.completion.token_ids.tolist()],
            prompt_length=len(self.before),
            logprobs=self.completion.logprobs.tolist(),
            prompt_text=prompt_text,
            response_text=self.text,
            truncate_status="response_truncated" if self.cut else None,
        )


def trajectory(made: Made, replies: Sequence[Reply], name: str) -> Experience:
    """The trajectory of an experience called `name`. Raises NotMapped if it is none of these replies'."""
    for part in _REFUSED:
        if getattr(made, part) is not None:
            raise NotMapped(f"{name} has {part}, which workflows cannot set", "experiences")
    if made.reward is None:
        raise NotMapped(f"{name} has no reward", "experiences")
    tokens, mask = _array(made.tokens, np.int32), _array(made.action_mask, bool)
    if not 1 <= made.prompt_length <= len(tokens):
        raise NotMapped(f"{name} has prompt_length {made.prompt_length} and {len(tokens)} tokens", "experiences")
    if len(mask) != len(tokens) - made.prompt_length:
        problem = f"{name} has an action_mask of {len(mask)} for {len(tokens) - made.prompt_length} response tokens"
        raise NotMapped(problem, "experiences")
    found = _Found(made.prompt_length, len(mask))
    told = None if made.logprobs is None else _array(made.logprobs, np.float32)
    # Equal replies may have been sampled in different ways; the values of the experience decide between them.
    for reply in sorted(
        replies, key=lambda reply: (len(reply.before), not _has_values(told, reply, made.prompt_length))
    ):
        found.add(reply, tokens)
    if not found.spans or (mask & ~found.sampled).any():
        at = int(np.argmax(mask & ~found.sampled))
        problem = f"{name} trains response token {at}, which no reply of self.model has at that place"
        raise NotMapped(problem, "experiences")
    return Experience(
        rollout=int(made.eid.run),
        step=int(made.eid.step),
        token_ids=tokens,
        prompt_length=made.prompt_length,
        logprobs=found.logprobs,
        action_mask=mask & found.trained,
        reward=real_number(made.reward, "reward"),
        version_spans=found.version_spans,
        truncation=_truncation(made, found),
        metrics={key: real_number(value, f"metrics: {key}") for key, value in made.metrics.items()},
        info_json=json.dumps(made.info, default=str) if made.info else "",
        prompt_text=made.prompt_text or "",
        response_text=made.response_text or "",
        teacher_logprobs=None if made.teacher_logprobs is None else _array(made.teacher_logprobs, np.float32),
    )


class _Found:
    """Collects the replies' values for the `length` response tokens after a prompt of `prompt_length`."""

    def __init__(self, prompt_length: int, length: int) -> None:
        self._begin, self._length, self._at = prompt_length, length, 0
        self.logprobs = np.zeros(length, np.float32)
        self.sampled, self.trained = np.zeros(length, bool), np.zeros(length, bool)
        self.spans: list[tuple[VersionSpan, int]] = []  # with their ends
        self.cut = False

    def add(self, reply: Reply, tokens: np.ndarray) -> None:
        """Returns the reply if these tokens hold it after the replies found so far."""
        ids = reply.completion.token_ids
        begin = len(reply.before) - self._begin
        end = begin + len(ids)
        if begin < self._at or end > self._length:
            return
        if not np.array_equal(tokens[len(reply.before) : len(reply.before) + len(ids)], ids):
            return
        if not np.array_equal(tokens[: len(reply.before)], np.asarray(reply.before, np.int32)):
            return
        self.logprobs[begin:end] = reply.completion.logprobs
        self.sampled[begin:end], self.trained[begin:end] = True, reply.trained
        self.spans += [(span, begin + span.end) for span in reply.completion.version_spans]
        self._at, self.cut = end, reply.cut

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Tokens between replies belong to the span of the next reply; tokens after the last reply to the last span."""
        return spans_of([*self.spans[:-1], (self.spans[-1][0], self._length)])


def _has_values(logprobs: np.ndarray | None, reply: Reply, prompt_length: int) -> bool:
    begin, values = len(reply.before) - prompt_length, reply.completion.logprobs
    return logprobs is not None and begin >= 0 and np.array_equal(logprobs[begin : begin + len(values)], values)


def _truncation(made: Made, found: _Found) -> Truncation:
    if made.truncate_status == "prompt_truncated":
        return Truncation.PROMPT
    return Truncation.RESPONSE if found.cut or made.truncate_status == "response_truncated" else Truncation.NONE


def _array(values: Any, kind: Any) -> np.ndarray:
    """Returns the values of a tensor, or of a list that the workflow put in its place."""
    return np.asarray(values.tolist() if hasattr(values, "tolist") else values, kind).reshape(-1)
