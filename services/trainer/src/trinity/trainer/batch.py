"""A step's batch as the trainer sees it: sequences, from the log's groups or from a dataset's rows."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.config.algorithms import AlgorithmPlan
from trinity.runtime.errors import InvalidInput
from trinity.runtime.experience import Experience, Group
from trinity.runtime.wire import decode_outcome
from trinity.trainer.algorithms import advantages
from trinity.trainer.algorithms.aggregation import Totals


@dataclass(frozen=True)
class TrainSequence:
    """One sequence. T tokens, of which the last R are the response.

    token_ids int32 [T]; old_logprobs float32 [R], under the weights that sampled them; mask bool [R], tokens to train.
    """

    token_ids: np.ndarray
    prompt_length: int
    old_logprobs: np.ndarray
    mask: np.ndarray
    group: int
    reward: float = 0.0
    advantage: float = 0.0
    temperature: float = 1.0
    expert: bool = False
    experience: Experience | None = None  # as the log has it

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def response_length(self) -> int:
        return len(self.token_ids) - self.prompt_length


@dataclass(frozen=True)
class TrainBatch:
    """All sequences of a step, the same on every rank."""

    step: int
    sequences: tuple[TrainSequence, ...]
    staleness_mean: float = 0.0
    staleness_max: float = 0.0

    @property
    def totals(self) -> Totals:
        trained = [int(s.mask.sum()) for s in self.sequences]
        return Totals(
            tokens=sum(trained),
            sequences=sum(count > 0 for count in trained),
            longest=max((s.response_length for s in self.sequences), default=0),
        )

    @property
    def response_tokens(self) -> int:
        return sum(s.response_length for s in self.sequences)


def from_groups(
    entry: pb.LedgerEntry, groups: Iterable[bytes], plan: AlgorithmPlan, experts: Sequence[TrainSequence] = ()
) -> TrainBatch:
    """An online batch.

    `groups` are log entries as they were stored, in the ledger entry's order; the entry says what operators left of
    them. `experts` are the rows of auxiliary buffers: no reward, no advantage.
    """
    sequences: list[TrainSequence] = []
    for index, (member, data) in enumerate(zip(entry.groups, groups, strict=True)):
        group = decode_outcome(data)
        if not isinstance(group, Group):
            raise InvalidInput("batch.group", f"{index} of step {entry.step} holds no group")
        sequences.extend(_sequences_of(group.as_kept(member.experiences), index))
    staleness = [member.staleness_steps for member in entry.groups] or [0]
    return TrainBatch(
        step=entry.step,
        sequences=(*_with_advantages(sequences, plan), *experts),
        staleness_mean=float(np.mean(staleness)),
        staleness_max=float(max(staleness)),
    )


def _sequences_of(group: Group, index: int) -> list[TrainSequence]:
    temperature = group.task.sampling.temperature or 1.0
    return [
        TrainSequence(
            token_ids=experience.token_ids,
            prompt_length=experience.prompt_length,
            old_logprobs=experience.logprobs,
            mask=experience.action_mask,
            group=index,
            reward=experience.reward,
            temperature=temperature,
            experience=experience,
        )
        for experience in group.experiences
    ]


def _with_advantages(sequences: list[TrainSequence], plan: AlgorithmPlan) -> list[TrainSequence]:
    if plan.advantage is None:
        return sequences
    rewards = torch.tensor([s.reward for s in sequences], dtype=torch.float64)
    groups = torch.tensor([s.group for s in sequences])
    values = advantages.compute(plan.advantage.name, plan.advantage.args, rewards, groups)
    return [replace(s, advantage=float(value)) for s, value in zip(sequences, values, strict=True)]


def experts_of(
    entry: pb.LedgerEntry, examples: Sequence[pb.Example], tokenizer: Any, limit: int
) -> list[TrainSequence]:
    """The expert rows of an online batch, each a group of its own after the rolled-out ones."""
    first = len(entry.groups)
    return [replace(_tokenise(e, first + i, tokenizer, limit), expert=True) for i, e in enumerate(examples)]


def from_examples(entry: pb.LedgerEntry, examples: Iterable[pb.Example], tokenizer: Any, limit: int) -> TrainBatch:
    """An offline batch: rows as chat messages, tokenised with the model's own template, cut at `limit` tokens."""
    sequences = [_tokenise(example, index, tokenizer, limit) for index, example in enumerate(examples)]
    return TrainBatch(step=entry.step, sequences=tuple(sequences))


def _tokenise(example: pb.Example, index: int, tokenizer: Any, limit: int) -> TrainSequence:
    messages = json.loads(example.messages_json)
    prompt = _template(tokenizer, messages[:-1], True, example.row)
    whole = _template(tokenizer, messages, False, example.row)
    if whole[: len(prompt)] == prompt:
        response = _up_to_end(whole[len(prompt) :], tokenizer.eos_token_id)
    else:  # templates that write an assistant message otherwise than they ask for one
        response = [*tokenizer.encode(messages[-1]["content"], add_special_tokens=False), tokenizer.eos_token_id]
    tokens = np.asarray((prompt + response)[:limit], dtype=np.int32)
    length = max(0, len(tokens) - len(prompt))
    if not length:
        raise InvalidInput(f"row {example.row}", f"its prompt of {len(prompt)} tokens fills the model's {limit}")
    return TrainSequence(tokens, len(prompt), np.zeros(length, np.float32), np.ones(length, bool), group=index)


def _template(tokenizer: Any, messages: Sequence[dict[str, Any]], ask: bool, row: int) -> list[int]:
    try:
        ids = tokenizer.apply_chat_template(list(messages), tokenize=True, add_generation_prompt=ask, return_dict=False)
    except Exception as error:  # Jinja templates raise what they like
        raise InvalidInput(f"row {row}", f"the chat template refuses it: {error}") from None
    return [int(token) for token in ids]


def _up_to_end(response: list[int], end: int | None) -> list[int]:
    """Without what a template writes after the last end token (Qwen's newline)."""
    if end in response:
        return response[: len(response) - response[::-1].index(end)]
    return response
