"""Reward functions in Trinity-RFT's form."""

from trinity.common.rewards.accuracy_reward import AccuracyReward
from trinity.common.rewards.countdown_reward import CountDownRewardFn
from trinity.common.rewards.dapo_reward import MathDAPORewardFn
from trinity.common.rewards.format_reward import FormatReward
from trinity.common.rewards.math_reward import MathBoxedRewardFn, MathRewardFn
from trinity.common.rewards.reward_fn import REWARD_FUNCTIONS, RewardFn

__all__ = [
    "REWARD_FUNCTIONS",
    "AccuracyReward",
    "CountDownRewardFn",
    "FormatReward",
    "MathBoxedRewardFn",
    "MathDAPORewardFn",
    "MathRewardFn",
    "RewardFn",
]
