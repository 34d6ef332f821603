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
    text_of,
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
    "text_of",
    "to_status",
]

# Exit code of a service process that would end the same way if it were started again; 1 after any other failure.
EXIT_FOR_GOOD = 2
# Exit code after an error that nothing outside the process explains: two equal ones in a row would be followed by more.
EXIT_UNEXPECTED = 4
# Exit code of a process that is to be started again because machines have left or joined; it has not failed.
EXIT_AGAIN = 5
UNEXPECTED = (
    ValueError, TypeError, LookupError, AttributeError, ImportError, ArithmeticError, NotImplementedError,
    AssertionError, SystemExit,
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
