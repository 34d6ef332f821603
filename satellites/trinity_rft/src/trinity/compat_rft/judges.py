"""Rewards by a judge model, which grades each reply by a rubric or compares a group's replies (RULER)."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trinity.config.hints import problems_in
from trinity.config.workflows import Criterion
from trinity.data.experience import Experience, SamplingParams, TaskKind, Truncation
from trinity.explorer.chat import Message
from trinity.explorer.environments.client import ScorerFailed
from trinity.explorer.workflows.base import gather_rollouts
from trinity.explorer.workflows.single_turn import MathWorkflow, SimpleWorkflow
from trinity.runtime.errors import InvalidInput
from trinity.sdk.contract import Response, Score

_ATTEMPTS = 3
_MAX_TOKENS = 1024
_MAX_TEXT = 20_000

_RUBRIC_PROMPT = """You grade a reply by a rubric. For each criterion, in its order, give a number from 0 (not met) to \
1 (fully met). Judge only what the reply says. Reply with a JSON list of numbers and nothing else."""
_RULER_PROMPT = """You compare several replies to the same question. Give each, in its order, a score from 0 to 1. The \
scores are relative to each other: a reply that comes nearer to the goal scores higher, small progress counts, and \
replies of the same quality score the same. Reply with a JSON list of numbers and nothing else."""


class _Judged(SimpleWorkflow):
    """workflow_args: judge (name; empty for the first model that writes), judge_temperature (0), judge_max_tokens."""

    async def numbers(self, messages: Sequence[Message], count: int) -> list[float]:
        """Ask a judge for `count` numbers in [0, 1]. Raises ScorerFailed after three replies without such a list."""
        args = self.task.workflow_args
        temperature, limit = args.get("judge_temperature", 0.0), args.get("judge_max_tokens", _MAX_TOKENS)
        reply = ""
        for attempt in range(_ATTEMPTS):
            # The same greedy question would have the same answer.
            sampling = SamplingParams(temperature=temperature or 0.7 * (attempt > 0), max_tokens=limit)
            reply = await self.judged(messages, sampling)
            found = read_numbers(reply, count)
            if found is not None:
                return found
        raise ScorerFailed(f"the judge gave no list of {count} numbers from 0 to 1, but {reply[-200:]!r}")

    async def judged(self, messages: Sequence[Message], sampling: SamplingParams) -> str:
        (reply,) = await self.tools.judge(messages, sampling, str(self.task.workflow_args.get("judge", "")))
        return reply


def read_numbers(reply: str, count: int) -> list[float] | None:
    """The last list in a reply; None unless it has `count` numbers in [0, 1]."""
    begin, end = reply.rfind("["), reply.rfind("]")
    try:
        found = json.loads(reply[begin : end + 1]) if 0 <= begin < end else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, list) or len(found) != count:
        return None
    good = all(isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n <= 1 for n in found)
    return [float(n) for n in found] if good else None


class RubricJudgeWorkflow(_Judged):
    """Rewards each reply by the row's rubric, a list of {description, weight}: sum of weight * grade over all weights.

    workflow_args: rubric_key (column of the rubric, "rubric"), or rubric (one for all rows), and those of the judge.
    """

    async def scores(self, answers: list[Response]) -> list[Score]:
        rubric = self._rubric()
        graded = await gather_rollouts(self._grade(answer, rubric) for answer in answers)
        total = sum(criterion.weight for criterion in rubric)
        rewards = [sum(c.weight * grade for c, grade in zip(rubric, g, strict=True)) / total for g in graded]
        return await self.checked(answers, rewards, "rubric")

    async def _grade(self, answer: Response, rubric: Sequence[Criterion]) -> list[float]:
        criteria = "\n".join(f"{number}. {criterion.description}" for number, criterion in enumerate(rubric, 1))
        asked = self.column("prompt_key")[:_MAX_TEXT]
        text = f"Question:\n{asked}\n\nReply:\n{answer.response[:_MAX_TEXT]}\n\nRubric:\n{criteria}"
        messages = [{"role": "system", "content": _RUBRIC_PROMPT}, {"role": "user", "content": text}]
        return await self.numbers(messages, len(rubric))

    def _rubric(self) -> list[Criterion]:
        """Raises InvalidInput naming the wrong entry."""
        args = self.task.workflow_args
        place, found = "workflow_args.rubric", args.get("rubric")
        if found is None:
            key = str(args.get("rubric_key", "rubric"))
            place, found = f"task.{key}", self.row.get(key)
        if not isinstance(found, list) or not found:
            raise InvalidInput(place, f"is {found!r}, must be a list of {{description, weight}}")
        return [_criterion(entry, f"{place}[{index}]") for index, entry in enumerate(found)]


def _criterion(entry: Any, place: str) -> Criterion:
    for name, problem in problems_in(entry, Criterion):
        raise InvalidInput(f"{place}.{name}" if name else place, problem)
    return Criterion.model_validate(entry)


class MathRulerWorkflow(_Judged):
    """Extends math_workflow by a judge, who compares all replies of the group, and the row's reference if any."""

    default_system_prompt = MathWorkflow.default_system_prompt

    async def scores(self, answers: list[Response]) -> list[Score]:
        found = await self.numbers(self.comparison(answers, _MAX_TEXT, self.truth()), len(answers))
        return await self.checked(answers, found, "ruler")

    def comparison(self, answers: Sequence[Response], most: int, truth: str = "") -> list[Message]:
        """The judge's prompt. Question and replies have at most about 2 * `most` characters together."""
        share = max(1, most // max(1, len(answers)))
        shown = [f"Reply {number}:\n{answer.response[-share:]}" for number, answer in enumerate(answers, 1)]
        reference = [f"The right answer is: {truth}"] if truth else []
        text = "\n\n".join([f"Question:\n{self.column('prompt_key')[:most]}", *reference, *shown])
        return [{"role": "system", "content": _RULER_PROMPT}, {"role": "user", "content": text}]


class MathTrainableRulerWorkflow(MathRulerWorkflow):
    """Extends math_ruler_workflow with the policy as the judge, who does not see the reference.

    Tasks with an even ordinal train judgements: the policy judges untrained replies `repeat_times` times. The reward of
    a judgement is 1 - mean |score - right|, with `right` 1 or 0 by the reward function, or 0 if it is no list of
    scores. So all rollouts of a group do the same, and share a baseline. Evaluations only use the reward function.

    workflow_args: judge_temperature (0) and judge_max_tokens, for judgements that are not trained.
    """

    async def run(self) -> list[Experience]:
        if not self.truth():
            raise InvalidInput(f"task.{self.format['response_key']}", "is missing; judgements are trained by it")
        trains_judge = self.task.kind is TaskKind.TRAIN and self.task.ordinal % 2 == 0
        made = await (self._judgements() if trains_judge else super().run())
        return [replace(e, metrics={**e.metrics, "trains_judge": float(trains_judge)}) for e in made]

    async def scores(self, answers: list[Response]) -> list[Score]:
        if self.task.kind is not TaskKind.TRAIN:
            return await self._by_function(answers)
        found = await self.numbers(self._fitting(answers), len(answers))
        return await self.checked(answers, found, "ruler")

    async def judged(self, messages: Sequence[Message], sampling: SamplingParams) -> str:
        prompt = self.tools.prompt(messages)
        limit = min(sampling.max_tokens, self.tools.max_model_tokens - len(prompt))
        (completion,) = await self.tools.generate(prompt, replace(sampling, max_tokens=limit))
        return self.tools.reply(completion.token_ids)

    async def _judgements(self) -> list[Experience]:
        asked = self.asked()
        if len(asked) > self.tools.max_prompt_tokens:
            return await self._too_long(asked)
        answers = self.answers(await self.sampled(asked))
        right = [min(1.0, max(0.0, score.reward)) for score in await self._by_function(answers)]
        prompt = self.tools.prompt(self._fitting(answers))
        made = []
        for judgement in await self.sampled(prompt):
            tokens, cut = judgement.token_ids[judgement.prompt_length :], judgement.truncation is Truncation.RESPONSE
            answer = self.answer(self.tools.text(prompt), self.tools.reply(tokens), tokens, cut)
            found = read_numbers(answer.response, len(answers))
            errors = [abs(score - truth) for score, truth in zip(found or [], right, strict=bool(found))]
            reward = 1.0 - sum(errors) / len(errors) if errors else 0.0
            score = Score(reward, {"judged": float(found is not None)})
            made.append(self.scored(judgement, answer, score))
        return made

    def _fitting(self, answers: Sequence[Response]) -> list[Message]:
        """The judge's prompt, cut to the prompt's limit. Raises InvalidInput if not even an empty question fits."""
        most = _MAX_TEXT
        while most:
            messages = self.comparison(answers, most)
            if len(self.tools.prompt(messages)) <= self.tools.max_prompt_tokens:
                return messages
            most //= 2
        raise InvalidInput("model.max_prompt_tokens", f"is {self.tools.max_prompt_tokens}; no judgement fits into it")
