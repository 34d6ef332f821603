"""The parts of DAPO (arXiv:2503.14476) that choose and shape experience."""

import statistics

from trinity.buffer.operators.base import Draft, drop_all, rollouts
from trinity.data.experience import Task, Truncation
from trinity.runtime.errors import InvalidInput


class DynamicSamplingFilter:
    """Keeps a group only if some of its rollouts are right and some are not (section 3.2, equation 11).

    0 < #(metric > correct_threshold) < G, of each rollout's last step. A group of one is dropped. The metric is looked
    at and not the reward, which may be shaped by length; in a group where no rollout has the metric, the reward as it
    was stored takes its place. Raises InvalidInput if only some of them have it.
    """

    drops = "no reward variance: all rollouts of a group are right, or all wrong"

    def __init__(self, metric_key: str = "accuracy", correct_threshold: float = 0.0) -> None:
        self._metric = metric_key
        self._threshold = correct_threshold

    def __call__(self, drafts: list[Draft], task: Task) -> dict[str, float]:
        last = [rollout.last for rollout in rollouts(drafts)]
        known = [draft for draft in last if self._metric in draft.metrics]
        if known and len(known) < len(last):
            raise InvalidInput(
                f"metrics.{self._metric}", f"is in {len(known)} of the group's {len(last)} rollouts only"
            )
        scores = [draft.metrics[self._metric] if known else draft.experience.reward for draft in last]
        right = sum(score > self._threshold for score in scores)
        if not 0 < right < len(last):
            drop_all(drafts)
        return {"all_right": float(right == len(last)), "all_wrong": float(right == 0)}


class MaskResponseTruncated:
    """No token of a response that ended at its limit enters the loss: overlong filtering, section 3.4."""

    def __call__(self, drafts: list[Draft], task: Task) -> None:
        for draft in drafts:
            if draft.experience.truncation is Truncation.RESPONSE:
                draft.masked = True


class OverlongRewardShaping:
    """Soft overlong punishment: reward += penalty_factor * R_length (section 3.4, equation 13).

    R_length = 0 for |y| <= L - c, ((L - c) - |y|) / c for L - c < |y| <= L, -1 beyond, where |y| is the experience's
    response in tokens, L max_response_length (the task's limit, unless given) and c cache_length (a fifth of L, as in
    the paper, unless given).
    """

    def __init__(
        self, max_response_length: int | None = None, cache_length: int | None = None, penalty_factor: float = 1.0
    ) -> None:
        self._limit = max_response_length
        self._cache = cache_length
        self._factor = penalty_factor

    def __call__(self, drafts: list[Draft], task: Task) -> dict[str, float]:
        limit = self._limit or task.sampling.max_tokens
        cache = self._cache or max(1, limit // 5)
        penalties = []
        for draft in drafts:
            over = (draft.experience.response_length - (limit - cache)) / cache
            penalties.append(self._factor * min(1.0, max(0.0, over)))
            draft.reward -= penalties[-1]
        return {"penalty": statistics.fmean(penalties)}
