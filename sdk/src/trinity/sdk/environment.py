"""The interface of an environment: `reset`, `step`, `close`.

One object plays one episode: made without arguments -> reset once -> step until done -> closed. Calls come one at a
time. `isolation` says where they run:

- "none": in the event loop of the provider. For methods that take microseconds; nothing can stop one that hangs.
- "thread": every episode has a thread of its own. For methods that block; one that hangs fails its episode at the time
  limit and keeps its thread and its slot among max_parallel_episodes until it returns.
- "process": worker processes play `episodes_per_process` episodes each, in one thread. One that is over the time limit
  or over `memory_limit_mib` is killed with its episodes, and another one is started for the next.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

Isolation = Literal["none", "thread", "process"]


@dataclass(frozen=True)
class Observation:
    """What the policy sees, and the reward of its last action. `metrics` measure the episode so far.

    `images`: files, each a PNG, JPEG or WebP, at the text's `<image>` where it has as many of these, else before it. At
    most 16 with 4 MiB and 16,777,216 pixels together, 32 MiB in an episode; the description says `images`.
    """

    text: str
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    images: Sequence[bytes] = ()


@dataclass(frozen=True)
class Description:
    """What a provider announces. `max_parallel_episodes` 0: as many as the isolation allows; "none": no limit.

    `deterministic`: the same row, arguments, seed and actions give the same episode, and a step changes nothing
    outside it. Then an episode that is interrupted continues at its last turn. `snapshots`: so it does, because the
    class has `snapshot` and `restore`. `images`: observations may have images; models that read none do not play it.
    """

    name: str
    summary: str = ""
    max_parallel_episodes: int = 0
    step_timeout_seconds: float = 10.0
    reset_timeout_seconds: float = 30.0
    deterministic: bool = False
    snapshots: bool = False
    images: bool = False


class _Declared:
    """What both kinds of environment declare."""

    description: ClassVar[Description]
    isolation: ClassVar[Isolation]
    # With isolation "process": worker processes at most (None: one per CPU), and what each may hold.
    processes: ClassVar[int | None] = None
    episodes_per_process: ClassVar[int] = 1
    memory_limit_mib: ClassVar[int | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not hasattr(cls, "description") and cls.__module__ != __name__:
            name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
            summary = (cls.__doc__ or "").strip().partition("\n")[0]
            cls.description = Description(name, summary)


class Environment(_Declared, ABC):
    """One episode, played by methods that may block."""

    isolation: ClassVar[Isolation] = "thread"

    @abstractmethod
    def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        """Begin the episode of a task (a dataset row). Raises InvalidInput naming what the row lacks."""

    @abstractmethod
    def step(self, action: str) -> Observation:
        """Answer the policy's reply."""

    def snapshot(self) -> bytes:
        """All that later answers follow from, its random numbers included; at most 1 MiB. b"": there is none here.

        Called after `reset` and after each `step`, in their time, where the description says `snapshots`.
        """
        raise NotImplementedError

    def restore(self, state: bytes) -> None:
        """Go on from a state, on an object that was not reset, perhaps in another process or on another machine.

        What is raised refuses the state; the episode then begins again. It came over the network: never unpickle it.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release what the episode holds. Called exactly once, also after an error or when the client went away."""


class AsyncEnvironment(_Declared, ABC):
    """One episode, played by coroutines in the event loop; with isolation "process", in that of a worker process."""

    isolation: ClassVar[Isolation] = "none"

    @abstractmethod
    async def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        """Begin the episode of a task (a dataset row). Raises InvalidInput naming what the row lacks."""

    @abstractmethod
    async def step(self, action: str) -> Observation:
        """Answer the policy's reply."""

    async def snapshot(self) -> bytes:
        """As that of Environment."""
        raise NotImplementedError

    async def restore(self, state: bytes) -> None:
        """As that of Environment."""
        raise NotImplementedError

    async def close(self) -> None:
        """Release what the episode holds. Called exactly once, also after an error or when the client went away."""


EnvironmentClass = type[Environment] | type[AsyncEnvironment]
