"""`trinity.buffer.operators` for plugins where the buffer is not installed: see trinity.compat_rft.names."""

from trinity.common.operators import EXPERIENCE_OPERATORS, ExperienceOperator

__all__ = ["EXPERIENCE_OPERATORS", "ExperienceOperator"]
