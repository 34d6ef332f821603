"""The module that Trinity-RFT has this in."""

from trinity.common.rewards.built_in import BuiltInReward


class FormatReward(BuiltInReward):
    name = "format_reward"
