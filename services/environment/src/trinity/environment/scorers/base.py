"""What a scoring function gets and gives. It is a pure function: bounded time on any text, no evaluation of code."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ScoreItem:
    """One finished answer. `task` is the dataset row, `truth` its reference answer."""

    prompt: str
    response: str
    truth: str
    task: dict[str, Any] = field(default_factory=dict)
    truncated: bool = False
    response_tokens: int = 0


@dataclass(frozen=True)
class ScoreResult:
    """A finite reward, and its parts by name."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)


Scorer = Callable[[ScoreItem, dict[str, Any]], ScoreResult]
