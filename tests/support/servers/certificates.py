"""Certificates as `trinity certs` writes them, for services and callers of a test."""

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from trinity.cluster.certs import certs
from trinity.runtime.trust import ca
from trinity.runtime.trust.identity import Identity, of_certificate
from trinity.runtime.trust.roles import Role
from trinity.runtime.trust.tls import TlsFiles, TlsIdentity


def make_certificates(folder: Path) -> Path:
    """An identity of each role, all for this machine; returns the folder."""
    certs.init(folder)
    for role in (Role.PROVIDER, Role.TINKER):
        certs.issue(role, folder=folder)
    return folder


def tls_settings(folder: Path, name: str) -> dict[str, str]:
    """The settings that give a service an identity of the folder, without their prefix."""
    own = folder / name
    return {"TLS_CERT": str(own / "tls.crt"), "TLS_KEY": str(own / "tls.key"), "TLS_CA": str(own / "ca.crt")}


def identity_of(folder: Path, name: str) -> Identity:
    return of_certificate(TlsIdentity(TlsFiles(*map(Path, tls_settings(folder, name).values()))))


def authority_of(folder: Path) -> ca.Pair:
    return ca.Pair((folder / "ca/ca.crt").read_bytes(), (folder / "ca/ca.key").read_bytes())


def signed_by(issuer: ca.Pair, role: str, name: str, *, may_sign: bool) -> ca.Pair:
    """A holder's certificate that may sign, which only another authority than `trinity certs` would make."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    names: list[x509.GeneralName] = [x509.DNSName("localhost")]
    if role:
        names.append(x509.UniformResourceIdentifier(ca.identity_uri(role, name)))
    signer = serialization.load_pem_private_key(issuer.key, password=None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.load_pem_x509_certificate(issuer.certificate).subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=may_sign, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(signer, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return ca.Pair(ca.pem(certificate), secret)
