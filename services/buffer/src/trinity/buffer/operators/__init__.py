"""Experience operators by name: every stored group goes through those of the YAML before it may enter a batch."""

from collections.abc import Callable
from typing import Any

from trinity.buffer.operators.base import Draft, Operator, Rollout, rollouts
from trinity.buffer.operators.built_in import (
    DataJuicer,
    DynamicSamplingFilter,
    InvalidRewardFilter,
    MaskResponseTruncated,
    MultiStepPadding,
    OpmdFilter,
    OverlongRewardShaping,
    PassRateCalculator,
    RaftFilter,
    RewardFilter,
    RewardShapingMapper,
    RewardStdFilter,
)
from trinity.plugins import satellites

# The YAML's args are the keyword arguments. trinity.config.names has them too, for `trinity check`; a test compares.
OPERATORS: dict[str, Callable[..., Operator]] = {
    "reward_filter": RewardFilter,
    "reward_std_filter": RewardStdFilter,
    "invalid_reward_filter": InvalidRewardFilter,
    "pass_rate_calculator": PassRateCalculator,
    "reward_shaping_mapper": RewardShapingMapper,
    "dapo_dynamic_sampling_filter": DynamicSamplingFilter,
    "dapo_dynamic_sampling": DynamicSamplingFilter,
    "DAPODynamicSamplingFilter": DynamicSamplingFilter,
    "mask_response_truncated": MaskResponseTruncated,
    "MaskResponseTruncatedOperator": MaskResponseTruncated,
    "overlong_reward_shaping": OverlongRewardShaping,
    "multi_step_padding": MultiStepPadding,
    "raft_filter": RaftFilter,
    "RAFT_filter": RaftFilter,
    "opmd_filter": OpmdFilter,
    "OPMD_filter": OpmdFilter,
    "data_juicer": DataJuicer,
}


def __getattr__(name: str) -> Any:
    """Operators of Trinity-RFT import their base class and registry from here."""
    found = satellites.find("operators")
    if found is None or name not in found.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(found, name)


__all__ = ["OPERATORS", "Draft", "Operator", "Rollout", "rollouts"]
