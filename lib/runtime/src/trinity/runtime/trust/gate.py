"""Admits callers that show an identity whose role may call the method."""

from collections.abc import Container, Iterable

import grpc.aio

from trinity.runtime.errors import PermissionDenied, Unauthenticated
from trinity.runtime.trust.identity import Caller, caller_of_certificate
from trinity.runtime.trust.roles import CHECKED_BY_SERVICE, METHODS, Role
from trinity.runtime.trust.tokens import KnownTokens


class Gate:
    """Called before each call. Certificates are verified by TLS before; tokens are compared here."""

    def __init__(self, tokens: KnownTokens | None, revoked: Container[int] = ()) -> None:
        """`revoked`: returns the serial numbers of refused certificates, at each call."""
        self._tokens, self._revoked = tokens, revoked

    def admit(self, method: str, context: "grpc.aio.ServicerContext[object, object]") -> Caller:
        """Returns the caller of `method` ("/package.Service/Method"). Raises Unauthenticated and PermissionDenied."""
        shown = caller_of_certificate(context.auth_context(), self._revoked)
        caller = shown or self._caller_of_token(method, context.invocation_metadata() or ())
        return self._allowed(method, caller)

    def is_refused(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Returns True if `admit` will refuse a call for its token; known before its message is read.

        False where callers have certificates: the handshake keeps strangers out there.
        """
        if self._tokens is None:
            return False
        try:
            self._allowed(method, self._caller_of_token(method, metadata))
        except (Unauthenticated, PermissionDenied):
            return True
        return False

    def _allowed(self, method: str, caller: Caller) -> Caller:
        allowed = METHODS.get(method, frozenset())
        if caller.role not in allowed:
            may = ", ".join(sorted(allowed)) or "no role"
            raise PermissionDenied(f"role {caller.role} may not call {method.removeprefix('/')}; {may} may")
        return caller

    def _caller_of_token(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        shown = dict(metadata).get("authorization")
        if shown is None and method in CHECKED_BY_SERVICE:
            return Caller(Role.PROVIDER)
        if shown is None:
            raise Unauthenticated(
                f"{method.removeprefix('/')}: the caller shows no identity, neither token nor certificate"
            )
        role = self._tokens.role_of(str(shown).removeprefix("Bearer ")) if self._tokens is not None else None
        if role is None:
            raise Unauthenticated(f"{method.removeprefix('/')}: the caller's token is none of this run's")
        return Caller(role)
