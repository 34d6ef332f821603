"""A taskset of verifiers' v1 interface whose environment plays the user."""

import itertools
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["GuessEnv", "Guesses"]


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData]):
    pass


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        guesses = 0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                guesses += 1
                if (guess := segment.last_reply.strip()) == str(task.data.number):
                    break
                hint = "higher" if guess.isdigit() and int(guess) < task.data.number else "lower"
                segment = await interaction.turn(f"It is {hint}.")
        won = not segment.terminated
        interaction.trace.record_reward("found", won / guesses if guesses else 0.0)


class Guesses(vf.Taskset[GuessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[GuessTask]:
        for n in itertools.count():
            yield GuessTask(GuessData(prompt="Guess a number.", system_prompt="Reply with a digit.", number=n % 10))
