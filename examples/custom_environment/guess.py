"""A custom game in Python: guess a number; each answer says higher or lower.

Run it from the project's root: `serve` for a run that reaches it, `attach` to reach a run (token:
TRINITY_ENVIRONMENT_ATTACH_TOKEN).

    .venv/bin/python examples/custom_environment/guess.py serve 0.0.0.0:7010
    .venv/bin/python examples/custom_environment/guess.py attach 10.0.0.5:7002 my-guesses
"""

import os
import re
import sys
from typing import Any

from trinity.sdk import Description, Environment, InvalidInput, Observation, attach, serve


class Guess(Environment):
    """A number between 1 and the task's `highest`."""

    description = Description(
        "guess", "Guess a number; each answer says higher or lower.", max_parallel_episodes=256, deterministic=True
    )
    isolation = "none"  # its methods take microseconds

    def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        highest = task.get("highest", 10)
        if type(highest) is not int or highest < 1:
            raise InvalidInput("task.highest", f"is {highest!r}, must be an integer of at least 1")
        # The same seed must give the same episode, in every language that plays this game.
        self.number = (seed * 7919 + 13) % highest + 1
        self.left = args.get("guesses", 5)
        return Observation(f"I think of a number from 1 to {highest}. Reply with <answer>number</answer>.")

    def step(self, action: str) -> Observation:
        self.left -= 1
        found = re.search(r"<answer>\s*([0-9]{1,9})\s*</answer>", action[:10_000])
        right = found is not None and int(found[1]) == self.number
        if right:
            text = "Right."
        elif found is None:
            text = "There is no <answer>number</answer> in the reply."
        else:
            text = "Higher." if int(found[1]) < self.number else "Lower."
        metrics = {"success": float(right), "guesses_left": float(self.left)}
        return Observation(text, reward=float(right), done=right or self.left <= 0, metrics=metrics)


if __name__ == "__main__":
    mode, address = sys.argv[1:3]
    if mode == "serve":
        serve(Guess, address=address)
    else:
        token = os.environ.get("TRINITY_ENVIRONMENT_ATTACH_TOKEN", "")
        attach(Guess, address=address, token=token, name=sys.argv[3] if len(sys.argv) > 3 else "")
