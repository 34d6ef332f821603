"""Trinity-RFT's own workflows by name, and plugins in its form (trinity.common.workflows) as workflows of Trinity.

The explorer reaches WORKFLOWS and `adapted` by the hook `workflows` (trinity.plugins.satellites).

Each instance of a plugin's class has a thread, and an event loop if it is asynchronous, so that it may block. The
explorer's loop answers the calls of its model. A thread that outlives its attempt ends at its next call.
"""

import asyncio
import contextvars
import inspect
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from trinity import plugins
from trinity.api.numbers import real_number
from trinity.common import workflows as rft
from trinity.common.config import FormatConfig, GenerationConfig
from trinity.common.experience import Experience as Made
from trinity.common.models.model import ModelWrapper
from trinity.common.refusals import NotMapped
from trinity.common.rewards.built_in import SCORE, BuiltInReward, Score
from trinity.common.rewards.reward_fn import REWARD_FUNCTIONS, RewardFn
from trinity.compat_rft.judges import MathRulerWorkflow, MathTrainableRulerWorkflow, RubricJudgeWorkflow
from trinity.compat_rft.model import PolicySampler
from trinity.compat_rft.r3l import R3L_WORKFLOWS
from trinity.compat_rft.trajectories import Reply, trajectory
from trinity.data.experience import Experience, TaskKind
from trinity.explorer.workflows.base import Workflow, gather_rollouts
from trinity.runtime.errors import TrinityError
from trinity.sdk.contract import Response

WORKFLOWS: dict[str, type[Workflow]] = {
    "math_ruler_workflow": MathRulerWorkflow,
    "async_math_ruler_workflow": MathRulerWorkflow,
    "math_trainable_ruler_workflow": MathTrainableRulerWorkflow,
    "rubric_judge_workflow": RubricJudgeWorkflow,
    "rubric_judge_openai_workflow": RubricJudgeWorkflow,
    **R3L_WORKFLOWS,
}
_Result = TypeVar("_Result")
_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "repetition_penalty")


class RftWorkflowFailed(TrinityError):
    """A workflow in Trinity-RFT's form raised; the message has the line of its file."""


class RftWorkflow(Workflow):
    """An attempt at a task by a workflow of class `kind`."""

    kind: ClassVar[type[rft.Workflow]]

    async def run(self) -> list[Experience]:
        times = self.task.repeat_times
        if self.kind.can_repeat:
            made = await self._played(times)
            return self._counted(list(numbered(made, times)))
        runs = await gather_rollouts(self._played(1) for _ in range(times))
        of_runs = [[replace(e, rollout=run) for e in made] for run, made in enumerate(runs)]
        return self._counted([e for made in of_runs for e in numbered(made)])

    def _counted(self, made: list[Experience]) -> list[Experience]:
        """Returns all experiences; for an evaluation only the last step of each rollout."""
        if self.task.kind is not TaskKind.EVALUATION:
            return made
        return list({e.rollout: replace(e, step=0) for e in sorted(made, key=lambda e: e.step)}.values())

    async def _played(self, times: int) -> list[Experience]:
        """Runs one instance, and returns its experiences for `times` rollouts."""
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            sampler = PolicySampler(self.task, self.tools, stack)
            model = ModelWrapper(sampler, loop)
            try:
                made = await _in_thread(lambda: self._run(model, sampler, loop, times), self._place)
            finally:
                model.close()
                sampler.check()
            replies = sampler.replies
            try:
                if callable(made):
                    return made()
                return [trajectory(one, replies, f"experience {index}") for index, one in enumerate(made)]
            except NotMapped as error:
                raise RftWorkflowFailed(f"{self._place(error)}: {error}") from None

    def _run(
        self, model: ModelWrapper, sampler: PolicySampler, loop: asyncio.AbstractEventLoop, times: int
    ) -> list[Made] | Callable[[], list[Experience]]:
        """Runs in the thread. A workflow with recording gives a function that takes experiences from its session."""
        SCORE.set(self._scorer(sampler, loop))
        task, auxiliary = self._task(), sampler.auxiliary(loop, self.kind.is_async)
        instance = self.kind(task=task, model=model, auxiliary_models=auxiliary)
        if self.kind.can_repeat:
            instance.set_repeat_times(times, 0)
        made: Any = asyncio.run(instance.run_async()) if self.kind.is_async else instance.run()
        if isinstance(instance, rft.WorkflowWithRecording):
            metrics = {name: real_number(value, f"metrics: {name}") for name, value in dict(made or {}).items()}
            return partial(sampler.recorded, instance.recorded_reward, instance.recorded_info or {}, metrics)
        if not isinstance(made, Sequence) or not made or not all(isinstance(one, Made) for one in made):
            raise NotMapped(
                f"{self.kind.__name__} returned {made!r:.100}, must be a list of experiences", "experiences"
            )
        return list(made)

    def _task(self) -> rft.Task:
        task, sampling = self.task, self.task.sampling
        return rft.Task(
            workflow=self.kind,
            repeat_times=task.repeat_times,
            format_args=FormatConfig(**self.format),
            rollout_args=GenerationConfig(**{name: getattr(sampling, name) for name in _SAMPLING}),
            workflow_args=task.workflow_args,
            reward_fn_args=json.loads(task.reward_args_json or "{}"),
            is_eval=task.kind is TaskKind.EVALUATION,
            reward_fn=self._reward_function(),
            raw_task=self.row,
            task_id=task.task_id,
            index={"taskset": task.taskset, "epoch": task.epoch, "row": task.row},
        )

    def _reward_function(self) -> type[RewardFn] | None:
        """Returns the plugin's class, or a class that calls the environment service for a function of another form."""
        name = self.task.reward_function
        if not name:
            return None
        return REWARD_FUNCTIONS.get(name) or type("Scored", (BuiltInReward,), {"name": name})

    def _scorer(self, sampler: PolicySampler, loop: asyncio.AbstractEventLoop) -> Score:
        def score(name: str, args: dict[str, Any], response: str, prompt: str, truth: str) -> dict[str, float]:
            answer = _answer(response, truth, prompt, sampler.replies)
            asked = self.tools.score(name, [answer], self.row, args)
            (found,) = asyncio.run_coroutine_threadsafe(asked, loop).result()
            parts = {name: part for name, part in found.metrics.items() if name != "answered"}  # workflows add parts up
            return parts if parts and abs(sum(parts.values()) - found.reward) < 1e-6 else {"reward": found.reward}

        return score

    def _place(self, error: BaseException) -> str:
        """The plugin's line that raised; else the one where it runs."""
        code = (self.kind.run_async if self.kind.is_async else self.kind.run).__code__
        found = plugins.failing_line(error, Path(inspect.getfile(self.kind)).parent)
        return found or f"{code.co_filename}:{code.co_firstlineno}"


