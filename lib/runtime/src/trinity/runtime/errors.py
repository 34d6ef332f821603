"""The exceptions of all services, and how they look to a gRPC caller.

Errors travel; they are caught where there is a decision. At the edge of a service `to_status` turns them into a gRPC
status whose message names the field and the fix.
"""

from enum import StrEnum

import grpc

# A service process ends with it when starting it again would end the same way; with 1 after any other failure.
EXIT_FOR_GOOD = 2
# Ended by an error that nothing outside the process explains: the same one twice in a row would come a third time.
EXIT_UNEXPECTED = 4
UNEXPECTED = (ValueError, TypeError, LookupError, AttributeError, ImportError, ArithmeticError, NotImplementedError)


class TrinityError(Exception):
    """Root of everything Trinity raises on purpose. `code` is what a gRPC caller sees.

    `for_good`: a restart would fail the same way until configuration, data or installation change.
    """

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL
    for_good: bool = False


class InvalidInput(TrinityError):
    """A value from outside is wrong: the message names the field, the value and the fix."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    for_good = True

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class NotFound(TrinityError):
    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(TrinityError):
    code = grpc.StatusCode.ALREADY_EXISTS


class Conflict(TrinityError):
    """The state does not allow this now; trying again unchanged does not help."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Full(TrinityError):
    """No room now: back-pressure. Try again later."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unavailable(TrinityError):
    """A part this one needs does not answer. Try again."""

    code = grpc.StatusCode.UNAVAILABLE


class PermissionDenied(TrinityError):
    code = grpc.StatusCode.PERMISSION_DENIED


class DataLoss(TrinityError):
    """Something acknowledged cannot be read back, or does not match its checksum."""

    code = grpc.StatusCode.DATA_LOSS


class TimedOut(TrinityError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED


class FailureCause(StrEnum):
    """Why an attempt at a task failed. Also the metric key."""

    TIMEOUT = "timeout"
    WORKFLOW_ERROR = "workflow_error"
    ENVIRONMENT_ERROR = "environment_error"
    ENGINE_ERROR = "engine_error"
    SCORER_ERROR = "scorer_error"
    INVALID_EXPERIENCE = "invalid_experience"
    LEASE_LOST = "lease_lost"


def to_status(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """gRPC code and message for an error; an unexpected one is INTERNAL with its type and text.

    Python's stack is deep enough for all that our own clients send: what exceeds it is the caller's input.
    """
    if isinstance(error, RecursionError):
        return grpc.StatusCode.INVALID_ARGUMENT, "request: is nested too deeply"
    if isinstance(error, TrinityError):
        return error.code, str(error)
    return grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"
