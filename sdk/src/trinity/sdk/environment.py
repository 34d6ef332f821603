"""The interface of an environment: `reset`, `step`, `close`.

One object plays one episode: made without arguments -> reset once -> step until done -> closed. Calls come one at a
time. `isolation` chooses where they run:

- "none": in the event loop of the provider. For methods that take microseconds; nothing can stop a method that hangs.
- "thread": each episode in its own thread. For methods that block. A method that hangs fails its episode at the time
  limit and keeps its thread and its slot among max_parallel_episodes until it returns.
- "process": in worker processes that play `episodes_per_process` episodes each, in one thread. A worker over the time
  limit or over `memory_limit_mib` is killed with its episodes, and the next episode starts another.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

Isolation = Literal["none", "thread", "process"]


@dataclass(frozen=True)
class Observation:
    """The policy's input, and the reward of its last action. `metrics` measure the episode so far.

    `images` are PNG, JPEG or WebP files. They stand at the text's `<image>` marks if it has one for each, else before
    it. At most 16 with 4 MiB and 16,777,216 pixels together, 32 MiB in an episode; the description must set `images`.

    With players, `player` acts next and sees the text (empty once done); `rewards` of the last action, by player, stand
    in place of `reward`; `metrics` are those of the player who acted.
    """

    text: str
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    images: Sequence[bytes] = ()
    player: str = ""
    rewards: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Description:
    """A provider's announcement. `max_parallel_episodes` 0: as many as the isolation allows; "none": no limit.

    `deterministic`: the same row, arguments, seed and actions give the same episode, and a step changes nothing
    outside it. Then an interrupted episode continues at its last turn. `snapshots`: it also does if the class has
    `snapshot` and `restore`. `images`: observations may have images; models that read none do not play it. `players`:
    names of 2 to 8 players; empty for a single one.
    """

    name: str
    summary: str = ""
    max_parallel_episodes: int = 0
    step_timeout_seconds: float = 10.0
    reset_timeout_seconds: float = 30.0
    deterministic: bool = False
    snapshots: bool = False
    images: bool = False
    players: tuple[str, ...] = ()


class _Declared:
    """Declarations of both kinds of environment."""

    description: ClassVar[Description]
    isolation: ClassVar[Isolation]
    # With isolation "process": worker processes at most (None: one per CPU), and the limits of each.
    processes: ClassVar[int | None] = None
    episodes_per_process: ClassVar[int] = 1
    memory_limit_mib: ClassVar[int | None] = None
    _has_own_name: ClassVar[bool] = True  # no base class declares a description

    @staticmethod
    def read_row(task: dict[str, Any], args: dict[str, Any]) -> None:
        """Raises InvalidInput if `reset` would refuse the row. `trinity check --deep` calls it for each row."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "description" in vars(cls):
            cls._has_own_name = False
        elif cls._has_own_name and cls.__module__ != __name__:
            name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
            summary = (cls.__doc__ or "").strip().partition("\n")[0]
            cls.description = Description(name, summary)


class Environment(_Declared, ABC):
    """One episode, played by methods that may block."""

    isolation: ClassVar[Isolation] = "thread"

    @abstractmethod
    def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        """Begins the episode of a task (a dataset row). Raises InvalidInput naming a missing field."""

    @abstractmethod
    def step(self, action: str) -> Observation:
        """Answers the policy's reply."""

    def snapshot(self) -> bytes:
        """Returns everything that determines later answers, random numbers included; at most 1 MiB. b"": no state now.

        Called after `reset` and after each `step`, within their time limits, if the description sets `snapshots`.
        """
        raise NotImplementedError

    def restore(self, state: bytes) -> None:
        """Continues from a state, on an object that was not reset, perhaps in another process or on another machine.

        Any exception refuses the state; the episode then begins again. The state came over the network: never unpickle
        it.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Releases the episode's resources. Called exactly once, also after an error or when the client went away."""


class AsyncEnvironment(_Declared, ABC):
    """One episode, played by coroutines in the event loop; with isolation "process", in that of a worker process."""

    isolation: ClassVar[Isolation] = "none"

    @abstractmethod
    async def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        """Begins the episode of a task (a dataset row). Raises InvalidInput naming a missing field."""

    @abstractmethod
    async def step(self, action: str) -> Observation:
        """Answers the policy's reply."""

    async def snapshot(self) -> bytes:
        """See Environment.snapshot."""
        raise NotImplementedError

    async def restore(self, state: bytes) -> None:
        """See Environment.restore."""
        raise NotImplementedError

    async def close(self) -> None:
        """Releases the episode's resources. Called exactly once, also after an error or when the client went away."""


EnvironmentClass = type[Environment] | type[AsyncEnvironment]
