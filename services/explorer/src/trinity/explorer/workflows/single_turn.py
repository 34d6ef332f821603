"""One prompt, one reply, one score."""

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trinity.data.experience import Experience, SamplingParams, Truncation
from trinity.data.images import MARKER, parts
from trinity.data.prompts import prompt_messages, reference_answers, references_for
from trinity.explorer.chat import Message
from trinity.explorer.workflows.base import Workflow
from trinity.explorer.workflows.conversation import Conversation
from trinity.runtime.errors import InvalidInput
from trinity.sdk.contract import Response, Score

_MATH_SYSTEM_PROMPT = (
    "You solve mathematical problems. First reason inside <think> and </think>, then give only the final answer inside "
    "<answer> and </answer>."
)


class SimpleWorkflow(Workflow):
    """Samples `repeat_times` replies to the row's prompt and scores each.

    workflow_args.reward_model: name of an auxiliary reward model that replaces the reward function.
    """

    default_system_prompt = ""
    reward_function = ""  # empty: the task's

    @property
    def images(self) -> tuple[bytes, ...]:
        """Image files that the prompt shows."""
        return ()

    async def run(self) -> list[Experience]:
        prompt = self.asked()
        if len(prompt) > self.tools.max_prompt_tokens:
            return await self._too_long(prompt)
        made = await self.sampled(prompt)
        answers = self.answers(made)
        scores = await self.scores(answers)
        return [self.scored(*each) for each in zip(made, answers, scores, strict=True)]

    async def sampled(self, prompt: list[int]) -> list[Experience]:
        """Sample the group's replies, without reward."""
        return await self._replies(prompt, self.task.sampling)

    async def _replies(self, prompt: list[int], sampling: SamplingParams) -> list[Experience]:
        asked = Conversation(tuple(prompt), images=self.tools.placed(prompt, self.images))
        completions = await self.tools.generate(prompt, sampling, asked.images)
        return [asked.replied(completion).experience(index, 0.0) for index, completion in enumerate(completions)]

    def answers(self, made: Sequence[Experience]) -> list[Response]:
        """Replies to one prompt in the form that reward functions read."""
        asked = self.tools.text(made[0].token_ids[: made[0].prompt_length])
        prefix = self.tools.reply([]) + (self.format["reply_prefix"] or "")
        replies = [(e.token_ids[e.prompt_length :], e.truncation is Truncation.RESPONSE) for e in made]
        return [self.answer(asked, prefix + self.tools.text(tokens), tokens, cut) for tokens, cut in replies]

    def answer(self, prompt: str, reply: str, token_ids: np.ndarray, cut: bool) -> Response:
        """One reply to score, with its `token_ids`. `cut`: it reached its limit."""
        return Response(
            prompt,
            reply,
            self.truth(),
            truncated=cut,
            response_tokens=len(token_ids),
            response_token_ids=tuple(token_ids.tolist()),
        )

    def asked(self) -> list[int]:
        """The prompt's tokens."""
        return self.tools.prompt(self.messages(), self.format["reply_prefix"], images=self.images)

    def scored(self, made: Experience, answer: Response, score: Score) -> Experience:
        return replace(
            made,
            reward=score.reward,
            metrics={**score.metrics, **self.measures(made)},
            prompt_text=answer.prompt,
            response_text=answer.response,
        )

    def measures(self, made: Experience) -> dict[str, float]:
        """Metrics of a reply that do not come from its score."""
        cut = made.truncation is Truncation.RESPONSE
        length = float(made.response_length)
        return {"response_tokens": length, "response_truncated": float(cut), "prompt_truncated": 0.0}

    async def scores(self, answers: list[Response]) -> list[Score]:
        """Score each answer by the reward model that workflow_args name, or by the task's reward function."""
        if (name := self.task.workflow_args.get("reward_model")) is not None:
            return await self.rated(answers, str(name))
        return await self._by_function(answers)

    async def rated(self, answers: Sequence[Response], model: str) -> list[Score]:
        """Score by an auxiliary reward model, which reads the messages and the reply; empty name: the first model."""
        asked = self.messages()
        conversations = [[*asked, {"role": "assistant", "content": answer.response}] for answer in answers]
        return await self.checked(answers, await self.tools.rate(conversations, model), "reward_model")

    async def _by_function(self, answers: list[Response]) -> list[Score]:
        """Score by the reward function. With several reference answers, the best score of each answer counts."""
        name, args = self.reward_function or self.task.reward_function, json.loads(self.task.reward_args_json or "{}")
        if not (truths := references_for(name, self.truths())):
            return await self.tools.score(name, answers, self.row, args)
        found = [
            await self.tools.score(name, [replace(answer, truth=truth) for answer in answers], self.row, args)
            for truth in truths
        ]
        return [max(scores, key=lambda score: score.reward) for scores in zip(*found, strict=True)]

    async def checked(self, answers: Sequence[Response], rewards: Sequence[float], metric: str) -> list[Score]:
        """Scores with given rewards, also as a metric, and the metrics of the reward function.

        The reward function only runs if the row has a reference answer.
        """
        found = await self._by_function(list(answers)) if self.truth() else [Score(0.0, {}) for _ in answers]
        pairs = zip(rewards, found, strict=True)
        return [Score(reward, {**score.metrics, metric: reward}) for reward, score in pairs]

    def messages(self) -> list[Message]:
        key = self.format["system_prompt_key"]
        system = self.row.get(key) if key else self.format["system_prompt"]
        text, given = self.column("prompt_key"), self.row.get(self.format["prompt_key"])
        asked: list[Message] = [{"role": "user", "content": text}]
        if isinstance(given, list):  # taken as written, without the workflow's default system prompt
            asked = list(prompt_messages(given))
            system = None if asked[0]["role"] == "system" else system
        elif system is None:
            system = self.default_system_prompt
        return [{"role": "system", "content": str(system)}, *asked] if system else asked

    def truth(self) -> str:
        """The reference answer, or several right ones as one text; empty if the row has none."""
        return " or ".join(self.truths())

    def truths(self) -> list[str]:
        """The reference answers. A reply is right if it matches any."""
        name = self.format["response_key"]
        try:
            return reference_answers(self.row[name]) if name in self.row else []
        except ValueError as error:
            raise InvalidInput(f"task.{name}", f"{error} (columns: {', '.join(self.row)})") from None

    async def _too_long(self, prompt: list[int]) -> list[Experience]:
        """Cut a prompt that is over the limit and keep it out of the loss: one token is sampled, none is trained."""
        cut = prompt[: self.tools.max_prompt_tokens]
        sampling = replace(self.task.sampling, max_tokens=1, min_tokens=0)
        return [
            replace(
                e,
                truncation=Truncation.PROMPT,
                action_mask=np.zeros(e.response_length, dtype=bool),
                metrics={
                    "response_tokens": float(e.response_length),
                    "response_truncated": 0.0,
                    "prompt_truncated": 1.0,
                },
            )
            for e in await self._replies(cut, sampling)
        ]


