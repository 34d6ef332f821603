"""Operators that select the experiences of RAFT and OPMD."""

import json
import math

from trinity.buffer.operators.base import Draft, drop_all, rollouts
from trinity.data.experience import Task


class RaftFilter:
    """Keeps the `k` best rollouts of the group whose reward is > threshold; the earlier of equal ones.

    Best-of-K sampling of RAFT (arXiv:2304.06767, section 3.2), which then learns from them by supervised fine-tuning.
    """

    drops = "no reward above the threshold"

    def __init__(self, k: int = 1, threshold: float = 0.0) -> None:
        self._k = k
        self._threshold = threshold

    def __call__(self, drafts: list[Draft], task: Task) -> None:
        ranked = sorted(rollouts(drafts), key=lambda rollout: -rollout.reward)
        for rank, rollout in enumerate(ranked):
            if rank >= self._k or not rollout.reward > self._threshold:
                drop_all(rollout.drafts)


class OpmdFilter:
    """Drops placeholders: prompts shorter than `min_prompt_length` tokens, rewards that are not finite, and experiences
    whose info says `valid: false`. OPMD learns from every other one, also from groups without differences.
    """

    drops = "placeholders"

    def __init__(self, min_prompt_length: int = 3) -> None:
        self._length = min_prompt_length

    def __call__(self, drafts: list[Draft], task: Task) -> None:
        for draft in drafts:
            experience = draft.experience
            short = experience.prompt_length < self._length
            if short or not math.isfinite(draft.reward) or not _is_valid(experience.info_json):
                draft.drop()


def _is_valid(info_json: str) -> bool:
    info = json.loads(info_json or "{}")
    return not isinstance(info, dict) or bool(info.get("valid", True))
