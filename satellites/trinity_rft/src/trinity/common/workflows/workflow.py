"""Trinity-RFT's tasks and workflows. The explorer runs them (trinity.explorer.workflows.rft)."""

from dataclasses import asdict, dataclass, field
from typing import Any

from trinity import plugins
from trinity.api.numbers import real_number
from trinity.common.config import FormatConfig, GenerationConfig
from trinity.common.experience import Experience
from trinity.common.models.model import ModelWrapper
from trinity.common.refusals import NotMapped
from trinity.common.registry import Registry
from trinity.common.rewards.reward_fn import RewardFn
from trinity.config.workflows import WORKFLOWS as BUILT_IN
from trinity.utils.log import get_logger

_THINK_AND_ANSWER = (
    "You solve mathematical problems. First reason inside <think> and </think>, then give only the final answer inside "
    "<answer> and </answer>."
)


@dataclass
class Task:
    """One row of a taskset. `raw_task` is the row; `reward_fn` the class of the taskset's reward function, or None."""

    workflow: Any = None
    repeat_times: int = 1
    format_args: FormatConfig = field(default_factory=FormatConfig)
    rollout_args: GenerationConfig = field(default_factory=GenerationConfig)
    workflow_args: dict[str, Any] = field(default_factory=dict)
    reward_fn_args: dict[str, Any] = field(default_factory=dict)
    is_eval: bool = False
    reward_fn: type[RewardFn] | None = None
    raw_task: dict[str, Any] = field(default_factory=dict)
    batch_id: int | str = ""
    task_id: int | str = ""
    index: dict[str, Any] = field(default_factory=dict)

    @property
    def task_desc(self) -> str | None:
        """The row's prompt column."""
        return self.raw_task.get(getattr(self.format_args, "prompt_key", ""))

    @property
    def truth(self) -> str | None:
        """The row's column with the reference answer."""
        return self.raw_task.get(getattr(self.format_args, "response_key", ""))

    def to_dict(self) -> dict[str, Any]:
        return self.raw_task


class Workflow:
    """`run`, or `run_async` with `is_async`, returns experiences with rewards, made of replies of `self.model`.

    can_repeat: one run makes all rollouts of the group, as set_repeat_times says. Else one run is one rollout, and all
    run at the same time, each with its instance; can_reset has no effect.
    """

    can_reset: bool = False
    can_repeat: bool = False
    is_async: bool = False

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[Any] | None = None) -> None:
        self.task = task
        self.model = model
        self.auxiliary_models = auxiliary_models
        self.auxiliary_model_wrappers = auxiliary_models
        self.repeat_times = 1
        self.run_id_base = 0
        self.logger = get_logger(type(self).__module__)

    @property
    def repeatable(self) -> bool:
        return type(self).can_repeat

    @property
    def resettable(self) -> bool:
        return type(self).can_reset

    @property
    def asynchronous(self) -> bool:
        return type(self).is_async

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        self.repeat_times, self.run_id_base = repeat_times, run_id_base

    def reset(self, task: Task) -> None:
        """Is not called: every run has a new instance."""
        self.task = task

    def run(self) -> list[Experience]:
        raise NotImplementedError(f"{type(self).__name__} has no run()")

    async def run_async(self) -> list[Experience]:
        raise NotImplementedError(f"{type(self).__name__} has no run_async()")


class WorkflowWithRecording(Workflow):
    """An agent that is given base_url and api_key: what it is sent is recorded, and trained as conversations.

    `run_async` says the reward with update_reward, and returns metrics.
    """

    is_async = True
    recorded_reward: float | None = None
    recorded_info: dict[str, Any] | None = None

    @property
    def base_url(self) -> str:
        return self.model.base_url

    @property
    def api_key(self) -> str:
        return self.model.api_key

    @property
    def model_name(self) -> str:
        return self.model.model_name

    async def update_reward(
        self, reward: float, info: dict[str, Any] | None = None, sample_ids: list[str] | None = None
    ) -> None:
        """Sets the reward of all recorded samples; the last call counts. Raises NotMapped for a part of the samples."""
        if sample_ids is not None:
            raise NotMapped("update_reward takes no sample_ids: a session has one reward", "recording")
        self.recorded_reward, self.recorded_info = real_number(reward, "reward"), info


