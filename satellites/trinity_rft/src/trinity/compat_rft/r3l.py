"""R3L: reflect, then retry from the step that mattered, and learn the retry as if it had no guidance.

Half of a group's rollouts are first attempts, on each of which the policy reflects. The other half are retries: the
actions before the chosen step are replayed in a fresh environment, then the policy plays with the reflection's guidance
in its context. The retry is trained without the guidance (context distillation), with the log-probabilities it was
sampled with. Both attempts share the turns before the chosen step, so these are not trained (pivotal credit). A retry
that won and was better also trains the reflection and the guided retry, in separate groups with reward 1.
"""

import json
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from trinity.compat_rft.reflection import Outcome, Report, ask, read
from trinity.config.workflows import LEAST_REFLECTION_TOKENS, ReflectionRules
from trinity.config.workflows import R3L_WORKFLOWS as RULES
from trinity.data.experience import Experience, Task, TaskKind
from trinity.explorer.chat import Message
from trinity.explorer.workflows.base import Toolbox, Workflow, gather_rollouts
from trinity.explorer.workflows.conversation import Conversation
from trinity.explorer.workflows.environments import EnvironmentWorkflow
from trinity.explorer.workflows.episode import REWARD_TOLERANCE, Episode, texts, whole
from trinity.runtime.errors import InvalidInput


@dataclass(frozen=True)
class Reflection:
    """The policy's reply about an episode; `report` is None if it could not be parsed."""

    conversation: Conversation
    reply: str
    report: Report | None


@dataclass(frozen=True)
class Retry:
    """A second attempt. `distilled`: the guided episode's conversation without the guidance."""

    guided: Episode
    distilled: Conversation
    from_step: int
    replay_differs: bool


class ReflectRetryWorkflow(EnvironmentWorkflow):
    """Evaluations play plain episodes, without reflection.

    workflow_args, in addition to those of episodes: max_reflection_tokens (4096), retry_from ("step", or "start" for
    the whole episode), retry_environment_args (environment arguments only of second attempts).
    """

    rules: ClassVar[ReflectionRules] = ReflectionRules()

    def __init__(self, task: Task, tools: Toolbox) -> None:
        super().__init__(task, tools)
        assert isinstance(self.player.rules, ReflectionRules)
        self._own = self.player.rules

    async def run(self) -> list[Experience]:
        if self.task.kind is TaskKind.EVALUATION:
            return await super().run()
        self.player.text_only = True
        pairs, single = divmod(self.task.repeat_times, 2)
        unpaired = (self._single() for _ in range(single))
        made = await gather_rollouts([*(self._pair(index) for index in range(pairs)), *unpaired])
        found = [experience for experiences in made for experience in experiences]
        return [replace(experience, rollout=rollout) for rollout, experience in enumerate(found)]

    async def _single(self) -> list[Experience]:
        return [whole(await self.player.play(), 0)]

    async def _pair(self, index: int) -> list[Experience]:
        """A first attempt and a second one, and the reflection and guided retry if they are trained."""
        first = await self.player.play()
        reflection = await self.reflect(first)
        report = reflection.report if reflection else None
        retry = None
        if report is not None and report.outcome is not Outcome.SUCCESS:
            retry = await self.retry(first, report)
        if retry is None:
            again = whole(await self.player.play(), 0)
            made = [_measured(whole(first, 0), reflect_valid=float(report is not None)), again]
            if reflection and report is not None and report.outcome is Outcome.SUCCESS and first.success:
                made.append(_reflected(reflection, index))
            return made
        improved = _improved(first, retry.guided)
        second = _second(first, retry, improved)
        made = [_measured(whole(first, 0, untrained_turns=retry.from_step), reflect_valid=1.0), second]
        if improved and retry.guided.success:
            assert reflection is not None
            made += [_reflected(reflection, index), _guided(retry, index)]
        return made

    async def reflect(self, first: Episode) -> Reflection | None:
        """Returns None if the episode is empty, or too long to be read again."""
        if not first.turns:
            return None
        task = str(first.info.get("task") or first.turns[0].observation)
        prompt = self.tools.prompt(ask(task, first.turns, first.reward, first.success))
        limit = min(self._own.max_reflection_tokens, self.tools.max_model_tokens - len(prompt))
        if limit < LEAST_REFLECTION_TOKENS:
            return None
        (completion,) = await self.tools.generate(
            prompt, replace(self.task.sampling, n=1, max_tokens=limit, min_tokens=0)
        )
        reply = self.tools.reply(completion.token_ids)
        report = read(reply, len(first.turns))
        if report is not None and self._own.retry_from == "start":
            report = replace(report, retry_from_step=0)
        return Reflection(Conversation(tuple(prompt)).replied(completion), reply, report)

    async def retry(self, first: Episode, report: Report) -> Retry | None:
        """Play again from the chosen step. Returns None if the replay ends before it, or no reply fits after it."""
        step = report.retry_from_step
        with self.player.counting() as counted:
            async with self.player.episode(self._own.retry_environment_args) as remote:
                begun = await remote.reset()
                if step == 0:
                    unguided = self.player.begin(begun).conversation
                    try:
                        guided = self.player.begin(begun, report.guidance)
                    except InvalidInput:  # it only fits without the guidance
                        return None
                else:
                    guided, unguided = await self._replay(first, report, remote)
                counted.episode = guided
                if guided.end is not None:
                    return None
                differs = step > 0 and guided.observation != first.turns[step].observation
                await self.player.play_until_done(guided, remote)
        return Retry(guided, _without_guidance(guided, unguided, step), step, differs)

    async def _replay(self, first: Episode, report: Report, remote: Any) -> tuple[Episode, Conversation]:
        """The episode up to the chosen step, with the guidance; and its conversation without the guidance."""
        step = report.retry_from_step
        begun = first.conversation.before_turn(step)
        said = [i for i, message in enumerate(first.messages) if message["role"] == "assistant"][step - 1]
        guided = Episode(first.rules, begun, first.messages[: said + 1], first.turns[0].observation)
        for number, turn in enumerate(first.turns[:step]):
            if turn.problem:  # it never reached the environment
                guided.turns.append(turn)
                guided.observation = first.turns[number + 1].observation
                continue
            await self.player.step(guided, turn.reply, turn.action, remote)
            if guided.end is not None:
                return guided, begun
        seen: Message = {"role": "user", "content": self.player.cut(guided.observation)}
        unguided = begun.told(self.tools.next_turn([seen]))
        self.player.tell(guided, self._with_guidance(seen, report.guidance))
        return guided, unguided

    def _with_guidance(self, seen: Message, guidance: str) -> list[Message]:
        """The guidance as a system message, or in the user's message if the template takes no system message there."""
        messages: list[Message] = [{"role": "system", "content": guidance}, seen]
        try:
            self.tools.next_turn(messages)
        except InvalidInput:
            return [{"role": "user", "content": f"{guidance}\n\n{seen['content']}"}]
        return messages


