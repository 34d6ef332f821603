"""Episodes: environment objects played in worker threads, each closed exactly once whatever happens."""

import asyncio
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import structlog

from trinity.environment.environment import Environment, Observation
from trinity.runtime.errors import Conflict, Full, InvalidInput, NotFound, TimedOut, TrinityError, Unavailable

log = structlog.get_logger(__name__)

T = TypeVar("T")
MAX_ACTION_BYTES = 1024 * 1024


class EnvironmentFailed(TrinityError):
    """The environment's own code raised, or answered nonsense. Hurts its own episode alone."""


class Arena:
    """All episodes of this process."""

    def __init__(self, environments: dict[str, type[Environment]], threads: int) -> None:
        self.environments = environments
        self.open: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="episode")
        self._draining = False

    def enter(self, name: str) -> "Episode":
        """A fresh episode. NotFound, or Full if the environment's limit is reached."""
        if self._draining:
            raise Unavailable("this environment service is shutting down")
        if name not in self.environments:
            known = ", ".join(sorted(self.environments))
            raise NotFound(f"reset.environment: no environment is named {name!r}; known: {known}")
        description = self.environments[name].description
        if description.max_parallel_episodes and self.open[name] >= description.max_parallel_episodes:
            raise Full(f"{name} plays {self.open[name]} episodes, its limit; try again later")
        self.open[name] += 1
        return Episode(self, name)

    async def call(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    async def drain(self, grace_seconds: float) -> None:
        self._draining = True
        deadline = asyncio.get_running_loop().time() + grace_seconds
        while sum(self.open.values()) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        self._pool.shutdown(wait=False, cancel_futures=True)


class Episode:
    """One episode: reset -> step ... -> close. Use as `async with`."""

    def __init__(self, arena: Arena, name: str) -> None:
        self._arena = arena
        self._name = name
        self._environment: Environment | None = None
        self._done = False

    async def __aenter__(self) -> "Episode":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._arena.open[self._name] -= 1
        self._arena.finished[self._name] += 1
        if self._environment is not None:
            try:
                await asyncio.shield(self._arena.call(self._environment.close))
            except Exception:
                log.exception("episode.close.failed", environment=self._name)

    async def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        if self._environment is not None:
            raise InvalidInput("reset", "came twice; an episode is reset once")
        self._environment = self._arena.environments[self._name]()
        return await self._play(self._environment.reset, task, args, seed)

    async def step(self, action: str) -> Observation:
        if self._environment is None:
            raise InvalidInput("action", "came before reset")
        if self._done:
            raise Conflict("action: the episode is done; open a new one")
        if len(action.encode()) > MAX_ACTION_BYTES:
            raise InvalidInput("action.text", f"is longer than {MAX_ACTION_BYTES} bytes")
        return await self._play(self._environment.step, action)

    async def _play(self, method: Any, *args: Any) -> Observation:
        limit = self._arena.environments[self._name].description.step_timeout_seconds
        try:
            observation: Observation = await asyncio.wait_for(self._arena.call(method, *args), limit)
        except TimeoutError:
            raise TimedOut(f"{self._name} took longer than {limit:g} s for one {method.__name__}") from None
        except TrinityError:
            raise
        except Exception as error:
            log.exception("episode.environment.failed", environment=self._name)
            raise EnvironmentFailed(f"{self._name}.{method.__name__}: {type(error).__name__}: {error}") from None
        if not math.isfinite(observation.reward):
            raise EnvironmentFailed(f"{self._name} gave the reward {observation.reward}; rewards are finite")
        self._done = observation.done
        return observation
