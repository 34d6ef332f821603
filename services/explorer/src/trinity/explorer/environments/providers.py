"""Chooses the provider of an episode: the one with the fewest open episodes that did not fail lately.

Failures are recorded by provider and name, so a broken environment does not affect others of its provider. A provider
is avoided for one second after a failure, twice as long after each further one in a row, and at most a minute. The only
provider of a name is asked anyway.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grpc.aio
import structlog

from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.explorer.environments.failures import EnvironmentCause, EnvironmentFailed, failure_of
from trinity.explorer.environments.slots import EpisodeSlots
from trinity.runtime import metrics, rpc
from trinity.sdk.contract import PROTOCOL_VERSION, description_problem

log = structlog.get_logger(__name__)

FAILURES = metrics.Counter(
    "trinity_explorer_environment_failures_total", "Episodes and scorings that failed", ["environment", "cause"]
)
_FIRST_AVOIDED_SECONDS, _MAX_AVOIDED_SECONDS = 1.0, 60.0
_DESCRIBE_SECONDS = 10.0
_DESCRIBED_FOR_SECONDS = 60.0
_MAX_STEP_SECONDS = 3600.0
# Added to the announced time: the network, and the provider's own report of a time-out.
_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Limits:
    """Seconds until an answer must be here. `slots`: how many episodes may be open at a time; 0: no limit."""

    reset: float
    step: float
    slots: int = 0


@dataclass
class _FailureRecord:
    """Failures in a row under one name."""

    failures: int = 0
    avoided_until: float = 0.0


class Backoff:
    """Waits between attempts: at an unavailable provider up to a limit, at a full one as long as it takes."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._pause = 0.05
        self.reset_deadline()

    def reset_deadline(self) -> None:
        """A provider answered: the limit counts from now."""
        self._deadline = time.monotonic() + self._seconds

    async def wait_or_raise(self, failure: EnvironmentFailed) -> None:
        """Returns if it may be tried again; raises the failure if not."""
        if failure.cause is EnvironmentCause.FULL:
            self.reset_deadline()
        elif not failure.passing or time.monotonic() + self._pause > self._deadline:
            raise failure
        if self._pause == 0.05:
            log.info("environment.waiting", reason=str(failure))
        await asyncio.sleep(self._pause * random.uniform(0.5, 1.5))
        self._pause = min(2 * self._pause, 2.0)


class Provider:
    """One address."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = rpc.channel(address)
        self.stub = environment_pb2_grpc.EnvironmentServiceStub(self._channel)
        self.open: Counter[str] = Counter()
        self._records: dict[str, _FailureRecord] = {}
        self._described: dict[str, Limits] = {}
        self._described_at = -_DESCRIBED_FOR_SECONDS

    async def close(self) -> None:
        await self._channel.close()

    def avoided_until(self, name: str) -> float:
        """Monotonic time until which other providers are preferred."""
        return self._records[name].avoided_until if name in self._records else 0.0

    @contextlib.contextmanager
    def busy(self, name: str) -> Iterator[None]:
        """Count as open while the body runs."""
        self.open[name] += 1
        try:
            yield
        finally:
            self.open[name] -= 1

    def record_failure(self, name: str, failure: EnvironmentFailed) -> None:
        """Record a failure. A refusal of one task does not count against the provider."""
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
        """By name, as far as it is known; 0: no limit."""
        return {name: limits.slots for name, limits in self._described.items()}

    def has_room(self, name: str) -> bool:
        """Whether a slot is free, as far as this process knows."""
        slots = self.slots.get(name, 0)
        return not slots or self.open[name] < slots

    async def limits(self, name: str) -> Limits:
        """The limits announced for an environment. Raises EnvironmentFailed if it is unknown."""
        if name not in self._described or time.monotonic() > self._described_at + _DESCRIBED_FOR_SECONDS:
            await self._describe(name)
        if name not in self._described:
            known = ", ".join(sorted(self._described)) or "none"
            message = f"{self.address}: no environment is named {name!r}; known: {known}"
            raise EnvironmentFailed(message, EnvironmentCause.REFUSED, passing=True)
        return self._described[name]

    async def _describe(self, name: str) -> None:
        try:
            answer = await self.stub.Describe(pb.DescribeRequest(), timeout=_DESCRIBE_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise failure_of(self.address, name, error) from None
        if answer.protocol_version != PROTOCOL_VERSION:
            message = (
                f"{self.address}: speaks version {answer.protocol_version} of the contract, not {PROTOCOL_VERSION}"
            )
            raise EnvironmentFailed(message, EnvironmentCause.REFUSED)
        self._described = {one.name: _limits(one) for one in answer.environments if not description_problem(one)}
        self._described_at = time.monotonic()


def _limits(described: pb.EnvironmentDescription) -> Limits:
    step = min(described.step_timeout_seconds, _MAX_STEP_SECONDS) + _GRACE_SECONDS
    reset = min(described.reset_timeout_seconds, _MAX_STEP_SECONDS) + _GRACE_SECONDS
    reset = max(reset, step) if described.reset_timeout_seconds == 0 else reset
    return Limits(reset, step, described.max_parallel_episodes)


class Providers:
    """All of them."""

    def __init__(self, address: str, addressed: Sequence[tuple[str, str]] = ()) -> None:
        self._by_address: dict[str, Provider] = {}
        self._default = self._at(address)
        self._by_name: dict[str, list[Provider]] = {}
        self._slots: dict[str, EpisodeSlots] = {}
        for name, provider_address in addressed:
            self._by_name.setdefault(name, []).append(self._at(provider_address))

    def _at(self, address: str) -> Provider:
        if address not in self._by_address:
            self._by_address[address] = Provider(address)
        return self._by_address[address]

    async def close(self) -> None:
        for provider in self._by_address.values():
            await provider.close()

    async def acquire_slot(self, name: str) -> tuple[EpisodeSlots, bool]:
        """Wait for a slot, to be released, and whether it was not free at once. Raises EnvironmentFailed."""
        provider = self.choose(name)
        try:
            await provider.limits(name)
        except EnvironmentFailed as failure:
            provider.record_failure(name, failure)
            raise
        known = [one.slots[name] for one in self._candidates(name) if name in one.slots]
        slots = self._slots.setdefault(name, EpisodeSlots(name))
        return slots, await slots.acquire(sum(known) if all(known) else 0)

    def _candidates(self, name: str) -> list[Provider]:
        return self._by_name.get(name, [self._default])

    def choose(self, name: str) -> Provider:
        """The least busy provider with room among those not avoided; else the one avoided for the shortest time."""
        candidates, now = self._candidates(name), time.monotonic()
        fit = [one for one in candidates if one.avoided_until(name) <= now]
        if not fit:
            return min(candidates, key=lambda one: one.avoided_until(name))
        return min(fit, key=lambda one: (not one.has_room(name), one.open[name], random.random()))
