"""Plays episodes for the tests: a list of replies, or those of a random policy."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from trinity.sdk.environment import Environment, Observation


@dataclass
class Played:
    """An episode as a client sees it."""

    observations: list[Observation] = field(default_factory=list)

    @property
    def last(self) -> Observation:
        return self.observations[-1]

    @property
    def reward(self) -> float:
        return sum(observation.reward for observation in self.observations)

    @property
    def won(self) -> bool:
        return self.last.done and self.last.info["success"] is True and self.last.metrics["success"] == 1


def play(
    environment: Environment,
    replies: Iterable[str],
    task: dict[str, Any] | None = None,
    args: dict[str, Any] | None = None,
    seed: int = 0,
) -> Played:
    """Until the episode is done or the replies are used up; the environment is closed."""
    played = Played()
    try:
        played.observations.append(environment.reset(task or {}, args or {}, seed))
        for reply in replies:
            if played.last.done:
                break
            played.observations.append(environment.step(reply))
    finally:
        environment.close()
    return played


NONSENSE = (
    "",
    "<action></action>",
    "<think>hm",
    "<action>fly</action>",
    "9**9**9",
    "\x00\u202e",
    "```\n```",
    "٤٢",
    "A" * 300,
)


def random_policy(
    environment: Environment, task: dict[str, Any], args: dict[str, Any], seed: int, steps: int = 200
) -> Played:
    """Mostly one of the available actions, now and then nonsense."""
    random_numbers = random.Random(seed)
    played = Played()
    try:
        played.observations.append(environment.reset(task, args, seed))
        while not played.last.done and len(played.observations) <= steps:
            known = played.last.info.get("available_actions") or ["1 + 1"]
            pick = random_numbers.choice(known if random_numbers.random() < 0.9 else NONSENSE)
            played.observations.append(environment.step(f"<think>?</think><action>{pick}</action>"))
    finally:
        environment.close()
    return played
