"""What goes wrong in an episode, and the gRPC status its client sees.

Any exception whose `code` is a grpc.StatusCode reaches the client as it is; every other one is INTERNAL, with its type
and text. Raise InvalidInput for a task or an argument that cannot be played.
"""

from typing import ClassVar

import grpc


class EpisodeError(Exception):
    """Base class of these errors."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL


class InvalidInput(EpisodeError):
    """A value from outside is wrong: the message names the field, the value and the fix."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class NotFound(EpisodeError):
    code = grpc.StatusCode.NOT_FOUND


class Full(EpisodeError):
    """No room now; try again later."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class OutOfTurn(EpisodeError):
    """An action after the episode was done."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class TimedOut(EpisodeError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Away(EpisodeError):
    """The provider is shutting down, or its connection was lost."""

    code = grpc.StatusCode.UNAVAILABLE


class Broken(EpisodeError):
    """The environment's own code raised, or died."""


class ContractViolation(Broken):
    """The provider's answer violates the contract."""

    code = grpc.StatusCode.DATA_LOSS


class Failed(EpisodeError):
    """A failure reported by another process, with its status there."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code  # type: ignore[misc]


_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """gRPC status and message of an error."""
    code = getattr(error, "code", None)
    if isinstance(code, grpc.StatusCode) and code is not grpc.StatusCode.OK:
        return code, str(error)
    return grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"


def number_of(code: grpc.StatusCode) -> int:
    """The code as it is written in a Failure."""
    return int(code.value[0])


def failed(number: int, message: str) -> Failed:
    """The error in a Failure message; a number that is no code becomes UNKNOWN."""
    code = _BY_NUMBER.get(number, grpc.StatusCode.UNKNOWN)
    return Failed(grpc.StatusCode.UNKNOWN if code is grpc.StatusCode.OK else code, message[:10_000])
