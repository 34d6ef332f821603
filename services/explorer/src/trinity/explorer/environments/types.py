"""Failures of environments. A failure has a cause to count, and is never a reward."""

from enum import StrEnum

import grpc
import grpc.aio

from trinity.runtime.errors import TrinityError


class EnvironmentCause(StrEnum):
    """Causes of failures, used as metric labels."""

    TIMEOUT = "timeout"
    CRASH = "crash"
    REFUSED = "refused"
    FULL = "full"
    AWAY = "away"
    CONTRACT_VIOLATION = "contract_violation"


class ScorerFailed(TrinityError):
    """An answer could not be scored. Never a zero reward."""


class EnvironmentFailed(TrinityError):
    """The provider of an environment is too slow or gone, or it refused, failed or broke the contract.

    `passing`: the task is not at fault, and the same call may succeed later or at another provider. FULL is always
    passing, since other attempts release their slots when they end. AWAY: no provider of `environment` can be reached,
    or the connection was lost during the call (`begun`).
    """

    def __init__(
        self,
        message: str,
        cause: EnvironmentCause = EnvironmentCause.CRASH,
        *,
        passing: bool = False,
        environment: str = "",
        begun: bool = True,
    ) -> None:
        super().__init__(message)
        self.cause = cause
        self.passing = passing
        self.environment = environment
        self.begun = begun


class StateRefused(EnvironmentFailed):
    """The environment does not accept the state of an interrupted episode."""


# Any other status is a crash.
_CAUSES = {
    grpc.StatusCode.DEADLINE_EXCEEDED: EnvironmentCause.TIMEOUT,
    grpc.StatusCode.DATA_LOSS: EnvironmentCause.CONTRACT_VIOLATION,
    grpc.StatusCode.RESOURCE_EXHAUSTED: EnvironmentCause.FULL,
    grpc.StatusCode.UNAVAILABLE: EnvironmentCause.AWAY,
    grpc.StatusCode.INVALID_ARGUMENT: EnvironmentCause.REFUSED,
    grpc.StatusCode.FAILED_PRECONDITION: EnvironmentCause.REFUSED,
    grpc.StatusCode.OUT_OF_RANGE: EnvironmentCause.REFUSED,
    grpc.StatusCode.NOT_FOUND: EnvironmentCause.REFUSED,
    grpc.StatusCode.ALREADY_EXISTS: EnvironmentCause.REFUSED,
    grpc.StatusCode.PERMISSION_DENIED: EnvironmentCause.REFUSED,
    grpc.StatusCode.UNAUTHENTICATED: EnvironmentCause.REFUSED,
    grpc.StatusCode.UNIMPLEMENTED: EnvironmentCause.REFUSED,
}
# Full; away; not attached yet.
_PASSING = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND}
# gRPC's own words for an answer or a status beyond its limits, with the status that providers without room send.
_TOO_LARGE = ("message larger than max", "metadata size exceeds")
# gRPC's own words for a message to a stream that has ended, mostly with its connection. No server says it.
_WRITTEN_TOO_LATE = "Internal error from Core"


def failure_of(address: str, name: str, error: grpc.aio.AioRpcError) -> EnvironmentFailed:
    """The failure of an episode or scoring of `name` with this gRPC status."""
    code = grpc.StatusCode.UNAVAILABLE if error.details() == _WRITTEN_TOO_LATE else error.code()
    cause, passing = _CAUSES.get(code, EnvironmentCause.CRASH), code in _PASSING
    if any(words in str(error.details()) for words in _TOO_LARGE):  # else the attempt would wait for room
        cause, passing = EnvironmentCause.CONTRACT_VIOLATION, False
    message = f"{name} at {address}: {code.name}: {error.details()}"
    return EnvironmentFailed(message, cause, passing=passing, environment=name)
