"""What `trinity.buffer.operators` gives a plugin where the buffer is not installed: see trinity.plugins.foreign."""

from trinity.common.operators import EXPERIENCE_OPERATORS, ExperienceOperator

__all__ = ["EXPERIENCE_OPERATORS", "ExperienceOperator"]
