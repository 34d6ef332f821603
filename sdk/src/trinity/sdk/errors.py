"""Errors of episodes: those of trinity.api.errors, and errors of environments.

An exception whose `code` is a grpc.StatusCode reaches the client unchanged; any other becomes INTERNAL, with its type
and text. Raise InvalidInput for a task or an argument that cannot be played.
"""

import grpc

from trinity.api.errors import (
    Conflict,
    Full,
    InvalidInput,
    NotFound,
    TimedOut,
    TrinityError,
    Unavailable,
    status_of,
    text_of,
)

__all__ = [
    "Broken",
    "Conflict",
    "ContractViolation",
    "Failed",
    "Full",
    "InvalidInput",
    "NotFound",
    "TimedOut",
    "TrinityError",
    "Unavailable",
    "failed",
    "number_of",
    "status_of",
    "text_of",
]


class Broken(TrinityError):
    """The environment's own code raised, or died."""


class ContractViolation(Broken):
    """The provider's answer violates the contract."""

    code = grpc.StatusCode.DATA_LOSS


class Failed(TrinityError):
    """A failure reported by another process, with its status there."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def number_of(code: grpc.StatusCode) -> int:
    """Returns the code's number, as a Failure has it."""
    return int(code.value[0])


_BY_NUMBER = {number_of(code): code for code in grpc.StatusCode if code is not grpc.StatusCode.OK}


def failed(number: int, message: str) -> Failed:
    """Returns the error of a Failure message; a number that is no error's code becomes UNKNOWN."""
    return Failed(_BY_NUMBER.get(number, grpc.StatusCode.UNKNOWN), message[:10_000])
