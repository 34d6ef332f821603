"""The module that Trinity-RFT has this in."""

from trinity.common.rewards.built_in import BuiltInReward


class AccuracyReward(BuiltInReward):
    name = "accuracy_reward"
