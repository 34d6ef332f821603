"""All episodes of a process. Each has a slot, time limits and checks, and is closed exactly once."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType

import grpc

from trinity.sdk import contract
from trinity.sdk.contract import Action, Answer, Reset, Score, ScoreRequest
from trinity.sdk.environment import EnvironmentClass
from trinity.sdk.errors import Conflict, ContractViolation, Failed, Full, InvalidInput, NotFound, Unavailable, status_of
from trinity.sdk.players import Message, Player
from trinity.sdk.scoring import Scorer, Scoring
from trinity.sdk.sources import ClassSource, Source

log = logging.getLogger(__name__)

AsyncScorer = Callable[[ScoreRequest], Awaitable[Sequence[Score]]]


class Arena:
    """Environments and scorers by name. `sources` and `scorers` may change while episodes run."""

    def __init__(
        self,
        environments: Iterable[EnvironmentClass] = (),
        scorers: Mapping[str, Scorer] | None = None,
        scoring_threads: int = 16,
        most_episodes: int = 0,
    ) -> None:
        self._most_episodes = most_episodes  # of all environments together; 0: no limit
        self.sources: dict[str, Source] = {}
        for kind in environments:
            source = ClassSource(kind)
            name = source.description.name
            if name in self.sources:
                raise ValueError(f"two environments are named {name!r}")
            self.sources[name] = source
        self.scorers: dict[str, AsyncScorer] = {}
        self._pools: dict[str, ThreadPoolExecutor] = {}
        for name, scorer in (scorers or {}).items():
            # A pool for each, so that a scorer that hangs takes no threads from others.
            self._pools[name] = ThreadPoolExecutor(scoring_threads, thread_name_prefix=f"score-{name}")
            self.scorers[name] = partial(self._score, scorer, self._pools[name])
        self.episodes = 0
        self._closing: set[asyncio.Task[None]] = set()
        self._threads_of_a_call = max(1, scoring_threads // 2)  # no single call gets all of them
        self._draining = False

    def enter(self, name: str) -> "Episode":
        """Opens an episode. Raises NotFound, or Full if the environment's limit is reached."""
        if self._draining:
            raise Unavailable("this environment service is shutting down")
        source = self.sources.get(name)
        if source is None:
            known = ", ".join(sorted(self.sources))
            raise NotFound(f"reset.environment: no environment is named {name[:200]!r}; known: {known}")
        if self._most_episodes and self.episodes >= self._most_episodes:
            raise Full(f"{self.episodes} episodes are open, the most of this service; try again later")
        return Episode(self, source)

    async def score(self, request: ScoreRequest) -> Sequence[Score]:
        """Raises NotFound, InvalidInput."""
        scorer = self.scorers.get(request.scorer)
        if scorer is None:
            known = ", ".join(sorted(self.scorers))
            raise NotFound(f"scorer: none is named {request.scorer[:200]!r}; known: {known}")
        return await scorer(request)

    async def _score(self, scorer: Scorer, pool: ThreadPoolExecutor, request: ScoreRequest) -> Sequence[Score]:
        scoring = Scoring(scorer, request)
        jobs = [pool.submit(scoring.work) for _ in request.items[: self._threads_of_a_call]]
        waits = [asyncio.wrap_future(job) for job in jobs]
        try:
            if waits:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)  # no item waits
            begun = [wait for job, wait in zip(jobs, waits, strict=True) if not job.cancel()]
            await asyncio.gather(*begun)
        finally:
            scoring.stop()
        return scoring.scores

    def closing(self, player: Player, name: str) -> "asyncio.Task[None]":
        """Closes a player in a task that a cancelled caller does not cancel."""
        task = asyncio.create_task(_close(player, name))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    @property
    def open(self) -> int:
        """Returns the slots in use, by open episodes or by episodes that are still being released."""
        return sum(source.open for source in self.sources.values())

    async def drain(self, grace_seconds: float) -> None:
        """Refuses new episodes and waits `grace_seconds` for open ones."""
        self._draining = True
        deadline = asyncio.get_running_loop().time() + grace_seconds
        while (self.episodes or self._closing) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        for source in list(self.sources.values()):
            await source.close()
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


async def _close(player: Player, name: str) -> None:
    try:
        await player.close()
    except (Exception, SystemExit, asyncio.CancelledError):
        log.exception("close of %s failed", name)


class Episode:
    """One episode: reset -> step ... -> closed. Use as `async with`."""

    def __init__(self, arena: Arena, source: Source) -> None:
        self._arena = arena
        self._description = source.description
        self._player: Player | None = source.player()
        self._turn = -1
        self._done = False
        arena.episodes += 1

    async def __aenter__(self) -> "Episode":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        player, self._player = self._player, None
        if player is None:
            return
        self._arena.episodes -= 1
        await asyncio.shield(self._arena.closing(player, self._description.name))

    async def reset(self, reset: Reset) -> Answer:
        if self._turn >= 0:
            raise InvalidInput("reset", "came twice; an episode is reset once")
        if reset.turn < 0 or (reset.turn and not reset.state):
            raise InvalidInput("reset.turn", f"is {reset.turn}, must be that of reset.state, or 0 without one")
        if (reset.state or reset.keep_states) and not self._description.snapshots:
            field = "state" if reset.state else "keep_states"
            raise InvalidInput(f"reset.{field}", f"was sent, and {self._description.name} announces no snapshots")
        if self._description.images and not reset.images:
            raise InvalidInput("reset.images", f"is false, and {self._description.name} shows images")
        if len(reset.state) > contract.MAX_STATE_BYTES:
            raise InvalidInput("reset.state", f"has {len(reset.state)} bytes, at most {contract.MAX_STATE_BYTES}")
        self._turn = reset.turn
        return await self._play(reset, self._description.reset_timeout_seconds)

    async def step(self, action: Action) -> Answer:
        if self._turn < 0:
            raise InvalidInput("action", "came before reset")
        if self._done:
            raise Conflict("action: the episode is done; open a new one")
        self._turn += 1
        if action.turn != self._turn:
            raise InvalidInput("action.turn", f"is {action.turn}, must be {self._turn}")
        if contract.too_long(action.text):
            raise InvalidInput("action.text", f"is longer than {contract.MAX_TEXT_BYTES} bytes")
        return await self._play(action, self._description.step_timeout_seconds)

    async def _play(self, message: Message, seconds: float) -> Answer:
        assert self._player is not None
        name = self._description.name
        try:
            answer = await self._player.play(message, seconds)
        except InvalidInput:
            self._done = True
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the caller is gone
            self._done = True
            if not isinstance(getattr(error, "code", None), grpc.StatusCode):
                log.exception("%s failed", name)
            code, text = status_of(error)
            raise Failed(code, f"{name}: {text}") from None
        # Answers of attached providers were validated completely when they arrived.
        problem = contract.answer_problem(answer, self._turn, self._description, own=True)
        if problem:
            self._done = True
            raise ContractViolation(f"{name}: {problem}")
        self._done = answer.done
        return answer