def _answer(response: str, truth: str, prompt: str, replies: Sequence[Reply]) -> Response:
    """Makes an answer with tokens and length of the newest reply of that text, which other texts lack."""
    reply = next((reply for reply in reversed(replies) if reply.text == response), None)
    ids = tuple(reply.completion.token_ids.tolist()) if reply is not None else ()
    return Response(
        prompt,
        response,
        truth,
        truncated=reply is not None and reply.cut,
        response_tokens=len(ids),
        response_token_ids=ids,
    )


def numbered(made: Sequence[Experience], times: int = 0) -> Iterator[Experience]:
    """Gives each experience of a rollout another step.

    `times` experiences without numbers (eid.run) are as many rollouts. Where two have one number, all of that rollout
    are steps in the order given.
    """
    if len(made) == times and len({(e.rollout, e.step) for e in made}) == 1:
        made = [replace(e, rollout=run) for run, e in enumerate(made)]
    pairs = [(e.rollout, e.step) for e in made]
    twice = {rollout for rollout, step in pairs if pairs.count((rollout, step)) > 1}
    steps: dict[int, int] = {}
    for experience in made:
        step = steps.get(experience.rollout, 0)
        steps[experience.rollout] = step + 1
        yield replace(experience, step=step) if experience.rollout in twice else experience


async def _in_thread(work: Callable[[], _Result], place: Callable[[BaseException], str]) -> _Result:
    """Runs `work` in a new thread and returns its result. Errors of a plugin become RftWorkflowFailed; errors of the
    explorer, and a time limit, pass unchanged."""
    done: Future[_Result] = Future()
    done.set_running_or_notify_cancel()  # the thread outlives an attempt that is over, and its result is dropped

    def run() -> None:
        try:
            done.set_result(work())
        except TrinityError as error:
            done.set_exception(error)
        except BaseException as error:  # a plugin may raise anything
            what = str(error) if isinstance(error, plugins.PluginError) else f"{type(error).__name__}: {error}"
            done.set_exception(RftWorkflowFailed(f"{place(error)}: {what}"))

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name="rft-workflow", daemon=True).start()
    return await asyncio.wrap_future(done)


def adapted(kind: type) -> type:
    """Returns a workflow of Trinity that runs `kind`; `kind` itself if it has another form."""
    return type(kind.__name__, (RftWorkflow,), {"kind": kind}) if issubclass(kind, rft.Workflow) else kind
