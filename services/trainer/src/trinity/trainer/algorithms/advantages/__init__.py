"""Advantage functions by the names of the YAML: from a batch's rollouts to an advantage for every token.

A function is `name(rollouts, **args) -> Advantages`. Importing this package registers them.
"""

from typing import Any

from trinity.plugins.declarations import ADVANTAGES, import_modules
from trinity.trainer.algorithms.advantages.group_relative import grpo
from trinity.trainer.algorithms.advantages.rollouts import Advantages, Rollouts, of_sequences

__all__ = ["ADVANTAGES", "Advantages", "Rollouts", "compute", "grpo"]

import_modules(__name__)


def compute(name: str, args: dict[str, Any], rollouts: Rollouts) -> Advantages:
    """Calls an advantage function; one in Trinity-RFT's form returns (index, advantages [R]) of sequences."""
    found: Any = ADVANTAGES[name](rollouts, **args)
    return found if isinstance(found, Advantages) else of_sequences(rollouts, found)
