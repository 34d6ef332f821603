"""Trains the agent of sums_agent.py."""

from sums_agent import answer

from trinity.explorer.workflows.agents import AgentWorkflow
from trinity.plugins import workflow


@workflow("sums_agent")
class SumsAgent(AgentWorkflow):
    """Scores the agent's last word with the taskset's reward function."""

    async def play(self, agent):
        last = await answer(agent.asynchronous, self.column("prompt_key"))
        return await self.score(last)
