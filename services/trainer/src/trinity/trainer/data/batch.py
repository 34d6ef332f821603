"""A step's batch in the trainer: sequences with their advantages, made from the log's groups."""

import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from trinity.config.algorithms import AlgorithmPlan
from trinity.data.experience import LONGEST_NAME, Experience, Group
from trinity.data.images import PlacedImage
from trinity.data.routes import Routes
from trinity.data.top_tokens import TopTokens
from trinity.data.wire import decode_outcome, parse_outcome
from trinity.runtime.errors import InvalidInput
from trinity.trainer.algorithms import advantages
from trinity.trainer.algorithms.aggregation import Totals
from trinity.trainer.data.bad_steps import NotFinite, Undecodable
from trinity.trainer.data.client import LedgerEntry, LedgerGroup


@dataclass(frozen=True)
class TrainSequence:
    """A sequence of T tokens, of which the last R are the response.

    token_ids int32 [T]; old_logprobs float32 [R], under the weights that sampled them; mask bool [R], tokens to train.
    token_advantages float32 [R]; if None, each token's advantage is `advantage`, which otherwise is only reported.
    on_policy_mask bool [R]: tokens that were sampled, as all earlier tokens of the response, by the weights before this
    step (the engine reuses their keys and values); None: no token. proximal_logprobs float32 [R]: under the trainer's
    weights before the first mini-batch of the step; None: the loss uses those of its forward pass. reference_logprobs
    float32 [R]: the frozen base model's; None: it is not needed, or computes each micro-batch.
    pair: k > 0 for the chosen sequence of preference pair k, -k for the rejected. keep_mask bool [R] and peers:
    statistics of the whole batch for the loss (engine.whole_batch). values and returns float32 [R]: the critic's values
    before the step, and its targets; None without a critic. images: images among the tokens, in order. routes: experts
    to which the engine sent the tokens; None: the gates choose. teacher_top: a teacher's likeliest tokens in the place
    of each response token, as many as the loss reads; None: the loss reads none, or no token is trained.
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
    experience: Experience | None = None  # as in the log
    token_advantages: np.ndarray | None = None
    on_policy_mask: np.ndarray | None = None
    proximal_logprobs: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None
    pair: int = 0
    keep_mask: np.ndarray | None = None
    peers: float = 0.0
    values: np.ndarray | None = None
    returns: np.ndarray | None = None
    images: tuple[PlacedImage, ...] = ()
    routes: Routes | None = None
    teacher_top: TopTokens | None = None

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def response_length(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def advantages(self) -> np.ndarray:
        """Advantages of the response tokens, float32 [R]."""
        if self.token_advantages is not None:
            return self.token_advantages
        return np.full(self.response_length, self.advantage, np.float32)


@dataclass(frozen=True)
class TrainBatch:
    """All sequences of a step, equal on every rank. made_at_seconds: Unix time when the last group was complete."""

    step: int
    sequences: tuple[TrainSequence, ...]
    staleness_mean: float = 0.0
    staleness_max: float = 0.0
    regraded_groups: int = 0
    made_at_seconds: float = 0.0

    @property
    def totals(self) -> Totals:
        return replace(
            _totals(self.sequences),
            rolled_out=_totals([s for s in self.sequences if not s.expert]),
            expert=_totals([s for s in self.sequences if s.expert]),
        )

    @property
    def response_tokens(self) -> int:
        return sum(s.response_length for s in self.sequences)


def _totals(sequences: Sequence[TrainSequence]) -> Totals:
    trained = [int(s.mask.sum()) for s in sequences]
    return Totals(
        tokens=sum(trained),
        sequences=sum(count > 0 for count in trained),
        pairs=sum(s.pair > 0 for s in sequences),
    )


def from_groups(
    entry: LedgerEntry, groups: Iterable[bytes], plan: AlgorithmPlan, experts: Sequence[TrainSequence] = ()
) -> TrainBatch:
    """Makes an online batch.

    groups: stored log entries, in the ledger entry's order; the entry lists the experiences that operators keep.
    experts: rows of auxiliary buffers, without reward and advantage; losses without an expert term drop them. With a KL
    penalty in the reward, or a critic, advantages follow after the models' forward passes (engine.whole_batch).
    Raises Undecodable for a group that cannot be decoded, NotFinite for a reward or advantage.
    """
    sequences: list[TrainSequence] = []
    made_at = 0.0
    for index, (member, data) in enumerate(zip(entry.groups, groups, strict=True)):
        try:
            group = decode_outcome(data)
            if not isinstance(group, Group):
                raise InvalidInput("batch.group", "is a failure")
            made_at = max(made_at, group.finished_at_seconds)
            version = -1 if member.parent_steps else entry.step - 1  # the parent's versions have other weights
            found = _sequences_of(group.as_kept(member.experiences), index, version, plan.teacher_top)
            _baseline_groups(found)
        except (InvalidInput, LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise _undecodable(entry.step, index, member, data, error) from error
        sequences.extend(found)
    sequences = _paired(sequences, plan)
    experts = experts if plan.trains_experts else ()
    staleness = [member.staleness_steps for member in entry.groups] or [0]
    return TrainBatch(
        step=entry.step,
        sequences=(*(sequences if plan.needs_models else with_advantages(sequences, plan, entry.step)), *experts),
        staleness_mean=float(np.mean(staleness)),
        staleness_max=float(max(staleness)),
        regraded_groups=sum(bool(member.parent_sha256) for member in entry.groups),
        made_at_seconds=made_at,
    )


def _undecodable(step: int, index: int, member: LedgerGroup, data: bytes, error: Exception) -> Undecodable:
    """Returns the error of a group; it names the task, and the explorer if that part of the group can be decoded."""
    with contextlib.suppress(InvalidInput):
        made = parse_outcome(data).group
        if made.explorer_id:
            by = f" of explorer {made.explorer_id[:LONGEST_NAME]!r}, attempt {made.attempt},"
            return Undecodable(f"the group of task {member.task_id!r}{by} cannot be decoded: {error}", step, [index])
    return Undecodable(f"the group of task {member.task_id!r} cannot be decoded: {error}", step, [index])


def _sequences_of(group: Group, index: int, version: int, top: int) -> list[TrainSequence]:
    """version: the trainer's version before the step; -1: it sampled no token. top: of a teacher's tokens."""
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
            on_policy_mask=_wholly_by(experience, version),
            images=experience.images,
            routes=experience.routes,
            teacher_top=_top_of(experience, top),
        )
        for experience in group.experiences
    ]


def _top_of(experience: Experience, top: int) -> TopTokens | None:
    """Returns the first `top` of each place. Raises InvalidInput if there are fewer and tokens are trained."""
    if not top or not experience.action_mask.any():
        return None
    found = experience.teacher_top
    if found is None or found.ids.shape[1] < top:
        count = 0 if found is None else found.ids.shape[1]
        raise InvalidInput("experience.teacher_top", f"has {count} tokens for each place, the loss reads {top}")
    return TopTokens(found.ids[:, :top], found.logprobs[:, :top])


def _wholly_by(experience: Experience, version: int) -> np.ndarray:
    on_policy_mask = np.zeros(experience.response_length, bool)
    for span in experience.version_spans:
        if span.version != version:
            break
        on_policy_mask[span.start : span.end] = True
    return on_policy_mask


def _paired(sequences: list[TrainSequence], plan: AlgorithmPlan) -> list[TrainSequence]:
    """Pairs each group's best sequence with its worst, the next with the next, if the loss is of pairs.

    The two rewards of a pair differ, and both sequences have tokens to train. Sequences without a pair are not trained.
    """
    if not plan.of_pairs:
        return sequences
    groups: dict[int, list[int]] = {}
    for index, sequence in enumerate(sequences):
        if sequence.mask.any():
            groups.setdefault(sequence.group, []).append(index)
    pairs: dict[int, int] = {}
    for members in groups.values():
        ordered = sorted(members, key=lambda index: -sequences[index].reward)
        for chosen, rejected in zip(ordered[: len(ordered) // 2], reversed(ordered), strict=False):
            if sequences[chosen].reward > sequences[rejected].reward:
                number = len(pairs) // 2 + 1
                pairs |= {chosen: number, rejected: -number}
    return [
        replace(s, pair=pairs[index]) if index in pairs else replace(s, mask=np.zeros_like(s.mask))
        for index, s in enumerate(sequences)
    ]


def with_advantages(
    sequences: Sequence[TrainSequence],
    plan: AlgorithmPlan,
    step: int,
    penalties: Sequence[np.ndarray] | None = None,
    values: Sequence[np.ndarray] | None = None,
) -> list[TrainSequence]:
    """Computes the advantages of rolled-out sequences; those of expert rows stay 0.

    penalties and values float [R] each, for rolled-out sequences: the KL penalty of each token, and a critic's values.
    A sequence that the advantage function drops gets an empty mask; a duplicated sequence is repeated. Raises NotFinite
    naming the groups whose reward or advantage is not finite.
    """
    rolled_out, experts = ([s for s in sequences if s.expert is kind] for kind in (False, True))
    if plan.advantage is None or not rolled_out:
        return list(sequences)
    _refuse("reward", [s.group for s in rolled_out if not np.isfinite(s.reward)], step)
    rollouts = _rollouts(rolled_out, step, penalties, values)
    try:
        found = advantages.compute(plan.advantage.name, plan.advantage.args, rollouts)
    except InvalidInput as error:  # an experience lacks a field
        raise Undecodable(f"{plan.advantage.name} cannot use an experience: {error}", step) from error
    bad = [s.group for s, tokens in zip(rolled_out, found.tokens, strict=True) if not torch.isfinite(tokens).all()]
    _refuse("advantage", bad, step)
    result, copies = [], []
    parts = zip(rolled_out, found.scores_N, found.tokens, found.copies_N, strict=True)
    for index, (s, score, tokens, count) in enumerate(parts):
        trained = replace(s, advantage=float(score), token_advantages=_float32(tokens))
        if values is not None and found.returns is not None:
            trained = replace(trained, values=_float32(values[index]), returns=_float32(found.returns[index]))
        result.append(trained if count else replace(trained, mask=np.zeros_like(s.mask)))
        copies += [replace(trained, experience=None)] * (int(count) - 1)
    return [*result, *copies, *experts]


def _refuse(what: str, groups: Sequence[int], step: int) -> None:
    if groups:
        raise NotFinite(what, step, groups)


def _rollouts(
    sequences: Sequence[TrainSequence],
    step: int,
    penalties: Sequence[np.ndarray] | None,
    values: Sequence[np.ndarray] | None,
) -> advantages.Rollouts:
    experiences = [s.experience for s in sequences]
    return advantages.Rollouts(
        rewards_N=torch.tensor([s.reward for s in sequences], dtype=torch.float64),
        groups_N=_baseline_groups(sequences),
        masks=[torch.from_numpy(s.mask.astype(bool)) for s in sequences],
        logprobs=[_float64(s.old_logprobs) for s in sequences],
        trajectories_N=torch.tensor([e.rollout if e else -1 - i for i, e in enumerate(experiences)]),
        steps_N=torch.tensor([e.step if e else 0 for e in experiences]),
        facts=[{**e.metrics, **json.loads(e.info_json or "{}")} if e else {} for e in experiences],
        penalties=None if penalties is None else [_float64(p) for p in penalties],
        values=None if values is None else [_float64(v) for v in values],
        teachers=[
            None if e is None or e.teacher_logprobs is None else _float64(e.teacher_logprobs) for e in experiences
        ],
        seed=step,
    )


def _float32(values: Any) -> np.ndarray:
    return np.asarray(values, np.float32)


def _baseline_groups(sequences: Sequence[TrainSequence]) -> torch.Tensor:
    """Returns int [N], equal for sequences that are compared with each other.

    These are the rollouts of a task. Experiences that name a group within the task (info.group) are compared within
    that: a step that led to a rollout, such as a reflection, is not compared with rollouts.
    """
    infos = [json.loads(s.experience.info_json or "{}") if s.experience else {} for s in sequences]
    names = [(s.group, str(info.get("group", ""))) for s, info in zip(sequences, infos, strict=True)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([numbers[name] for name in names])


def _float64(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, np.float64))
