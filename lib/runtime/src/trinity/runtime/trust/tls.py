"""mTLS between machines: a process's certificate, read again when its files change, on servers and on channels.

A connection is checked when it is made. Servers use a changed certificate for the next connection, channels
(trinity.runtime.rpc) make a new connection for the next call. So a rotation interrupts no call.
"""

import datetime
import functools
import ssl
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from trinity.runtime.errors import InvalidInput, Unauthenticated
from trinity.runtime.files import stamp
from trinity.runtime.trust import ca

log = structlog.get_logger(__name__)

_READABLE_BY_OTHERS = 0o004
_NAMES = ("CERT", "KEY", "CA")


@functools.cache
def public_authorities() -> ssl.SSLContext:
    """For clients of servers elsewhere. It takes tens of milliseconds to make, so all of them share it."""
    return ssl.create_default_context()


@dataclass(frozen=True)
class Material:
    """The checked content of the files: PEM bytes, and the identity in the certificate."""

    chain: bytes
    key: bytes
    roots: bytes
    role: str
    name: str
    not_after: datetime.datetime
    expires_soon: bool


@dataclass(frozen=True)
class TlsFiles:
    """The three files of an identity; `prefix` is that of the settings that name them, for errors."""

    cert: Path
    key: Path
    ca: Path
    prefix: str = "TRINITY_"

    @classmethod
    def of(cls, cert: Path | None, key: Path | None, ca: Path | None, prefix: str = "TRINITY_") -> "TlsFiles | None":
        """All three or none; InvalidInput names the missing ones."""
        given = {"TLS_CERT": cert, "TLS_KEY": key, "TLS_CA": ca}
        missing = [f"{prefix}{name}" for name, path in given.items() if path is None]
        if cert is None or key is None or ca is None:
            if len(missing) == len(given):
                return None
            there = next(f"{prefix}{name} is {path}" for name, path in given.items() if path is not None)
            raise InvalidInput(missing[0], f"is not set, but {there}; set certificate, key and CA together")
        return cls(cert, key, ca, prefix)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], prefix: str = "TRINITY_") -> "TlsFiles | None":
        """The files of a process without own settings, such as the command line."""
        paths = [Path(text) if (text := environment.get(f"{prefix}TLS_{name}")) else None for name in _NAMES]
        return cls.of(paths[0], paths[1], paths[2], prefix)

    def load(self) -> Material:
        """Read and check them. InvalidInput with setting, value and fix if they cannot be used now."""
        chain, key, roots = (self._read(name, path) for name, path in zip(_NAMES, self._paths, strict=True))
        if self.key.stat().st_mode & _READABLE_BY_OTHERS:
            mode = f"{self.key.stat().st_mode & 0o777:04o}"
            raise self._invalid("KEY", self.key, f"has mode {mode} and can be read by others; chmod 600 {self.key}")
        certificates = self._certificates("CERT", self.cert, chain)
        certificate = certificates[0]
        self._certificates("CA", self.ca, roots)
        try:
            private = serialization.load_pem_private_key(key, password=None)
        except (ValueError, TypeError) as error:
            raise self._invalid("KEY", self.key, f"is no PEM private key without a password ({error})") from None
        if private.public_key() != certificate.public_key():
            fix = "issue both again: `trinity certs rotate`"
            raise self._invalid("KEY", self.key, f"does not belong to the certificate in {self.cert}; {fix}")
        now = datetime.datetime.now(datetime.UTC)
        first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if now > last:
            raise self._invalid("CERT", self.cert, f"expired at {last:%Y-%m-%d %H:%M} UTC; `trinity certs rotate`")
        if now < first:
            raise self._invalid(
                "CERT", self.cert, f"is valid from {first:%Y-%m-%d %H:%M} UTC; set this machine's clock"
            )
        try:
            role, name = ca.identity_of(certificate)
            ca.check_signers(certificates)
        except InvalidInput as error:
            raise self._invalid("CERT", self.cert, f"is a {error}; `trinity certs issue` writes one") from None
        return Material(chain, key, roots, role, name, last, ca.expires_soon(certificate))

    def stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Changes when one of the files does."""
        return tuple(stamp(path) for path in self._paths)

    @property
    def _paths(self) -> tuple[Path, Path, Path]:
        return self.cert, self.key, self.ca

    def _read(self, name: str, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            raise self._invalid(name, path, f"cannot be read: {error.strerror}") from None

    def _certificates(self, name: str, path: Path, pem: bytes) -> list[x509.Certificate]:
        try:
            return x509.load_pem_x509_certificates(pem)
        except ValueError as error:
            raise self._invalid(name, path, f"holds no PEM certificate ({error})") from None

    def _invalid(self, name: str, path: Path, problem: str) -> InvalidInput:
        return InvalidInput(f"{self.prefix}TLS_{name}", f"{path} {problem}")


class TlsIdentity:
    """The certificate of this process. Files that changed are read again; what cannot be used does not replace it."""

    def __init__(self, files: TlsFiles) -> None:
        """InvalidInput if the files cannot be used."""
        self.files = files
        self._lock = threading.Lock()
        self._stamp = files.stamp()
        self._material = files.load()
        self._warn_near_expiry()

    def current(self) -> Material:
        """The material in the files, or the last usable one. Does not raise; for any thread."""
        with self._lock:
            stamp = self.files.stamp()
            if stamp != self._stamp:
                self._stamp = stamp
                self._reload()
            return self._material

    def _reload(self) -> None:
        try:
            self._material = self.files.load()
        except (InvalidInput, OSError) as error:
            log.warning("tls.certificate.refused", reason=str(error), kept_until=str(self._material.not_after))
            return
        log.info("tls.certificate.reloaded", certificate=str(self.files.cert), until=str(self._material.not_after))
        self._warn_near_expiry()

    def _warn_near_expiry(self) -> None:
        if self._material.expires_soon:
            log.warning(
                "tls.certificate.expiring", certificate=str(self.files.cert), until=str(self._material.not_after)
            )


def server_credentials(identity: TlsIdentity) -> grpc.ServerCredentials:
    """Credentials that ask every client for a certificate of the same CA, and that follow the identity's files."""
    served = identity.current()

    def configuration(material: Material) -> Any:
        return grpc.ssl_server_certificate_configuration([(material.key, material.chain)], material.roots)

    def changed() -> Any:
        nonlocal served
        now = identity.current()
        if now is served:
            return None
        served = now
        return configuration(now)

    return grpc.dynamic_ssl_server_credentials(configuration(served), changed, require_client_authentication=True)


