"""On-policy distillation: the policy answers, and a teacher gives the log-probability of every token."""

from dataclasses import replace

import numpy as np

from trinity.data.experience import Experience
from trinity.explorer.environments.client import Answer, Score
from trinity.explorer.workflows.base import gather_rollouts
from trinity.explorer.workflows.single_turn import MathWorkflow, SimpleWorkflow


class DistillWorkflow(SimpleWorkflow):
    """Extends simple_workflow by a teacher's log-probabilities of the sampled tokens, for on_policy_distill and jsd.

    The teacher is an auxiliary model with the policy's tokenizer: workflow_args.teacher, or the first model that
    writes. Rows without a reference answer get the reward 0, which these algorithms do not read.
    """

    async def run(self) -> list[Experience]:
        made = await super().run()
        return await gather_rollouts(self._taught(experience) for experience in made)

    async def scores(self, answers: list[Answer]) -> list[Score]:
        return await self._by_function(answers) if self.truth() else [Score(0.0, {}) for _ in answers]

    async def _taught(self, experience: Experience) -> Experience:
        teacher = str(self.task.workflow_args.get("teacher", ""))
        tokens = [int(token) for token in experience.token_ids]
        found = await self.tools.teacher_logprobs(tokens, experience.prompt_length, teacher)
        distance = (experience.logprobs - found)[experience.action_mask]
        metrics = (
            {**experience.metrics, "teacher_kl": float(np.mean(distance))} if len(distance) else experience.metrics
        )
        return replace(experience, teacher_logprobs=np.minimum(found, 0.0).astype(np.float32), metrics=metrics)


class DistillMathWorkflow(DistillWorkflow):
    """Extends on_policy_distill_workflow by math_workflow's system prompt."""

    default_system_prompt = MathWorkflow.default_system_prompt
