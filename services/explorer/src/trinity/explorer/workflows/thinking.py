"""Thoughts of a limited length: at the limit the workflow writes their end, and the policy answers."""

from dataclasses import replace

import numpy as np

from trinity.config.workflows import ThinkingArguments
from trinity.data.experience import Experience, Truncation
from trinity.explorer.workflows.base import arguments, gather_rollouts
from trinity.explorer.workflows.conversation import Conversation
from trinity.explorer.workflows.single_turn import SimpleWorkflow


class ThinkingBudgetWorkflow(SimpleWorkflow):
    """Extends simple_workflow by a limit of thoughts. If a reply's first workflow_args.thinking_token_budget tokens do
    not contain `reasoning_end_str`, that text is inserted, untrained, and the policy continues."""

    async def sampled(self, prompt: list[int]) -> list[Experience]:
        args = arguments(ThinkingArguments, self.task.workflow_args)
        end, budget = args.reasoning_end_str, args.thinking_token_budget
        times = range(self.task.repeat_times)
        replies = await gather_rollouts(self._reply(Conversation(tuple(prompt)), end, budget) for _ in times)
        return [reply.experience(index, 0.0) for index, reply in enumerate(replies)]

    def measures(self, made: Experience) -> dict[str, float]:
        """thinking_cut: the end of the thoughts was inserted, not sampled."""
        sampled, cut = np.count_nonzero(made.action_mask), made.truncation is Truncation.RESPONSE
        written = float(sampled < made.response_length)
        return {"response_tokens": float(sampled), "response_truncated": float(cut), "thinking_cut": written}

    async def _reply(self, conversation: Conversation, end_text: str, budget: int) -> Conversation:
        """The thoughts, and the answer if it fits."""
        end = tuple(self.tools.tokens(end_text))
        sampling = replace(self.task.sampling, n=1, min_tokens=0)
        forced = True
        if budget:
            most = min(budget, sampling.max_tokens)
            (thoughts,) = await self.tools.generate(conversation.tokens, replace(sampling, max_tokens=most))
            conversation = conversation.replied(thoughts)
            if thoughts.finish_reason != "length":
                return conversation
            # A text lacks special tokens, and other tokens may spell the end.
            forced = not (_holds(thoughts.token_ids.tolist(), end) or end_text in self.tools.text(thoughts.token_ids))
        room = sampling.max_tokens - conversation.sampled_tokens - len(end) * forced
        if room < 1:
            return conversation
        conversation = replace(conversation, pending=end if forced else ())
        (answer,) = await self.tools.generate(conversation.tokens, replace(sampling, max_tokens=room))
        return conversation.replied(answer)


def _holds(tokens: list[int], part: tuple[int, ...]) -> bool:
    return any(tuple(tokens[at : at + len(part)]) == part for at in range(len(tokens) - len(part) + 1))
