"""Chooses an episode's provider: the provider with the fewest open episodes among those without recent failures.

A name that was served before, or that the YAML declares, is away while none of its providers can be reached.
`until_served` waits for the end of that state, without limit.

Failures are recorded by provider and name, so a broken environment does not affect others of its provider. A provider
is avoided for one second after a failure, twice as long after each further failure in a row, and at most for a minute.
The only provider of a name is never avoided.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import grpc.aio
import structlog

from trinity.explorer.environments.slots import EpisodeSlots
from trinity.explorer.environments.types import EnvironmentCause, EnvironmentFailed, failure_of
from trinity.explorer.environments.wire import DESCRIBE, stub_of
from trinity.runtime import metrics, rpc
from trinity.sdk.contract import PROTOCOL_VERSION, description_problem
from trinity.sdk.environment import Description
from trinity.sdk.wire import description_of

log = structlog.get_logger(__name__)

FAILURES = metrics.Counter(
    "trinity_explorer_environment_failures_total", "Episodes and scorings that failed", ["environment", "cause"]
)
_FIRST_AVOIDED_SECONDS, _MAX_AVOIDED_SECONDS = 1.0, 60.0
AWAY = metrics.Gauge("trinity_explorer_environment_away", "1 while no provider of it can be reached", ["environment"])
_DESCRIBE_SECONDS = 10.0
# A call waits this long for an absent provider before its task is put aside.
_AWAY_SECONDS = 5.0
_POLL_SECONDS = 1.0
_DESCRIBED_FOR_SECONDS = 60.0
_MAX_STEP_SECONDS = 3600.0
# Added to announced time limits, for the network and the provider's report of a time-out.
_GRACE_SECONDS = 5.0


@dataclass
class _FailureRecord:
    """Failures in a row under one name."""

    failures: int = 0
    avoided_until: float = 0.0


class Backoff:
    """Waits between calls: up to a limit for an unknown name, a few seconds for an absent provider, and without limit
    for a full one."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._pause = 0.05
        self.reset_deadline()

    def reset_deadline(self) -> None:
        """Restart the limit, because a provider answered."""
        self._begin = time.monotonic()

    async def wait_or_raise(self, failure: EnvironmentFailed) -> None:
        """Wait before another try. Raises the failure if there may be none."""
        if failure.cause is EnvironmentCause.FULL:
            self.reset_deadline()
        else:
            away = failure.cause is EnvironmentCause.AWAY and not failure.begun
            limit = min(self._seconds, _AWAY_SECONDS) if away else self._seconds
            if not failure.passing or time.monotonic() + self._pause > self._begin + limit:
                raise failure
        if self._pause == 0.05:
            log.info("environment.waiting", reason=str(failure))
        await asyncio.sleep(self._pause * random.uniform(0.5, 1.5))
        self._pause = min(2 * self._pause, 2.0)