@dataclass(frozen=True)
class Peer:
    """The identity in a caller's certificate."""

    role: str
    name: str
    serial: int
    not_after: datetime.datetime


@functools.lru_cache(maxsize=4096)
def _holder(pem: bytes, signers: bytes) -> Peer:
    chain = x509.load_pem_x509_certificates(pem + signers)
    ca.check_signers(chain)
    return Peer(*ca.identity_of(chain[0]), chain[0].serial_number, chain[0].not_valid_after_utc)


def peer_of(auth_context: Mapping[str, Iterable[bytes]]) -> Peer | None:
    """A caller, from `ServicerContext.auth_context()`; None if it shows no certificate.

    The handshake has checked that the authority signed it, and not who else signed in between. Raises Unauthenticated
    for a certificate that names no caller, was signed by another holder, or has expired since the handshake.
    """
    pem, signers = (b"".join(auth_context.get(key, ())) for key in ("x509_pem_cert", "x509_pem_cert_chain"))
    if not pem:
        return None
    try:
        peer = _holder(pem, signers)
    except (InvalidInput, ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise Unauthenticated(f"the caller's {error}") from None
    if datetime.datetime.now(datetime.UTC) >= peer.not_after:
        raise Unauthenticated(f"the caller's certificate expired at {peer.not_after:%Y-%m-%d %H:%M} UTC")
    return peer
