"""On-policy distillation: the policy answers, and a teacher gives the log-probability of every token."""

import re
from dataclasses import replace

import numpy as np

from trinity.data.experience import Experience
from trinity.explorer.workflows.base import gather_rollouts
from trinity.explorer.workflows.single_turn import MathWorkflow, SimpleWorkflow
from trinity.sdk.contract import Response, Score


class DistillWorkflow(SimpleWorkflow):
    """Extends simple_workflow by a teacher's log-probabilities of the sampled tokens, for algorithms that read them.

    The teacher is an auxiliary model with the policy's tokenizer: workflow_args.teacher, or the first model that
    writes. `policy` is the policy itself, by the newest weights, which sampled the reply too unless a version came
    meanwhile. With workflow_args.privileged the teacher reads this text after the question, which the policy does not;
    {column} stands for a column of the row. Rows without a reference answer get the reward 0, which these algorithms do
    not read.
    """

    async def run(self) -> list[Experience]:
        made = await super().run()
        return await gather_rollouts(self._taught(experience) for experience in made)

    async def scores(self, answers: list[Response]) -> list[Score]:
        return await self._by_function(answers) if self.truth() else [Score(0.0, {}) for _ in answers]

    async def _taught(self, experience: Experience) -> Experience:
        if not experience.action_mask.any():  # of a prompt that was cut
            return experience
        args, (prompt, reply) = self.task.workflow_args, np.split(experience.token_ids, [experience.prompt_length])
        told = self._told(args["privileged"]) if "privileged" in args else prompt.tolist()
        found = await self.tools.teach([*told, *reply.tolist()], len(told), str(args.get("teacher", "")))
        distance = (experience.logprobs - found.logprobs)[experience.action_mask]
        return replace(
            experience,
            teacher_logprobs=np.minimum(found.logprobs, 0.0).astype(np.float32),
            teacher_top=found.top,
            metrics={**experience.metrics, "teacher_kl": float(np.mean(distance))},
        )

    def _told(self, privileged: str) -> list[int]:
        """The prompt's tokens with this text after the question."""
        *before, last = self.messages()
        text = re.sub(r"\{(\w+)\}", lambda found: self.cell(found[1]), privileged)
        asked = [*before, {**last, "content": f"{last['content']}\n\n{text}"}]
        return self.tools.prompt(asked, self.format["reply_prefix"])


class DistillMathWorkflow(DistillWorkflow):
    """Extends on_policy_distill_workflow by math_workflow's system prompt."""

    default_system_prompt = MathWorkflow.default_system_prompt
