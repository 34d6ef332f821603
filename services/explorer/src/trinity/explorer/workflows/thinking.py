"""Thoughts of a limited length: beyond it the workflow writes their end, and the policy answers."""

from dataclasses import dataclass, replace

from trinity.config.workflows import THINKING_ARGS, thinking_problems
from trinity.data.experience import Experience, Truncation
from trinity.explorer.workflows.base import gather_rollouts
from trinity.explorer.workflows.conversation import Conversation
from trinity.explorer.workflows.single_turn import SimpleWorkflow
from trinity.runtime.errors import InvalidInput


@dataclass(frozen=True)
class _Reply:
    conversation: Conversation
    forced: bool  # the end of the thoughts was written by the workflow


class ThinkingBudgetWorkflow(SimpleWorkflow):
    """As simple_workflow; after workflow_args.thinking_token_budget tokens of a reply without `reasoning_end_str` in
    them, that text is written, which is not trained, and the policy continues."""

    async def run(self) -> list[Experience]:
        for name, problem in thinking_problems(self.task.workflow_args):
            raise InvalidInput(f"workflow_args.{name}", problem)
        prompt = self.tools.prompt(self.messages(), self.format["reply_prefix"])
        if len(prompt) > self.tools.max_prompt_tokens:
            return await self._too_long(prompt)
        args = {**THINKING_ARGS, **self.task.workflow_args}
        end, budget = tuple(self.tools.tokens(args["reasoning_end_str"])), args["thinking_token_budget"]
        times = range(self.task.repeat_times)
        replies = await gather_rollouts(self._reply(Conversation(tuple(prompt)), end, budget) for _ in times)
        made = [reply.conversation.experience(index, 0.0) for index, reply in enumerate(replies)]
        prompt_text, prefix = self.tools.text(prompt), self.format["reply_prefix"] or ""
        texts = [prefix + self.tools.text(e.token_ids[e.prompt_length :]) for e in made]
        answers = [
            self.answer(prompt_text, text, e.token_ids[e.prompt_length :], e.truncation is Truncation.RESPONSE)
            for e, text in zip(made, texts, strict=True)
        ]
        scores = await self.scores(answers)
        return [
            replace(
                experience,
                reward=score.reward,
                metrics={
                    **score.metrics,
                    "response_tokens": float(reply.conversation.sampled_tokens),
                    "response_truncated": float(answer.truncated),
                    "thinking_cut": float(reply.forced),
                },
                prompt_text=prompt_text,
                response_text=answer.response,
            )
            for experience, reply, answer, score in zip(made, replies, answers, scores, strict=True)
        ]

    async def _reply(self, conversation: Conversation, end: tuple[int, ...], budget: int) -> _Reply:
        """The thoughts, and what follows them if there is room for it."""
        sampling = replace(self.task.sampling, n=1, min_tokens=0)
        forced = True
        if budget:
            most = min(budget, sampling.max_tokens)
            (thoughts,) = await self.tools.generate(conversation.tokens, replace(sampling, max_tokens=most))
            conversation = conversation.replied(thoughts)
            if thoughts.finish_reason != "length":
                return _Reply(conversation, forced=False)
            forced = not _holds(thoughts.token_ids.tolist(), end)
        room = sampling.max_tokens - conversation.sampled_tokens - len(end) * forced
        if room < 1:
            return _Reply(conversation, forced=False)
        conversation = replace(conversation, pending=end if forced else ())
        (answer,) = await self.tools.generate(conversation.tokens, replace(sampling, max_tokens=room))
        return _Reply(conversation.replied(answer), forced)


def _holds(tokens: list[int], part: tuple[int, ...]) -> bool:
    return any(tuple(tokens[at : at + len(part)]) == part for at in range(len(tokens) - len(part) + 1))
