"""The interface of an environment: `reset`, `step`, `close`.

One object plays one episode: made -> reset once -> step until done -> closed. Calls come one at a time. Methods may
block; they run in a worker thread under the description's time limit.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Observation:
    """What the policy sees, and what its last action was worth. `metrics` measure the episode so far."""

    text: str
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Description:
    """What a provider announces. `max_parallel_episodes` 0: no limit."""

    name: str
    summary: str
    max_parallel_episodes: int = 0
    step_timeout_seconds: float = 10.0


class Environment(ABC):
    """One episode."""

    description: Description

    @abstractmethod
    def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        """Begin the episode of a task (a dataset row). Raises InvalidInput naming what the row lacks."""

    @abstractmethod
    def step(self, action: str) -> Observation:
        """Answer the policy's reply."""

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release what the episode holds. Called exactly once, also after an error or when the client went away."""
