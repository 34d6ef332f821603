"""Workflows that play environments, by the names of Trinity-RFT's YAMLs and R3L's baselines."""

from typing import ClassVar

from trinity.config.workflows import EPISODE_WORKFLOWS, EpisodeRules, GameRules
from trinity.data.experience import Experience, Task, TaskKind
from trinity.explorer.workflows.base import Toolbox, Workflow, gather_rollouts
from trinity.explorer.workflows.episode import Episode, by_step, whole
from trinity.explorer.workflows.player import Player
from trinity.explorer.workflows.tree import Tree
from trinity.runtime.errors import InvalidInput


class EnvironmentWorkflow(Workflow):
    """Plays `repeat_times` episodes, which may branch (Tree).

    Each gives one experience, or one for every turn with step_wise.
    """

    rules: ClassVar[EpisodeRules] = EpisodeRules()

    def __init__(self, task: Task, tools: Toolbox) -> None:
        super().__init__(task, tools)
        for name, problem in self.rules.problems(task.workflow_args):
            raise InvalidInput(f"workflow_args.{name}", problem)
        self.player = Player(task, tools, self.rules.with_args(task.workflow_args))

    async def run(self) -> list[Experience]:
        if self.player.rules.branching and self.task.kind is TaskKind.TRAIN:
            episodes = await Tree(self.player, self.task.repeat_times).play()
        else:
            episodes = await gather_rollouts(self.player.play() for _ in range(self.task.repeat_times))
        return [made for rollout, episode in enumerate(episodes) for made in self.experiences(episode, rollout)]

    def experiences(self, episode: Episode, rollout: int) -> list[Experience]:
        if not self.player.rules.step_wise:
            return [whole(episode, rollout)]
        steps = by_step(episode, rollout)
        # An evaluation counts rollouts, not turns.
        return steps[-1:] if self.task.kind is TaskKind.EVALUATION else steps


def environment_workflow(rules: EpisodeRules) -> type[Workflow]:
    """A workflow with these rules as defaults of the YAML's."""
    return type("EnvironmentWorkflow", (EnvironmentWorkflow,), {"rules": rules, "__doc__": EnvironmentWorkflow.__doc__})


ENVIRONMENT_WORKFLOWS = {
    name: environment_workflow(rules) for name, rules in EPISODE_WORKFLOWS.items() if not isinstance(rules, GameRules)
}