class SimpleMMWorkflow(SimpleWorkflow):
    """Extends simple_workflow by the row's images (format.image_key), at the prompt's <image> or before the text.

    A prompt over the limit fails the attempt, because the placeholders of an image cannot be cut.
    """

    @property
    def images(self) -> tuple[bytes, ...]:
        return self.task.images

    def messages(self) -> list[Message]:
        key = self.format.get("image_key")
        if not self.task.images:
            found = self.row.get(key) if key else None
            problem = found.get("problem") if isinstance(found, dict) else "has no image"
            raise InvalidInput(f"task.{key or 'images'}", str(problem))
        asked, count = super().messages(), len(self.task.images)
        markers = [0 if one["role"] == "system" else one["content"].count(MARKER) for one in asked]
        if not any(markers):
            markers[-1] = count  # before the text of the last
        elif sum(markers) != count:
            raise InvalidInput("task.images", f"are {count}, and the prompt has {sum(markers)} times {MARKER}")
        return [
            {**one, "content": parts(one["content"], number)} if number else one
            for one, number in zip(asked, markers, strict=True)
        ]

    async def scores(self, answers: list[Response]) -> list[Score]:
        """Score by the task's reward function, since reward models only read text."""
        return await self._by_function(answers)

    async def _too_long(self, prompt: list[int]) -> list[Experience]:
        most = self.tools.max_prompt_tokens
        raise InvalidInput("prompt", f"has {len(prompt)} tokens with its images, model.max_prompt_tokens is {most}")


class MathWorkflow(SimpleWorkflow):
    """Extends simple_workflow by a default system prompt that asks for <think> and <answer>."""

    default_system_prompt = _MATH_SYSTEM_PROMPT


class MathBoxedWorkflow(SimpleWorkflow):
    """Asks for the answer in \\boxed{} and scores it with math_boxed_reward."""

    default_system_prompt = (
        "You solve mathematical problems. Reason step by step, and put your final answer inside \\boxed{}."
    )
    reward_function = "math_boxed_reward"


class MathEvalWorkflow(MathBoxedWorkflow):
    """Scores math_boxed_workflow's replies by accuracy, anywhere in the reply. For test sets."""

    reward_function = "accuracy_reward"


class MathRewardModelWorkflow(MathWorkflow):
    """Extends math_workflow by an auxiliary reward model: workflow_args.reward_model, or the first model.

    If the row has a reference answer, the reward function also runs, but only its metrics are used.
    """

    async def scores(self, answers: list[Response]) -> list[Score]:
        return await self.rated(answers, str(self.task.workflow_args.get("reward_model") or ""))
