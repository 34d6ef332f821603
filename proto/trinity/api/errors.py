"""The exceptions that gRPC codes stand for, in every distribution, and how they look to a caller.

Errors travel; they are caught where there is a decision. At the edge of a service `status_of` turns them into a gRPC
status whose message names the field and the fix; at the edge of a caller `error_of` turns the status into an error.
"""

import grpc


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


class Unauthenticated(TrinityError):
    """The caller does not show who it is, or shows something that is not valid."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(TrinityError):
    """The caller is known, and its role may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class DataLoss(TrinityError):
    """Something acknowledged cannot be read back, or does not match its checksum."""

    code = grpc.StatusCode.DATA_LOSS


class TimedOut(TrinityError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """gRPC code and message for an error: its own `code`, if that is one, or INTERNAL with its type and text."""
    code = getattr(error, "code", None)
    if isinstance(code, grpc.StatusCode) and code is not grpc.StatusCode.OK:
        return code, str(error)
    return grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"


_KINDS: dict[grpc.StatusCode, type[TrinityError]] = {
    kind.code: kind
    for kind in (
        NotFound, AlreadyExists, Conflict, Full, Unavailable, Unauthenticated, PermissionDenied, DataLoss, TimedOut
    )
}  # fmt: skip


def error_of(code: grpc.StatusCode, message: str) -> TrinityError:
    """The error that a gRPC status stands for; the inverse of `status_of`.

    `code` of the error is always the given one, also where no class stands for it.
    """
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        field, colon, problem = message.partition(": ")
        return InvalidInput(field, problem) if colon else InvalidInput("request", message)
    error = _KINDS.get(code, TrinityError)(message)
    error.code = code
    return error
