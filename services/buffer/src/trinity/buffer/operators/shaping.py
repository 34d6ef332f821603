"""Rewards changed by metrics."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trinity.buffer.operators.base import Draft
from trinity.data.experience import Task
from trinity.runtime.errors import InvalidInput

OPERATIONS: dict[str, Callable[[float, float], float]] = {
    "ADD": lambda reward, value: reward + value,
    "SUB": lambda reward, value: reward - value,
    "MUL": lambda reward, value: reward * value,
    "DIV": lambda reward, value: reward / value,
}


class RewardShapingMapper:
    """reward = reward <op_type> weight * metric, for each config in turn: {stats_key, op_type: ADD, weight: 1.0}.

    `stats_key` names a metric of the experience, which an earlier operator may have added. Raises InvalidInput for
    a metric that is missing and for a division by 0.
    """

    def __init__(self, reward_shaping_configs: Sequence[Mapping[str, Any]] = ()) -> None:
        self._configs = reward_shaping_configs

    def __call__(self, drafts: list[Draft], task: Task) -> None:
        for draft in drafts:
            for config in self._configs:
                key, operation = config["stats_key"], config.get("op_type", "ADD")
                value = config.get("weight", 1.0) * draft.metric(key)
                if operation == "DIV" and value == 0:
                    raise InvalidInput(
                        f"metrics.{key}", f"is 0 in experience {draft.index}; the reward cannot be divided"
                    )
                draft.reward = OPERATIONS[operation](draft.reward, value)
