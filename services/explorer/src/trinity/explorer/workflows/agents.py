"""Agents that speak OpenAI's API: the tokens that a session samples are one rollout."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from trinity.data.experience import Experience, TaskKind
from trinity.explorer.workflows.base import as_text, gather_rollouts
from trinity.explorer.workflows.single_turn import SimpleWorkflow
from trinity.sdk.contract import Response, Score


class AgentWorkflow(SimpleWorkflow):
    """Runs `repeat_times` sessions of an agent, which a plugin writes as `play`. Each branch is an experience with its
    number as `step`. The attempt fails if the agent raises or a session failed."""

    @abstractmethod
    async def play(self, agent: Any) -> float | Sequence[float] | Score:
        """Play one session (trinity.explorer.sessions.agents.AgentSession). Returns the session's reward, a reward for
        each branch, or a score with metrics.

        `agent.sync` and `agent.asynchronous` are OpenAI's clients, the first for threads (asyncio.to_thread).
        `agent.environment` has the variables that these clients read in other processes.
        """

    async def run(self) -> list[Experience]:
        sessions = await gather_rollouts(self._session(rollout) for rollout in range(self.task.repeat_times))
        return [experience for session in sessions for experience in session]

    async def _session(self, rollout: int) -> list[Experience]:
        async with self.tools.openai_client(self.task) as agent:
            agent.rollout = rollout
            played = await self.play(agent)
            score = played if isinstance(played, Score) else Score(0.0, {})
            agent.reward = score.reward if isinstance(played, Score) else played
            metrics = {**score.metrics, **agent.metrics}
            made = [as_text(self.tools, experience, metrics) for experience in agent.experiences(rollout)]
        return made[-1:] if self.task.kind is TaskKind.EVALUATION else made  # an evaluation counts rollouts

    async def score(self, answer: str) -> Score:
        """Score an agent's last reply by the taskset's reward function."""
        (score,) = await self.scores([Response(self.column("prompt_key"), answer, self.truth())])
        return score


class ExternalAgentWorkflow(AgentWorkflow):
    """Runs `repeat_times` sessions that outside programs open, end and reward. See docs/agents.md."""

    async def play(self, agent: Any) -> float | Sequence[float]:
        rewards: float | Sequence[float] = await self.tools.outside_agent(self.task, agent)
        return rewards
