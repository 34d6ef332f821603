"""The tool as an environment of Trinity. Its steps have effects, so it has snapshots: no step is done again to
restore it."""

import json

from tool import Tool

from trinity.plugins import environment
from trinity.sdk import Description, Environment, Observation


@environment("tool")
class ToolOfTurns(Environment):
    description = Description("tool", "Answers each reply, and rewards the share of digits.", snapshots=True)
    isolation = "none"

    def reset(self, task, args, seed):
        self._tool = Tool(task["row"], args["turns"])
        return Observation(task["question"])

    def step(self, action):
        answer, reward = self._tool.step(action)
        return Observation(answer, reward or 0.0, done=reward is not None)

    def snapshot(self):
        return json.dumps([self._tool.row, self._tool.turns, self._tool.said]).encode()

    def restore(self, state):
        self._tool = Tool(*json.loads(state))
