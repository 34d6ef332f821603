"""Certificates as `trinity certs` writes them, for services and callers of a test."""

from pathlib import Path

from trinity.cli.commands.certs import certs
from trinity.runtime.trust.identity import Identity, of_certificate
from trinity.runtime.trust.tls import TlsFiles, TlsIdentity


def make_certificates(folder: Path) -> Path:
    """An identity of each role, all for this machine; returns the folder."""
    certs.init(folder)
    certs.issue("provider", folder=folder)
    return folder


def tls_settings(folder: Path, name: str) -> dict[str, str]:
    """The settings that give a service an identity of the folder, without their prefix."""
    own = folder / name
    return {"TLS_CERT": str(own / "tls.crt"), "TLS_KEY": str(own / "tls.key"), "TLS_CA": str(own / "ca.crt")}


def identity_of(folder: Path, name: str) -> Identity:
    return of_certificate(TlsIdentity(TlsFiles(*map(Path, tls_settings(folder, name).values()))))
