"""One attached provider: the stream that brings its environments and scorers, and its failures so far."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
import structlog

from trinity.runtime.errors import TrinityError
from trinity.runtime.trust.attach_tokens import AttachToken
from trinity.sdk import wire
from trinity.sdk.contract import (
    Action,
    Answer,
    Call,
    Reply,
    Reset,
    Score,
    ScoreRequest,
    Totals,
    answer_problem,
    score_problem,
)
from trinity.sdk.environment import Description
from trinity.sdk.errors import ContractViolation, Failed, TimedOut
from trinity.sdk.outbox import Outbox
from trinity.sdk.peer import Peer
from trinity.sdk.players import Message, Release, too_slow

log = structlog.get_logger(__name__)

_FIRST_AVOIDED_SECONDS, _MAX_AVOIDED_SECONDS = 1.0, 60.0
# Added to the announced time, for the network.
_GRACE_SECONDS = 2.0
_SCORE_SECONDS = 60.0
# Limit of a probe. With the grace it is less than the explorers' own grace.
_PROBE_SECONDS = 2.0
# Replies without a call after which the provider's stream is closed.
_MAX_STRAYS = 100_000
# Calls that may wait to be sent, besides one for each open episode: closes of episodes, for example.
_MAX_UNSENT = 10_000
# Statuses caused by the task or the moment, not by the provider.
_BLAMELESS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,  # it still closes episodes that have ended here
}


@dataclass
class _FailureRecord:
    """Failures in a row under one name."""

    failures: int = 0
    avoided_until: float = 0.0
    since: float = field(default_factory=time.time)
    reason: str = ""


@dataclass(eq=False)
class Attachment:
    """One attached provider, from its offer until its stream ends.

    `since`: Unix time of the offer. `ended`: reason of the end. `token`: the token of the offer. `refusal`: error with
    which the service ends its stream; None if the stream is merely lost.
    """

    provider: str
    instance: str
    environments: dict[str, Description]
    scorers: frozenset[str]
    token: AttachToken
    outbox: Outbox[wire.CallMessage] = field(default_factory=Outbox)
    open: Counter[str] = field(default_factory=Counter)
    since: float = field(default_factory=time.time)
    ended: str = ""
    refusal: TrinityError | None = None
    _records: dict[str, _FailureRecord] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.peer = Peer(self._send)

    def _send(self, call: Call) -> None:
        self.outbox.put(wire.call_to_proto(call))
        unsent = len(self.outbox)
        if unsent > _MAX_UNSENT + self.peer.open:
            self.end(f"the attached provider {self.provider} does not read: {unsent} calls wait to be sent")

    def receive(self, reply: Reply) -> None:
        """Takes a reply."""
        self.peer.deliver(reply)
        if self.peer.strays > _MAX_STRAYS:
            self.end(f"the attached provider {self.provider} sent {_MAX_STRAYS} replies to calls that were not made")

    def end(self, reason: str) -> None:
        """Fails all its episodes and closes the stream. The first reason stays."""
        self.ended = self.ended or reason
        self.peer.fail(grpc.StatusCode.UNAVAILABLE, reason)
        self.outbox.close()

    @property
    def failing(self) -> tuple[float, str] | None:
        """Returns start (Unix time) and reason of its oldest failure; None if its last calls succeeded."""
        oldest = min(self._records.values(), key=lambda record: record.since, default=None)
        return (oldest.since, oldest.reason) if oldest else None

    async def answers(self) -> bool:
        """Returns True if the provider responds to a step of an unknown episode, which is a failure."""
        try:
            identity = self.peer.begin()
        except Failed:
            return False
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                await self.peer.ask(Call(identity, Action("", 1)))
        except TimeoutError:
            return False
        except (Failed, ContractViolation):
            pass
        finally:
            self.peer.end(identity)
        return not self.peer.gone

    async def slow(self, name: str, error: TimedOut) -> Failed:
        """Returns the failure of a call that timed out. Ends the attachment if the provider is frozen."""
        if await self.answers():
            self.record_failure(name, error)
            return Failed(error.code, str(error))
        self.end(f"the attached provider {self.provider} does not answer")
        return Failed(grpc.StatusCode.UNAVAILABLE, f"{error}; nor does it answer anything else")

    def has_room(self, name: str) -> bool:
        limit = self.environments[name].max_parallel_episodes
        return not limit or self.open[name] < limit

    def avoided_until(self, name: str) -> float:
        """Returns the monotonic time until which other providers are preferred."""
        return self._records[name].avoided_until if name in self._records else 0.0

    def record_success(self, name: str) -> None:
        self._records.pop(name, None)

    def record_failure(self, name: str, error: Exception) -> None:
        """Avoids the provider for a second after a first failure, twice as long after each further one in a row."""
        record = self._records.setdefault(name, _FailureRecord())
        record.failures += 1
        record.reason = str(error)[:300]
        seconds = min(_MAX_AVOIDED_SECONDS, _FIRST_AVOIDED_SECONDS * 2 ** min(record.failures - 1, 10))
        record.avoided_until = time.monotonic() + seconds
        log.warning(
            "environment.provider.avoided",
            provider=self.provider,
            environment=name,
            seconds=seconds,
            reason=record.reason,
        )

    async def score(self, request: ScoreRequest) -> Sequence[Score]:
        """Returns scores that keep the contract. Raises Failed, TimedOut, ContractViolation."""
        identity = self.peer.begin()
        self.open[request.scorer] += 1
        try:
            async with asyncio.timeout(_SCORE_SECONDS):
                found = (await self.peer.ask(Call(identity, request))).result
            if not isinstance(found, Sequence):
                raise ContractViolation(f"{request.scorer} by {self.provider}: it has no scores")
            if problem := score_problem(len(request.items), found, request.reward_bound):
                raise ContractViolation(f"{request.scorer} by {self.provider}: {problem}")
        except TimeoutError:
            slow = TimedOut(f"{request.scorer} by {self.provider}: no scores in {_SCORE_SECONDS:g} s")
            raise await self.slow(request.scorer, slow) from None
        except (Failed, ContractViolation) as error:
            if error.code not in _BLAMELESS:
                self.record_failure(request.scorer, error)
            raise
        finally:
            self.open[request.scorer] -= 1
            self.peer.end(identity)
        self.record_success(request.scorer)
        return found


class AttachedPlayer:
    """One episode that an attached provider plays."""

    def __init__(self, attachment: Attachment, name: str, release: Release) -> None:
        self._attachment = attachment
        self._name = name
        self._release = release
        self._id = attachment.peer.begin()
        self._totals = Totals()
        attachment.open[name] += 1

    async def play(self, message: Message, seconds: float) -> Answer:
        announced = self._attachment.environments[self._name]
        is_action = isinstance(message, Action)
        if isinstance(message, Reset):
            self._totals = Totals(message.reward_bound)
        seconds = min(seconds, announced.step_timeout_seconds if is_action else announced.reset_timeout_seconds)
        try:
            return await self._ask(Call(self._id, message), seconds, message.turn)
        except TimeoutError:
            error: Failed | ContractViolation = await self._attachment.slow(self._name, too_slow(message, seconds))
        except (Failed, ContractViolation) as failed:
            error = failed
            if error.code not in _BLAMELESS:
                self._attachment.record_failure(self._name, error)
        raise Failed(error.code, f"{error} (attached provider {self._attachment.provider})")

    async def _ask(self, call: Call, seconds: float, turn: int) -> Answer:
        async with asyncio.timeout(seconds + _GRACE_SECONDS):
            answer = (await self._attachment.peer.ask(call)).result
        if not isinstance(answer, Answer):
            raise ContractViolation("it answered with scores")
        if problem := answer_problem(answer, turn, self._attachment.environments[self._name]):
            raise ContractViolation(problem)
        if problem := self._totals.problem(answer):
            raise ContractViolation(problem)
        if answer.done:
            self._attachment.record_success(self._name)
        return answer

    async def close(self) -> None:
        self._attachment.peer.end(self._id)
        self._attachment.open[self._name] -= 1
        self._release()
