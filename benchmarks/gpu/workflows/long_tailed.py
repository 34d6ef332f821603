"""A plugin: responses of given lengths, log-normal and cut at a cap, the same for a task in every run.

workflow_args: median and cap in tokens, sigma of the logarithm, record: a file that gets a line for each response.
"""

import json
import math
import random
import time
from dataclasses import replace
from pathlib import Path

from trinity.data.experience import Experience, Truncation
from trinity.explorer.workflows.base import gather_rollouts
from trinity.explorer.workflows.conversation import Conversation
from trinity.explorer.workflows.single_turn import SimpleWorkflow
from trinity.plugins import workflow


@workflow("long_tailed_workflow")
class LongTailedWorkflow(SimpleWorkflow):
    """Each rollout is sampled up to its drawn length; a stop token does not end it. Its reward is random."""

    async def run(self) -> list[Experience]:
        prompt = self.tools.prompt(self.messages())
        return await gather_rollouts(self._rollout(index, prompt) for index in range(self.task.repeat_times))

    async def _rollout(self, index: int, prompt: list[int]) -> Experience:
        args, chance = self.task.workflow_args, random.Random(f"{self.task.ordinal}/{index}")
        drawn = chance.lognormvariate(math.log(args["median"]), args["sigma"])
        length = min(args["cap"], max(1, round(drawn)))
        sampling = replace(self.task.sampling, n=1, max_tokens=length, min_tokens=0, ignore_eos=True)
        begin = time.time()
        [completion] = await self.tools.generate(prompt, sampling)
        _note(args["record"], {"begin": begin, "end": time.time(), "tokens": length})
        made = Conversation(tuple(prompt)).replied(completion).experience(index, float(chance.random() < 0.5))
        # It ends at its drawn length.
        return replace(made, metrics=self.measures(made), truncation=Truncation.NONE)


def _note(record: str, line: dict[str, float]) -> None:
    with Path(record).open("a") as file:
        file.write(json.dumps(line) + "\n")
