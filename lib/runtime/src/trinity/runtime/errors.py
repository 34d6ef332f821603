"""The exceptions of all services (trinity.api.errors), why attempts fail, and with what code a process ends."""

from enum import StrEnum

import grpc

from trinity.api.errors import (
    AlreadyExists,
    Conflict,
    DataLoss,
    Full,
    InvalidInput,
    NotFound,
    PermissionDenied,
    TimedOut,
    TrinityError,
    Unauthenticated,
    Unavailable,
    error_of,
    status_of,
)

__all__ = [
    "EXIT_AGAIN",
    "EXIT_FOR_GOOD",
    "EXIT_UNEXPECTED",
    "UNEXPECTED",
    "AlreadyExists",
    "Conflict",
    "DataLoss",
    "FailureCause",
    "Full",
    "InvalidInput",
    "NotFound",
    "PermissionDenied",
    "TimedOut",
    "TrinityError",
    "Unauthenticated",
    "Unavailable",
    "error_of",
    "to_status",
]

# A service process ends with it when starting it again would end the same way; with 1 after any other failure.
EXIT_FOR_GOOD = 2
# Ended by an error that nothing outside the process explains: the same one twice in a row would come a third time.
EXIT_UNEXPECTED = 4
# Ended to be started again, since machines have left or joined: no failure of the process itself.
EXIT_AGAIN = 5
UNEXPECTED = (
    ValueError, TypeError, LookupError, AttributeError, ImportError, ArithmeticError, NotImplementedError,
    AssertionError,
)  # fmt: skip


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
    """gRPC code and message for an error at the edge of a service.

    Python's stack is deep enough for all that our own clients send: what exceeds it is the caller's input.
    """
    return status_of(InvalidInput("request", "is nested too deeply") if isinstance(error, RecursionError) else error)