def _without_guidance(guided: Episode, unguided: Conversation, step: int) -> Conversation:
    """The same replies in the conversation without guidance, which differs only before the first of them."""
    first, *rest = guided.conversation.exchanges[step:]
    exchanges = (*unguided.exchanges, replace(first, told=unguided.pending), *rest)
    return Conversation(unguided.prompt, exchanges)


def _improved(first: Episode, second: Episode) -> bool:
    """A higher reward, or the same with fewer steps."""
    more = second.reward - first.reward
    if abs(more) > REWARD_TOLERANCE:
        return more > 0
    return len(second.turns) < len(first.turns)


def _measured(experience: Experience, **metrics: float) -> Experience:
    return replace(experience, metrics={**experience.metrics, **metrics})


def _second(first: Episode, retry: Retry, improved: bool) -> Experience:
    """The experience of the second attempt, without the guidance."""
    guided = retry.guided
    metrics = {
        "second_success": float(guided.success),
        "second_steps": float(len(guided.turns)),
        "second_reward": guided.reward,
        "second_improve": float(improved),
        "second_reward_diff": guided.reward - first.reward,
        "retry_from_step": float(retry.from_step),
        "replay_differs": float(retry.replay_differs),
    }
    return replace(
        retry.distilled.experience(0, guided.reward, untrained_turns=retry.from_step),
        metrics=metrics,
        info_json=json.dumps({"distilled": True, "retry_from_step": retry.from_step}),
        prompt_text=texts(first.messages)[0],
        response_text="\n".join(f"[user] {turn.observation}\n[assistant] {turn.reply}" for turn in guided.turns),
    )


def _reflected(reflection: Reflection, index: int) -> Experience:
    made = reflection.conversation.experience(0, 1.0)
    return replace(made, info_json=json.dumps({"group": f"reflect_{index}"}), response_text=reflection.reply)


def _guided(retry: Retry, index: int) -> Experience:
    made = retry.guided.conversation.experience(0, 1.0, untrained_turns=retry.from_step)
    return replace(made, info_json=json.dumps({"group": f"retry_{index}"}))


R3L_WORKFLOWS: dict[str, type[Workflow]] = {
    name: type(name, (ReflectRetryWorkflow,), {"rules": rules, "__doc__": ReflectRetryWorkflow.__doc__})
    for name, rules in RULES.items()
}
