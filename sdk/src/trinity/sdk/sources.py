"""Sources of an environment's players, with its limit of episodes."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

from trinity.sdk.contract import description_problem
from trinity.sdk.environment import AsyncEnvironment, Description, Environment, EnvironmentClass
from trinity.sdk.errors import Full
from trinity.sdk.players import LoopPlayer, Player, Release, ThreadPlayer
from trinity.sdk.workers import WORKER_START_SECONDS, Workers

# Default limit of an environment's threads.
MAX_THREADS = 256


class Source(Protocol):
    """One environment by name."""

    open: int

    @property
    def description(self) -> Description:
        """The announcement."""

    def player(self) -> Player:
        """Returns a player in a new slot. Raises Full."""

    async def close(self) -> None:
        """Releases resources that outlive episodes. No episode follows."""


class ClassSource:
    """An environment class of this process."""

    def __init__(self, kind: EnvironmentClass) -> None:
        _check(kind)
        self.open = 0
        self._make: Callable[[Release], Player]
        self._workers: Workers | None = None
        description = kind.description
        limit = description.max_parallel_episodes
        if kind.isolation == "none":
            self._make = partial(LoopPlayer, kind)
        elif kind.isolation == "thread":
            limit = limit or MAX_THREADS
            self._make = partial(ThreadPlayer, kind)
        else:
            processes = kind.processes or os.cpu_count() or 1
            slots = processes * kind.episodes_per_process
            limit = min(limit or slots, slots)
            start = max(description.reset_timeout_seconds, description.step_timeout_seconds) + WORKER_START_SECONDS
            # Where episodes share a worker, a call may wait for another episode's call.
            wait = start if kind.episodes_per_process > 1 else 0.0
            self._workers = Workers(kind, processes, wait)
            self._make = self._workers.player
            step = description.step_timeout_seconds + wait
            description = replace(description, reset_timeout_seconds=start + wait, step_timeout_seconds=step)
        self._description = replace(description, max_parallel_episodes=limit)

    @property
    def description(self) -> Description:
        return self._description

    def player(self) -> Player:
        limit = self.description.max_parallel_episodes
        if limit and self.open >= limit:
            raise Full(f"{self.description.name} plays {self.open} episodes, its limit; try again later")
        self.open += 1
        try:
            return self._make(self._release)
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        self.open -= 1

    async def close(self) -> None:
        if self._workers is not None:
            await self._workers.close()


def _has(kind: EnvironmentClass, method: str) -> bool:
    return not any(getattr(kind, method) is getattr(base, method) for base in (Environment, AsyncEnvironment))


def _check(kind: EnvironmentClass) -> None:
    """Raises TypeError for a class that cannot be played."""
    name = getattr(kind, "__name__", repr(kind))
    if not (isinstance(kind, type) and issubclass(kind, (Environment, AsyncEnvironment))):
        raise TypeError(f"{name} must be a subclass of Environment or AsyncEnvironment")
    if problem := description_problem(kind.description):
        raise TypeError(f"{name}.description.{problem}")
    if kind.description.snapshots and not all(_has(kind, method) for method in ("snapshot", "restore")):
        raise TypeError(f"{name} says snapshots and must have the methods snapshot and restore")
    if kind.isolation not in ("none", "thread", "process"):
        raise TypeError(f"{name}.isolation is {kind.isolation!r}, must be 'none', 'thread' or 'process'")
    if issubclass(kind, AsyncEnvironment) and kind.isolation == "thread":
        raise TypeError(f"{name}.isolation is 'thread', but coroutines run in an event loop: 'none' or 'process'")
    if kind.isolation == "process" and "<locals>" in kind.__qualname__:
        raise TypeError(f"{name} is defined inside a function, so no worker process can import it: move it out")
    if kind.memory_limit_mib is not None and kind.isolation != "process":
        raise TypeError(f"{name}.memory_limit_mib needs isolation = 'process'")
