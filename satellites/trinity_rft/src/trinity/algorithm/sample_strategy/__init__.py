"""Sample strategies in Trinity-RFT's form."""

from trinity.algorithm.sample_strategy.sample_strategy import SAMPLE_STRATEGY, SampleStrategy

__all__ = ["SAMPLE_STRATEGY", "SampleStrategy"]
