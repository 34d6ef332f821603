"""Identities: this process's own, and the callers'."""

import contextvars
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from trinity.runtime.errors import InvalidInput, PermissionDenied, Unauthenticated
from trinity.runtime.settings import is_loopback, split_address
from trinity.runtime.trust.roles import Role
from trinity.runtime.trust.tls import TlsIdentity, peer_of
from trinity.runtime.trust.tokens import OwnToken


@dataclass(frozen=True)
class Caller:
    """A caller. Only certificates have a `name`: a token stands for a role."""

    role: Role
    name: str = ""


@dataclass(frozen=True)
class Identity:
    """A role, and what shows it: a certificate, or else the token in a folder.

    `insecure`: the network is trusted, and the token may cross it as text.
    """

    role: Role
    folder: Path | None = None
    tls: TlsIdentity | None = None
    insecure: bool = False

    @cached_property
    def _token(self) -> OwnToken | None:
        return OwnToken(self.folder, self.role) if self.folder is not None and self.tls is None else None

    def metadata(self) -> list[tuple[str, str]]:
        """The metadata by which a call shows the identity."""
        token = self._token.read() if self._token is not None else ""
        return [("authorization", f"Bearer {token}")] if token else []

    def check_address(self, address: str, field: str = "address") -> None:
        """InvalidInput if a call there would send the token as text to where other machines are."""
        if self._token is None or self.insecure or is_loopback(split_address(address, field)[0]):
            return
        problem = f"is {address!r}, where a token would be sent unencrypted"
        trust = "set TRINITY_INSECURE=1, of a service TRINITY_<SERVICE>_INSECURE=1, to trust the network"
        raise InvalidInput(field, f"{problem}; use certificates (`trinity certs`), or {trust}")


_own: Identity | None = None
# Of the call that is being answered; None where the server asks for no identity.
calling: contextvars.ContextVar[Caller | None] = contextvars.ContextVar("calling", default=None)


def configure(identity: Identity | None) -> None:
    """Say who this process is, for the channels that it opens from now on. None: it shows no identity."""
    global _own
    _own = identity


def own() -> Identity | None:
    return _own


def of_certificate(tls: TlsIdentity) -> Identity:
    """The identity that a process's own certificate gives it. InvalidInput if it names no role."""
    role = tls.current().role
    if role not in list(Role):
        raise InvalidInput(f"{tls.files.prefix}TLS_CERT", f"names the role {role!r}, must be one of {', '.join(Role)}")
    return Identity(Role(role), tls=tls)


def caller_of_certificate(auth_context: Mapping[str, Iterable[bytes]], revoked: Container[int] = ()) -> Caller | None:
    """The caller that a verified certificate names; None without one. Unauthenticated if it cannot be used.

    `revoked`: serial numbers of certificates that are refused.
    """
    peer = peer_of(auth_context)
    if peer is None:
        return None
    if peer.serial in revoked:
        raise Unauthenticated(f"the caller's certificate {peer.serial:040x} of {peer.name} is revoked")
    if peer.role not in list(Role):
        raise Unauthenticated(f"the caller's certificate names the role {peer.role!r}, which is none")
    return Caller(Role(peer.role), peer.name)


def check_name(field: str, name: str) -> None:
    """PermissionDenied if the call shows a certificate of another name than it gives.

    Processes that share the certificate of `pool` are called `pool` or `pool/<anything>`.
    """
    caller = calling.get()
    if caller is not None and caller.name and name.partition("/")[0] != caller.name:
        of = f"the caller's certificate is {caller.name!r}"
        raise PermissionDenied(f"{field}: is {name!r}, but {of}; call it that or {caller.name}/<anything>")
