"""What goes wrong in an episode: trinity.api.errors, and what only environments know.

Any exception whose `code` is a grpc.StatusCode reaches the client as it is; every other one is INTERNAL, with its type
and text. Raise InvalidInput for a task or an argument that cannot be played.
"""

import grpc

from trinity.api.errors import Conflict, Full, InvalidInput, NotFound, TimedOut, TrinityError, Unavailable, status_of

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
    """The code as it is written in a Failure."""
    return int(code.value[0])


_BY_NUMBER = {number_of(code): code for code in grpc.StatusCode if code is not grpc.StatusCode.OK}


def failed(number: int, message: str) -> Failed:
    """The error in a Failure message; a number that is no code of an error becomes UNKNOWN."""
    return Failed(_BY_NUMBER.get(number, grpc.StatusCode.UNKNOWN), message[:10_000])
