"""The module that Trinity-RFT has this in."""

from trinity.common.rewards.built_in import BuiltInReward


class CountDownRewardFn(BuiltInReward):
    name = "countdown_reward"
