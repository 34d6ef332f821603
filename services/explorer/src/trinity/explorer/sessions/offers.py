"""Sessions of outside agents: rollouts of leased tasks wait until a program opens their session and ends it.

    a rollout: offer -> opened -> ended with a reward, or failed
    a program: open -> calls at the gateway -> close(rewards) or abandon(reason)

The attempt at a task fails if a session fails, is abandoned or is not ended in time.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from trinity.data.experience import LARGEST_NUMBER, Task, check_metric_names, is_number, reward_problem
from trinity.explorer.environments import slots
from trinity.explorer.sessions.agents import AgentSession
from trinity.explorer.sessions.session import SessionFailed, Sessions
from trinity.runtime.errors import Conflict, InvalidInput, Unauthenticated, Unavailable
from trinity.sdk.contract import MAX_METRIC_NAMES, sendable

LONGEST_WAIT_SECONDS = 60.0
_LONGEST_REASON = 2000  # characters
_GROUP_ENDED = "the attempt at its task ended: another session of the group failed, or the time was over"

Rewards = float | Sequence[float]


def _future() -> "asyncio.Future[None]":
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False)
class Offer:
    """A rollout that a program may play. `limit_seconds` begins with its opening."""

    task: Task
    agent: AgentSession
    limit_seconds: float
    opened: "asyncio.Future[None]" = field(default_factory=_future)
    ended: "asyncio.Future[None]" = field(default_factory=_future)

    def fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # marks it as read, since its caller may be gone


@dataclass(frozen=True)
class Closed:
    """The trained parts of a closed session."""

    branches: int
    sampled_tokens: int
    trained_tokens: int


class OutsideSessions:
    """The offers of one explorer, oldest first, and their open sessions."""

    def __init__(self, sessions: Sessions, wait_seconds: float, reward_bound: float = LARGEST_NUMBER) -> None:
        """`wait_seconds`: how long a group waits for a program to open its first session. `reward_bound`: rewards are
        within plus and minus this number."""
        self._sessions = sessions
        self._wait_seconds = wait_seconds
        self._reward_bound = reward_bound
        self._waiting: list[Offer] = []
        self._open: dict[str, Offer] = {}
        self._arrived = asyncio.Event()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def open_now(self) -> int:
        return len(self._open)

    async def offer(self, task: Task, agent: AgentSession) -> Rewards:
        """Wait until a program has opened the session and ended it. Returns its rewards.

        The attempt's time limit begins with the first opening in the group. Raises the failure of a call, and
        SessionFailed, for example if no program opens a session of the group.
        """
        offer = Offer(task, agent, task.timeout_seconds)
        agent.session.on_failure = offer.fail
        self._waiting.append(offer)
        self._arrived.set()
        self._arrived = asyncio.Event()
        try:
            with slots.limit_suspended() as owner:
                await self._opened_in_time(offer, owner)
            await self._ended(offer)
        except asyncio.CancelledError:
            agent.session.fail(SessionFailed(_GROUP_ENDED))
            raise
        finally:
            self._open.pop(agent.session.name, None)
            if offer in self._waiting:
                self._waiting.remove(offer)
        assert agent.reward is not None
        return agent.reward

    async def _opened_in_time(self, offer: Offer, owner: slots.Attempt) -> None:
        await asyncio.wait([offer.opened], timeout=self._wait_seconds)
        if not offer.opened.done() and not owner.started:
            problem = f"no program opened a session of the task within {self._wait_seconds:g} s (explorer.agent_wait)"
            raise SessionFailed(problem)
        await offer.opened

    async def _ended(self, offer: Offer) -> None:
        try:
            async with asyncio.timeout(offer.limit_seconds):
                await offer.ended
        except TimeoutError:
            problem = f"the session was not ended within {offer.limit_seconds:g} s of its opening"
            raise SessionFailed(problem) from None

    async def open(
        self, taskset: str = "", task_id: str = "", wait_seconds: float = 0.0, limit_seconds: float = 0.0
    ) -> Offer:
        """Open the oldest offer, of a taskset or task if it is named. Raises InvalidInput, Unavailable."""
        if not 0 <= wait_seconds <= LONGEST_WAIT_SECONDS:
            raise InvalidInput("wait_seconds", f"is {wait_seconds:g}, must be 0 to {LONGEST_WAIT_SECONDS:g}")
        if not 0 <= limit_seconds < float("inf"):
            raise InvalidInput("limit_seconds", f"is {limit_seconds:g}, must be >= 0; 0: the task's")
        until = asyncio.get_running_loop().time() + wait_seconds
        while True:
            for offer in self._waiting:
                fits = taskset in ("", offer.task.taskset) and task_id in ("", offer.task.task_id)
                if fits and not offer.opened.done():
                    return self._opened(offer, limit_seconds)
            try:
                async with asyncio.timeout_at(until):
                    await self._arrived.wait()
            except TimeoutError:
                wanted = " and ".join(f"{n} {v!r:.100}" for n, v in (("taskset", taskset), ("task", task_id)) if v)
                which = f" of {wanted}" if wanted else ""
                raise Unavailable(f"no rollout{which} waits for an agent at this explorer; try again") from None

    def _opened(self, offer: Offer, limit_seconds: float) -> Offer:
        offer.limit_seconds = min(limit_seconds or offer.limit_seconds, offer.limit_seconds)
        self._waiting.remove(offer)
        self._open[offer.agent.session.name] = offer
        offer.opened.set_result(None)
        return offer

    def close(self, key: str, rewards: Sequence[float], metrics: Mapping[str, float] | None = None) -> Closed:
        """End a session with one reward, or one for each branch. Wrong rewards also fail the session.

        Raises InvalidInput, Unauthenticated for a forged key, Conflict if the session has ended.
        """
        offer = self._of(key)
        agent = offer.agent
        if not rewards:
            raise InvalidInput("rewards", "is empty; send one, or one of each branch, or abandon the session")
        try:
            for name, value in (metrics or {}).items():
                if not is_number(value):
                    raise InvalidInput(f"metrics.{name:.100}", f"is {value}, must be finite and fit into float32")
            if len(metrics or {}) > MAX_METRIC_NAMES:
                raise InvalidInput("metrics", f"are {len(metrics or {})}; a session has at most {MAX_METRIC_NAMES}")
            check_metric_names("metrics", metrics or {})
            for value in rewards:
                if is_number(value) and not is_number(value, self._reward_bound):
                    raise InvalidInput("reward", reward_problem(value, self._reward_bound))
            agent.reward = rewards[0] if len(rewards) == 1 else list(rewards)
            made = agent.experiences(agent.rollout)
        except Exception as error:
            agent.session.fail(error)
            if isinstance(error, InvalidInput | Conflict):
                raise
            raise Conflict(f"the session has failed: {error}") from error
        agent.metrics = dict(metrics or {})
        offer.ended.set_result(None)
        sampled = sum(int(experience.metrics["response_tokens"]) for experience in made)
        return Closed(len(made), sampled, sum(int(np.count_nonzero(e.action_mask)) for e in made))

    def abandon(self, key: str, reason: str) -> None:
        """End a session without a reward. Raises as `close` does."""
        offer = self._of(key)
        why = sendable(reason[:_LONGEST_REASON]) or "it gave no reason"
        offer.agent.session.fail(SessionFailed(f"its agent abandoned the session: {why}"))
        offer.agent.session.close()

    def _of(self, key: str) -> Offer:
        session, closed = self._sessions.find(key)
        if session is not None and session.failure is not None:
            raise Conflict(f"the session has failed: {session.failure}")
        offer = self._open.get(session.name) if session is not None else None
        if closed or (offer is not None and offer.ended.done()):
            raise Conflict("the session is closed")
        if offer is None:
            raise Unauthenticated("key: is not of a session that was opened here")
        return offer
