"""The module that Trinity-RFT's operators are imported from: see trinity.common.operators."""

from trinity.common.operators import EXPERIENCE_OPERATORS, ExperienceOperator

__all__ = ["EXPERIENCE_OPERATORS", "ExperienceOperator"]
