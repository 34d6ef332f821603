"""The module that Trinity-RFT has this in."""

from trinity.common.rewards.built_in import BuiltInReward


class MathDAPORewardFn(BuiltInReward):
    name = "math_dapo_reward"
