"""A walk in gusts of wind, which each episode draws by itself: it can be restored, and no other episode repeats it."""

import json
import os
import random
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trinity.sdk import Description, Environment, Observation

TURNS = 10
_STEPS = {"Left": -1, "Right": 1, "Up": 2, "Down": -2}


def plugin(steps: Path) -> str:
    """The plugin of an environment service. Each step writes its name and turn as a line of the file `steps`."""
    return f"""
import sys

from trinity.plugins import environment

sys.path.append({str(Path(__file__).parents[3])!r})

from support.fakes.environments.gusts import Gusts

Gusts.steps = {str(steps)!r}
environment("gusts")(Gusts)
"""


class Gusts(Environment):
    """Ten steps. The first observation names the episode, and its winds depend only on the name.

    So a test can replay an episode that it read of, and the service cannot.
    """

    description = Description("gusts", "Gusts.", snapshots=True)
    isolation = "none"
    steps = os.devnull

    def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        return self.begin(secrets.token_hex(6))

    def begin(self, name: str) -> Observation:
        self.name, self.turn, self.at, self.winds = name, 0, 0, random.Random(name)
        return Observation(f"Episode {name}.")

    def step(self, action: str) -> Observation:
        self.turn += 1
        self.at += _STEPS[action] + self.winds.randint(-1000, 1000)
        done = self.turn == TURNS
        with open(self.steps, "a") as file:
            file.write(f"{self.name} {self.turn}\n")
        return Observation(f"Step {self.turn}: at {self.at}.", self.at / 4, done, {}, {"at": float(self.at)})

    def snapshot(self) -> bytes:
        return json.dumps([self.name, self.turn, self.at, self.winds.getstate()]).encode()

    def restore(self, state: bytes) -> None:
        self.name, self.turn, self.at, (version, drawn, rest) = json.loads(state)
        self.winds = random.Random()
        self.winds.setstate((version, tuple(drawn), rest))


def uninterrupted(name: str, actions: Sequence[str]) -> list[Observation]:
    """Answers of the episode of this name to these actions, in order."""
    gusts = Gusts()
    return [gusts.begin(name), *map(gusts.step, actions)]
