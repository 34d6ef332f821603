"""Advantage functions in Trinity-RFT's form."""

from trinity.algorithm.advantage_fn.advantage_fn import ADVANTAGE_FN, AdvantageFn, GroupAdvantage

__all__ = ["ADVANTAGE_FN", "AdvantageFn", "GroupAdvantage"]
