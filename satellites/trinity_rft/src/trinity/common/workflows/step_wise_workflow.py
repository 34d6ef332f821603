"""Trinity-RFT's workflows of steps: each step's replies are separate experiences."""

from typing import Any

from trinity.common.experience import Experience
from trinity.common.models.model import ModelWrapper
from trinity.common.workflows.workflow import Task, Workflow


class _Steps(Workflow):
    """`step` plays one step with `self.client`, OpenAI's, or with self.model; it says whether another one follows."""

    def __init__(
        self,
        *,
        task: Task,
        model: ModelWrapper,
        auxiliary_models: list[Any] | None = None,
        use_openai_client: bool = True,
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.client: Any = None
        if use_openai_client:
            self.client = model.get_openai_async_client() if self.is_async else model.get_openai_client()

    @property
    def max_step_num(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} has no max_step_num")

    def step(self, step_num: int) -> bool:
        raise NotImplementedError(f"{type(self).__name__} has no step()")

    async def step_async(self, step_num: int) -> bool:
        raise NotImplementedError(f"{type(self).__name__} has no step_async()")

    def _taken(self, step: int) -> list[Experience]:
        """The replies of a step, with its number."""
        replies = self.model.extract_experience_from_history()
        for reply in replies:
            reply.eid.step = step
        return replies


def _rewarded(replies: list[Experience], reward: float) -> list[Experience]:
    for reply in replies:
        reply.reward = reward
    return replies


class StepWiseRewardWorkflow(_Steps):
    """Gives every step a reward: `reward(exps, step_num)`."""

    def reward(self, exps: list[Experience], step_num: int) -> float:
        raise NotImplementedError(f"{type(self).__name__} has no reward()")

    def run(self) -> list[Experience]:
        made: list[Experience] = []
        for step in range(self.max_step_num):
            another = self.step(step_num=step)
            replies = self._taken(step)
            made += _rewarded(replies, self.reward(replies, step_num=step))
            if not another:
                break
        return made


class AsyncStepWiseRewardWorkflow(StepWiseRewardWorkflow):
    is_async = True

    async def reward_async(self, exps: list[Experience], step_num: int) -> float:
        raise NotImplementedError(f"{type(self).__name__} has no reward_async()")

    async def run_async(self) -> list[Experience]:
        made: list[Experience] = []
        for step in range(self.max_step_num):
            another = await self.step_async(step_num=step)
            replies = self._taken(step)
            made += _rewarded(replies, await self.reward_async(replies, step_num=step))
            if not another:
                break
        return made


class RewardPropagationWorkflow(_Steps):
    """Gives all steps the reward of the whole: `reward(exps)`."""

    def reward(self, exps: list[Experience]) -> float:
        raise NotImplementedError(f"{type(self).__name__} has no reward()")

    def run(self) -> list[Experience]:
        made: list[Experience] = []
        for step in range(self.max_step_num):
            another = self.step(step_num=step)
            made += self._taken(step)
            if not another:
                break
        return _whole(_rewarded(made, self.reward(made)), step + 1)


class AsyncRewardPropagationWorkflow(RewardPropagationWorkflow):
    is_async = True

    async def reward_async(self, exps: list[Experience]) -> float:
        raise NotImplementedError(f"{type(self).__name__} has no reward_async()")

    async def run_async(self) -> list[Experience]:
        made: list[Experience] = []
        for step in range(self.max_step_num):
            another = await self.step_async(step_num=step)
            made += self._taken(step)
            if not another:
                break
        return _whole(_rewarded(made, await self.reward_async(made)), step + 1)


def _whole(made: list[Experience], steps: int) -> list[Experience]:
    for experience in made:
        experience.metrics["actual_env_steps"] = float(steps)
    return made
