"""Reward functions in Trinity-RFT's form."""

from trinity.common.rewards.reward_fn import REWARD_FUNCTIONS, RewardFn

__all__ = ["REWARD_FUNCTIONS", "RewardFn"]
