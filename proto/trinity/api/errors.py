"""The exceptions that gRPC codes stand for, in every distribution, and how they look to a caller.

Errors travel; they are caught where there is a decision. At the edge of a service `status_of` turns them into a gRPC
status whose message names the field and the fix; at the edge of a caller `error_of` turns the status into an error.
"""

import grpc


class TrinityError(Exception):
    """Root of Trinity's deliberate exceptions. gRPC callers see `code`.

    `for_good`: a restart would fail the same way until configuration, data or installation change.
    """

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL
    for_good: bool = False


class InvalidInput(TrinityError):
    """A wrong value from outside: the message names the field, the value and the fix."""

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
    """The current state forbids the request; an unchanged retry does not help."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Full(TrinityError):
    """No room now: back-pressure. The caller may retry later."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unavailable(TrinityError):
    """A needed service does not answer. The caller may retry."""

    code = grpc.StatusCode.UNAVAILABLE


class Unauthenticated(TrinityError):
    """The caller shows no identity, or an invalid one."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(TrinityError):
    """The role of a known caller does not allow the call."""

    code = grpc.StatusCode.PERMISSION_DENIED


class DataLoss(TrinityError):
    """Acknowledged data cannot be read back, or differ from their checksum."""

    code = grpc.StatusCode.DATA_LOSS


class TimedOut(TrinityError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED


def text_of(error: BaseException) -> str:
    """Returns the text of any error as a message can hold it: with a question mark for half a surrogate pair."""
    try:
        return str(error).encode(errors="replace").decode()
    except Exception as problem:
        return f"its text cannot be read: {type(problem).__name__}"


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """Returns gRPC code and message of an error: a TrinityError's `code`, else INTERNAL with type and text."""
    code = getattr(error, "code", None)
    if isinstance(code, grpc.StatusCode) and code is not grpc.StatusCode.OK:
        return code, text_of(error)
    return grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {text_of(error)}"


_KINDS: dict[grpc.StatusCode, type[TrinityError]] = {
    kind.code: kind
    for kind in (
        NotFound, AlreadyExists, Conflict, Full, Unavailable, Unauthenticated, PermissionDenied, DataLoss, TimedOut
    )
}  # fmt: skip


def error_of(code: grpc.StatusCode, message: str) -> TrinityError:
    """Returns the error of a gRPC status; the inverse of `status_of`.

    The error has the given `code`, also if no class has it.
    """
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        field, colon, problem = message.partition(": ")
        return InvalidInput(field, problem) if colon else InvalidInput("request", message)
    error = _KINDS.get(code, TrinityError)(message)
    error.code = code
    return error
