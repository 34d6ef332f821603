"""One attached provider: a stream that brings environments and scorers, and how well it has served so far."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

import grpc
import structlog

from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.runtime.errors import TrinityError
from trinity.runtime.trust.attach_tokens import AttachToken
from trinity.sdk.contract import answer_problem, score_problem
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
# Until a provider must have answered a probe. With the grace it is less than the explorers' own grace.
_PROBE_SECONDS = 2.0
# Replies without a call after which the provider's stream is closed.
_MAX_STRAYS = 100_000
# Calls that may wait to be sent beside one for each open episode, such as closes of episodes.
_MAX_UNSENT = 10_000
# Caused by the task or the moment, not by the provider.
_BLAMELESS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.CANCELLED,
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

    `since`: Unix time of the offer. `ended`: why it ended. `token`: what it attached by. `refusal`: what its stream
    ends with, where that is not just lost.
    """

    provider: str
    instance: str
    environments: dict[str, Description]
    scorers: frozenset[str]
    token: AttachToken
    outbox: Outbox[pb.ProviderCall] = field(default_factory=Outbox)
    open: Counter[str] = field(default_factory=Counter)
    since: float = field(default_factory=time.time)
    ended: str = ""
    refusal: TrinityError | None = None
    _records: dict[str, _FailureRecord] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.peer = Peer(self._send)

    def _send(self, call: pb.ProviderCall) -> None:
        self.outbox.put(call)
        unsent = len(self.outbox)
        if unsent > _MAX_UNSENT + self.peer.open:
            self.end(f"the attached provider {self.provider} does not read: {unsent} calls wait to be sent")

    def receive(self, reply: pb.ProviderReply) -> None:
        """A reply came in."""
        self.peer.deliver(reply)
        if self.peer.strays > _MAX_STRAYS:
            self.end(f"the attached provider {self.provider} sent {_MAX_STRAYS} replies to calls that were not made")

    def end(self, reason: str) -> None:
        """Fail all its episodes and close the stream. The first reason stays."""
        self.ended = self.ended or reason
        self.peer.fail(grpc.StatusCode.UNAVAILABLE, reason)
        self.outbox.close()

    @property
    def failing(self) -> tuple[float, str] | None:
        """Since when (Unix time) and why; None if all that it did last went well."""
        oldest = min(self._records.values(), key=lambda record: record.since, default=None)
        return (oldest.since, oldest.reason) if oldest else None

    async def answers(self) -> bool:
        """Ask for a step of an episode that it cannot know: every provider that is there answers with a failure."""
        try:
            identity = self.peer.begin()
        except Failed:
            return False
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                await self.peer.ask(pb.ProviderCall(id=identity, action=pb.Action(turn=1)))
        except TimeoutError:
            return False
        except (Failed, ContractViolation):
            pass
        finally:
            self.peer.end(identity)
        return not self.peer.gone

    async def slow(self, name: str, error: TimedOut) -> Failed:
        """What a call that timed out means: a failure, or that the provider is frozen and counts as away."""
        if await self.answers():
            self.record_failure(name, error)
            return Failed(error.code, str(error))
        self.end(f"the attached provider {self.provider} does not answer")
        return Failed(grpc.StatusCode.UNAVAILABLE, f"{error}; nor does it answer anything else")

    def has_room(self, name: str) -> bool:
        limit = self.environments[name].max_parallel_episodes
        return not limit or self.open[name] < limit

    def avoided_until(self, name: str) -> float:
        """Monotonic time until which other providers are preferred."""
        return self._records[name].avoided_until if name in self._records else 0.0

    def record_success(self, name: str) -> None:
        self._records.pop(name, None)

    def record_failure(self, name: str, error: Exception) -> None:
        """Avoid it for a second after a first failure, twice as long after each further one in a row."""
        record = self._records.setdefault(name, _FailureRecord())
        record.failures += 1
        record.reason = str(error)[:300]
        seconds = min(_MAX_AVOIDED_SECONDS, _FIRST_AVOIDED_SECONDS * 2 ** min(record.failures - 1, 10))
        record.avoided_until = time.monotonic() + seconds
        log.warning("attached.avoided", provider=self.provider, environment=name, seconds=seconds, reason=record.reason)

    async def score(self, request: pb.ScoreRequest) -> pb.ScoreResponse:
        """Scores that keep the contract. Raises Failed, TimedOut, ContractViolation."""
        identity = self.peer.begin()
        self.open[request.scorer] += 1
        try:
            async with asyncio.timeout(_SCORE_SECONDS):
                reply = await self.peer.ask(pb.ProviderCall(id=identity, score=request))
            problem = score_problem(request, reply.scores) if reply.HasField("scores") else "it has no scores"
            if problem:
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
        return reply.scores


class AttachedPlayer:
    """One episode that an attached provider plays."""

    def __init__(self, attachment: Attachment, name: str, release: Release) -> None:
        self._attachment = attachment
        self._name = name
        self._release = release
        self._id = attachment.peer.begin()
        attachment.open[name] += 1

    async def play(self, message: Message, seconds: float) -> pb.EpisodeResponse:
        call = pb.ProviderCall(id=self._id)
        description = self._attachment.environments[self._name]
        if isinstance(message, pb.Reset):
            call.reset.CopyFrom(message)
            seconds = min(seconds, description.reset_timeout_seconds)
        else:
            call.action.CopyFrom(message)
            seconds = min(seconds, description.step_timeout_seconds)
        try:
            return await self._ask(call, seconds, message.turn)
        except TimeoutError:
            error: Failed | ContractViolation = await self._attachment.slow(self._name, too_slow(message, seconds))
        except (Failed, ContractViolation) as failed:
            error = failed
            if error.code not in _BLAMELESS:
                self._attachment.record_failure(self._name, error)
        raise Failed(error.code, f"{error} (attached provider {self._attachment.provider})")

    async def _ask(self, call: pb.ProviderCall, seconds: float, turn: int) -> pb.EpisodeResponse:
        async with asyncio.timeout(seconds + _GRACE_SECONDS):
            reply = await self._attachment.peer.ask(call)
        problem = "it answered with scores"
        if reply.HasField("response"):
            shows = self._attachment.environments[self._name].images
            problem = answer_problem(reply.response, turn, images=shows)
        if problem:
            raise ContractViolation(problem)
        if reply.response.done:
            self._attachment.record_success(self._name)
        return reply.response

    async def close(self) -> None:
        self._attachment.peer.end(self._id)
        self._attachment.open[self._name] -= 1
        self._release()
