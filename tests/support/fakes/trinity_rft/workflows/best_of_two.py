"""An asynchronous workflow: two replies to one question, of which the better one is returned."""

import asyncio

from trinity.common.workflows.workflow import WORKFLOWS, Workflow
from trinity.utils.log import get_logger

logger = get_logger(__name__)


@WORKFLOWS.register_module("best_of_two")
class BestOfTwo(Workflow):
    is_async = True

    def __init__(self, *, task, model, auxiliary_models=None):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.score = task.reward_fn(**task.reward_fn_args)

    async def run_async(self):
        messages = [{"role": "user", "content": self.task.task_desc}]
        replies = await asyncio.gather(*(self.model.chat_async(messages) for _ in range(2)))
        candidates = [reply for (reply,) in replies]
        for candidate in candidates:
            candidate.reward = sum(self.score(response=candidate.response_text, truth=self.task.truth).values())
        best = max(candidates, key=lambda candidate: candidate.reward)
        best.metrics["best_of"] = len(candidates)
        logger.info("the best of %d has reward %s", len(candidates), best.reward)
        return [best]
