"""The module that Trinity-RFT has this in."""

from trinity.common.rewards.built_in import BuiltInReward


class MathRewardFn(BuiltInReward):
    name = "math_reward"


class MathBoxedRewardFn(BuiltInReward):
    name = "math_boxed_reward"
