"""A taskset of verifiers' v1 interface whose environment has two agents: the bridge refuses it."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["PairEnv", "Pairs"]


class PairConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class PairEnv(vf.Env[PairConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        await agents.solver.run(task)


class Pairs(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self) -> Iterator[vf.Task]:
        yield vf.Task(vf.TaskData(prompt="Say something."))
