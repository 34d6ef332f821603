"""A reward function and a simple workflow in Trinity-RFT's form."""

import re

from trinity.common.rewards import REWARD_FUNCTIONS, RewardFn
from trinity.common.workflows import WORKFLOWS, SimpleWorkflow


@REWARD_FUNCTIONS.register_module("last_number")
class LastNumber(RewardFn):
    def __init__(self, bonus=0.0):
        self.bonus = bonus

    def __call__(self, response, truth, **kwargs):
        numbers = re.findall(r"-?\d+", response)
        wanted = re.findall(r"-?\d+", str(truth))
        right = bool(numbers) and bool(wanted) and numbers[-1] == wanted[-1]
        return {"accuracy": float(right), "form": self.bonus if numbers else 0.0}


@WORKFLOWS.register_module("hinted_sums")
class HintedSums(SimpleWorkflow):
    def format_messages(self):
        hint = self.task.workflow_args.get("hint", "")
        return [{"role": "user", "content": f"{self.task_desc}{hint}"}]