class MultiTurnWorkflow(Workflow):
    """A conversation of several turns as one experience."""

    def process_messages_to_experience(
        self,
        messages: list[dict[str, Any]],
        reward: float,
        info: dict[str, Any] | None = None,
        truncate_status: str | None = None,
    ) -> Experience:
        """The conversation, whose replies came from self.model.chat, as they were sampled; numbers of info are metrics.

        Raises NotMapped for a reply that is no text of chat's.
        """
        return self._rewarded(self.model.convert_messages_to_experience(messages), reward, info, truncate_status)

    async def process_messages_to_experience_async(
        self,
        messages: list[dict[str, Any]],
        reward: float,
        info: dict[str, Any] | None = None,
        truncate_status: str | None = None,
    ) -> Experience:
        made = await self.model.convert_messages_to_experience_async(messages)
        return self._rewarded(made, reward, info, truncate_status)

    def _rewarded(
        self, made: Experience, reward: float, info: dict[str, Any] | None, truncate_status: str | None
    ) -> Experience:
        made.reward = 0.0 if made.truncate_status == "prompt_truncated" else real_number(reward, "reward")
        made.truncate_status = made.truncate_status or truncate_status
        made.info = dict(info or {})
        made.metrics = {name: float(value) for name, value in made.info.items() if isinstance(value, int | float)}
        return made


class BaseSimpleWorkflow(Workflow):
    """Has the row's prompt, the reference answer and the reward function at hand."""

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[Any] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.reset(task)

    def reset(self, task: Task) -> None:
        self.task = task
        self.format_args = task.format_args
        self.system_prompt = getattr(task.format_args, "system_prompt", None)
        self.reply_prefix = getattr(task.format_args, "reply_prefix", None)
        self.reward_fn_args = task.reward_fn_args
        self.raw_task, self.task_desc, self.truth = task.raw_task, task.task_desc, task.truth
        if task.reward_fn is None:
            raise ValueError("the taskset has no reward function; set default_reward_fn_type")
        self.reward_fn: Any = task.reward_fn(**self.reward_fn_args)

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        super().set_repeat_times(repeat_times, run_id_base)
        self.task.rollout_args.n = repeat_times

    @property
    def rollout_args(self) -> dict[str, Any]:
        return asdict(self.task.rollout_args)

    def format_messages(self) -> list[dict[str, Any]]:
        """The conversation to answer; a last message of the assistant is the beginning of its reply."""
        head = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        tail = [{"role": "assistant", "content": self.reply_prefix}] if self.reply_prefix else []
        return [*head, {"role": "user", "content": self.task_desc}, *tail]

    def scored(self, replies: list[Experience]) -> list[Experience]:
        """The replies with their rewards, each a rollout."""
        for index, reply in enumerate(replies):
            parts = self.reward_fn(response=reply.response_text, truth=self.truth)
            reply.metrics.update(parts)
            reply.reward = sum(real_number(part, name) for name, part in parts.items())
            reply.eid.run = index + self.run_id_base
        return replies


class SimpleWorkflow(BaseSimpleWorkflow):
    """One prompt, one reply, one score."""

    can_reset = True
    can_repeat = True

    def run(self) -> list[Experience]:
        return self.scored(self.model.chat(self.format_messages(), **self.rollout_args))


class AsyncSimpleWorkflow(SimpleWorkflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        return self.scored(await self.model.chat_async(self.format_messages(), **self.rollout_args))


class MathWorkflow(SimpleWorkflow):
    """SimpleWorkflow with a system prompt that demands <think> and <answer>, unless the YAML has another one."""

    def reset(self, task: Task) -> None:
        super().reset(task)
        self.system_prompt = self.system_prompt or _THINK_AND_ANSWER


class AsyncMathWorkflow(AsyncSimpleWorkflow, MathWorkflow):
    """MathWorkflow, asynchronous."""


def _add(name: str, kind: Any) -> None:
    if not (isinstance(kind, type) and issubclass(kind, Workflow)):
        known = "trinity.common.workflows.Workflow"
        raise plugins.PluginError(f"{name!r} is registered for {kind!r}; derive it from {known}")
    method = "run_async" if kind.is_async else "run"
    if getattr(kind, method) is getattr(Workflow, method):
        raise plugins.PluginError(f"{name!r} is registered for {kind.__name__}, which defines no {method}()")
    plugins.workflow(name)(kind)


WORKFLOWS = Registry("WORKFLOWS", _add, lambda: BUILT_IN)
