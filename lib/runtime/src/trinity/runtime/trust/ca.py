"""A small certificate authority: ECDSA P-256, with certificates that name their holder.

An identity is a URI in the certificate's subjectAltName, `trinity://<role>/<name>`; cert-manager writes the same one.
The hosts at which the holder serves follow; clients compare them with the address that they call.
"""

import datetime
import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from trinity.runtime.errors import InvalidInput

SCHEME = "trinity"
_WARN = datetime.timedelta(days=30)
_CLOCK_SKEW = datetime.timedelta(minutes=5)  # a certificate is valid this long before it is made
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HOST = re.compile(r"(\*\.)?([A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*")


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key, both as PEM; the key is PKCS 8 and not encrypted."""

    certificate: bytes
    key: bytes


def make_authority(days: float) -> Pair:
    """A new self-signed authority. Names differ, so that two authorities can be trusted at once."""
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    name = _common_name(f"Trinity CA {serial:040x}"[:32])
    builder = (
        _builder(name, name, key.public_key(), serial, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(authority=True), critical=True)
    )
    return Pair(pem(builder.sign(key, hashes.SHA256())), _key_pem(key))


def issue(authority: Pair, name: str, *, role: str = "", hosts: Sequence[str] = (), days: float) -> Pair:
    """Returns a certificate for `name`, signed by the authority, for servers at `hosts` and for clients.

    Without a role it identifies only a host (nats-server): no Trinity service takes it for a caller. InvalidInput for
    a name or a host that cannot be in a certificate, and where there is neither role nor host.
    """
    check_name(name)
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity_uri(role, name))] if role else []
    names += [_host(host) for host in hosts]
    if not names:
        raise InvalidInput("hosts", f"is empty, and {name} has no role: name the hosts at which it serves")
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    try:
        signer = serialization.load_pem_private_key(authority.key, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise InvalidInput("ca.key", "holds no private key; restore it") from None
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise InvalidInput("ca.key", f"is a {type(signer).__name__}, must be a key of an elliptic curve")
    key = ec.generate_private_key(ec.SECP256R1())
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    serial = x509.random_serial_number()
    builder = (
        _builder(_common_name(name), issuer.subject, key.public_key(), serial, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    return Pair(pem(builder.sign(signer, hashes.SHA256())), _key_pem(key))


def identity_uri(role: str, name: str) -> str:
    return f"{SCHEME}://{role}/{name}"


def identity_of(certificate: x509.Certificate) -> tuple[str, str]:
    """Role and name, as the certificate has them. InvalidInput unless it has exactly one identity."""
    names = _alternative_names(certificate)
    uris = names.get_values_for_type(x509.UniformResourceIdentifier) if names else []
    found = [uri for uri in uris if uri.startswith(SCHEME)]
    if len(found) != 1:
        raise InvalidInput(
            "certificate", f"has {len(found)} URIs {SCHEME}://<role>/<name> in its subjectAltName, must have one"
        )
    parts = urlsplit(found[0])
    role, name = parts.netloc, parts.path.removeprefix("/")
    if parts.scheme != SCHEME or not role or not _NAME.fullmatch(name) or parts.query or parts.fragment:
        raise InvalidInput("certificate", f"names {found[0]!r}, must be {SCHEME}://<role>/<name>")
    return role, name


def role_of(certificate: Path) -> str:
    """Role of a certificate's file; nothing for an unusable one, which its first use refuses."""
    try:
        return identity_of(x509.load_pem_x509_certificate(certificate.read_bytes()))[0]
    except (ValueError, OSError, InvalidInput):
        return ""


def check_signers(chain: Sequence[x509.Certificate]) -> None:
    """InvalidInput if the first certificate, a holder's, may sign others, or another of its chain is a holder's.

    TLS takes a holder's certificate that may sign for an authority: who has it could make every role.
    """
    for number, certificate in enumerate(chain):
        if _signs(certificate) and (number == 0 or _alternative_names(certificate) is not None):
            name = certificate.subject.rfc4514_string()
            raise InvalidInput("certificate", f"{name} names a holder and is a CA's (CA:TRUE), must be one of them")


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """The DNS names and IP addresses of its subjectAltName."""
    names = _alternative_names(certificate)
    if names is None:
        return []
    return names.get_values_for_type(x509.DNSName) + [str(one) for one in names.get_values_for_type(x509.IPAddress)]


def expires_soon(certificate: x509.Certificate) -> bool:
    """Returns True if less than 30 days are left, or less than a third of a lifetime shorter than 90 days."""
    last = certificate.not_valid_after_utc
    return last - datetime.datetime.now(datetime.UTC) < min(_WARN, (last - certificate.not_valid_before_utc) / 3)


def check_name(name: str) -> str:
    """The name of a holder. InvalidInput unless it is safe in a URI, a file name and a NATS user."""
    if not _NAME.fullmatch(name) or name.startswith("."):
        raise InvalidInput("name", f"is {name!r}, must be 1 to 64 letters, digits, `_`, `-` or `.`")
    return name


def _alternative_names(certificate: x509.Certificate) -> x509.SubjectAlternativeName | None:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None


def _signs(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def check_hosts(hosts: Iterable[str]) -> None:
    """Raises InvalidInput for a host that cannot be in a certificate."""
    for host in hosts:
        _host(host)


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    if not _HOST.fullmatch(host) or len(host) > 253:
        raise InvalidInput("host", f"is {host!r}, must be a host name or an IP address, without a port")
    return x509.DNSName(host)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, serial: int, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(serial)
        .not_valid_before(min(now, now + datetime.timedelta(days=days)) - _CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