class Provider:
    """The provider at one address."""

    def __init__(self, address: str, known: set[str], identity: rpc.Shown = "own") -> None:
        """`known`: names that any provider served, shared by all providers. `identity`: shown to this provider."""
        self.address = address
        self._known = known
        self._channel = rpc.channel(address, identity=identity)
        self.stub = stub_of(self._channel)
        self.open: Counter[str] = Counter()
        self._records: dict[str, _FailureRecord] = {}
        self._described: dict[str, Description] = {}
        self._unsound: dict[str, str] = {}  # why, by name
        self._scorers: frozenset[str] = frozenset()
        self._described_at = -_DESCRIBED_FOR_SECONDS

    async def close(self) -> None:
        await self._channel.close()

    def avoided_until(self, name: str) -> float:
        """The monotonic time until which other providers are preferred."""
        return self._records[name].avoided_until if name in self._records else 0.0

    @contextlib.contextmanager
    def busy(self, name: str) -> Iterator[None]:
        """Count an open episode or scoring while the body runs."""
        self.open[name] += 1
        try:
            yield
        finally:
            self.open[name] -= 1

    def record_failure(self, name: str, failure: EnvironmentFailed) -> None:
        """Record a failure. The refusal of a task does not count against the provider."""
        full = failure.cause is EnvironmentCause.FULL
        if not full:
            FAILURES.labels(name, failure.cause).inc()
        self._described_at = -_DESCRIBED_FOR_SECONDS
        if failure.cause is EnvironmentCause.REFUSED and not failure.passing:
            return
        record = self._records.setdefault(name, _FailureRecord())
        record.failures += 1
        seconds = min(_MAX_AVOIDED_SECONDS, _FIRST_AVOIDED_SECONDS * 2 ** min(record.failures - 1, 10))
        if full or failure.cause is EnvironmentCause.REFUSED:  # there is room again soon, or the name is served
            record.failures, seconds = 0, _FIRST_AVOIDED_SECONDS
        record.avoided_until = time.monotonic() + seconds

    def record_success(self, name: str) -> None:
        """Record that an episode or a scoring succeeded."""
        self._records.pop(name, None)

    @property
    def slots(self) -> dict[str, int]:
        """Number of slots by name, if known; 0 for no limit."""
        return {name: one.max_parallel_episodes for name, one in self._described.items()}

    def has_room(self, name: str) -> bool:
        """True unless this process knows that all slots are in use."""
        slots = self.slots.get(name, 0)
        return not slots or self.open[name] < slots

    async def description(self, name: str) -> Description:
        """The announced description of an environment, with time limits that include the network. Raises
        EnvironmentFailed if the name is unknown."""
        if name not in self._described or time.monotonic() > self._described_at + _DESCRIBED_FOR_SECONDS:
            await self._describe(name)
        if name not in self._described:
            raise self._missing(name)
        return self._described[name]

    async def serves(self, name: str) -> bool:
        """True if the provider answers and offers an environment or a scorer of this name."""
        try:
            await self._describe(name)
        except EnvironmentFailed:
            return False
        return name in self._described or name in self._unsound or name in self._scorers

    async def failure(self, name: str, error: grpc.aio.AioRpcError) -> EnvironmentFailed:
        """The failure of a call's status. A known name that the provider serves no longer is AWAY."""
        if error.code() is grpc.StatusCode.NOT_FOUND and name in self._known and not await self.serves(name):
            return self._away(name, str(error.details()))
        return failure_of(self.address, name, error)

    def _missing(self, name: str) -> EnvironmentFailed:
        if name in self._unsound:
            message = f"{self.address}: its description of {name!r} breaks the contract: {self._unsound[name]}"
            return EnvironmentFailed(message, EnvironmentCause.REFUSED)
        known = ", ".join(sorted(self._described)) or "none"
        message = f"{self.address}: no environment is named {name!r}; known: {known}"
        if name in self._known:
            return self._away(name, message)
        return EnvironmentFailed(message, EnvironmentCause.REFUSED, passing=True)

    def _away(self, name: str, reason: str) -> EnvironmentFailed:
        return EnvironmentFailed(reason, EnvironmentCause.AWAY, passing=True, environment=name, begun=False)

    async def _describe(self, name: str) -> None:
        try:
            answer = await self.stub.Describe(DESCRIBE, timeout=_DESCRIBE_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise self._away(name, f"{self.address}: {error.code().name}: {error.details()}") from None
            raise failure_of(self.address, name, error) from None
        if answer.protocol_version != PROTOCOL_VERSION:
            message = (
                f"{self.address}: speaks version {answer.protocol_version} of the contract, not {PROTOCOL_VERSION}"
            )
            raise EnvironmentFailed(message, EnvironmentCause.REFUSED)
        offered = [description_of(one) for one in answer.environments]
        self._unsound = {one.name: problem for one in offered if (problem := description_problem(one))}
        self._described = {one.name: _with_grace(one) for one in offered if one.name not in self._unsound}
        self._scorers = frozenset(answer.scorers)
        self._known.update(self._described, self._scorers)
        for attached in answer.providers:  # providers that went away too
            self._known.update(attached.environments, attached.scorers)
        self._described_at = time.monotonic()


def _with_grace(one: Description) -> Description:
    step = min(one.step_timeout_seconds, _MAX_STEP_SECONDS) + _GRACE_SECONDS
    reset = min(one.reset_timeout_seconds, _MAX_STEP_SECONDS) + _GRACE_SECONDS
    return replace(one, step_timeout_seconds=step, reset_timeout_seconds=reset)


class Providers:
    """All providers of the run."""

    def __init__(self, address: str, addressed: Sequence[tuple[str, str]] = (), declared: Iterable[str] = ()) -> None:
        """`addressed`: names and addresses of the YAML. These providers do not belong to the run, so they see no
        identity. `declared`: names of environments and scorers that will attach."""
        self._known = {name for name, _ in addressed} | set(declared)
        self._waits: dict[str, asyncio.Task[None]] = {}
        self._by_address: dict[str, Provider] = {}
        self._default = self._at(address)
        self._by_name: dict[str, list[Provider]] = {}
        self._slots: dict[str, EpisodeSlots] = {}
        for name, provider_address in addressed:
            self._by_name.setdefault(name, []).append(self._at(provider_address, None))
        for name in self._by_name.keys() & set(declared):  # others may attach beside those with an address
            self._by_name[name].append(self._default)

    def _at(self, address: str, identity: rpc.Shown = "own") -> Provider:
        if address not in self._by_address:
            self._by_address[address] = Provider(address, self._known, identity)
        return self._by_address[address]

    async def close(self) -> None:
        for wait in self._waits.values():
            wait.cancel()
        for provider in self._by_address.values():
            await provider.close()

    async def acquire_slot(self, name: str) -> tuple[EpisodeSlots, bool]:
        """Wait for a slot, which the caller releases. Returns also if it had to wait. Raises EnvironmentFailed."""
        provider = self.choose(name)
        try:
            await provider.description(name)
        except EnvironmentFailed as failure:
            provider.record_failure(name, failure)
            raise
        known = [one.slots[name] for one in self._candidates(name) if name in one.slots]
        slots = self._slots.setdefault(name, EpisodeSlots(name))
        return slots, await slots.acquire(sum(known) if all(known) else 0)

    def is_awaited(self, name: str) -> bool:
        """True while `until_served` waits for this name."""
        return name in self._waits

    async def until_served(self, name: str, reason: str) -> None:
        """Wait until a provider offers the name. All waiters of a name share one loop."""
        if name not in self._waits:
            self._waits[name] = asyncio.create_task(self._poll(name, reason))
            self._waits[name].add_done_callback(lambda _: self._waits.pop(name, None))
        await asyncio.shield(self._waits[name])

    async def _poll(self, name: str, reason: str) -> None:
        begin = time.monotonic()
        log.warning("environment.away", environment=name, reason=reason)
        with AWAY.labels(name).track_inprogress():
            while not any([await one.serves(name) for one in self._candidates(name)]):
                await asyncio.sleep(_POLL_SECONDS * random.uniform(0.5, 1.5))
        log.info("environment.back", environment=name, seconds=round(time.monotonic() - begin, 1))

    def _candidates(self, name: str) -> list[Provider]:
        return self._by_name.get(name, [self._default])

    def choose(self, name: str) -> Provider:
        """The least busy provider with room among those not avoided, or the one avoided for the shortest time."""
        candidates, now = self._candidates(name), time.monotonic()
        fit = [one for one in candidates if one.avoided_until(name) <= now]
        if not fit:
            return min(candidates, key=lambda one: one.avoided_until(name))
        return min(fit, key=lambda one: (not one.has_room(name), one.open[name], random.random()))
