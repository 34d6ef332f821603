"""What a scoring function gets and gives. It is a pure function: bounded time on any text, no evaluation of code."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ScoreItem:
    """One finished answer. `task` is the dataset row, `truth` its reference answer, `token_ids` the response's."""

    prompt: str
    response: str
    truth: str
    task: dict[str, Any] = field(default_factory=dict)
    truncated: bool = False
    response_tokens: int = 0
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class ScoreResult:
    """A finite reward, and its parts by name."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)


def as_result(value: Any) -> ScoreResult:
    """What a user's reward function may return: a number, or a mapping of parts whose sum is the reward."""
    if isinstance(value, ScoreResult):
        return value
    if isinstance(value, Mapping):
        parts = {str(name): float(part) for name, part in value.items()}
        return ScoreResult(sum(parts.values()), parts)
    return ScoreResult(float(value))


Scorer = Callable[[ScoreItem, dict[str, Any]], ScoreResult]
