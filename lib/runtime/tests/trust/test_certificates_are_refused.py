"""Certificates that cannot be used are refused at start, with the setting, its value and the fix."""

import datetime
import re
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from trinity.runtime.errors import InvalidInput, Unauthenticated
from trinity.runtime.trust import ca
from trinity.runtime.trust.identity import caller_of_certificate
from trinity.runtime.trust.tls import TlsFiles

pytestmark = pytest.mark.core

_PREFIX = "TRINITY_BUFFER_"


@pytest.fixture(scope="module")
def authority() -> ca.Pair:
    return ca.make_authority(10)


@pytest.fixture
def good(tmp_path: Path, authority: ca.Pair) -> TlsFiles:
    pair = ca.issue(authority, "one", role="buffer", hosts=["localhost", "::1"], days=10)
    files = TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key", tmp_path / "ca.crt", _PREFIX)
    files.key.touch(0o600)
    for path, content in zip(
        (files.cert, files.key, files.ca), (pair.certificate, pair.key, authority.certificate), strict=True
    ):
        path.write_bytes(content)
    return files


def problem(files: TlsFiles) -> str:
    with pytest.raises(InvalidInput) as caught:
        files.load()
    return str(caught.value)


def test_good_files_say_who_and_how_long(good: TlsFiles) -> None:
    found = good.load()
    assert (found.role, found.name) == ("buffer", "one")
    assert not found.expires_soon


def test_the_last_third_of_a_lifetime_is_soon(authority: ca.Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def soon(days: float, lived: float = 0) -> bool:
        monkeypatch.setattr(ca, "_CLOCK_SKEW", datetime.timedelta(days=lived))
        pair = ca.issue(authority, "one", role="buffer", days=days)
        return ca.expires_soon(x509.load_pem_x509_certificate(pair.certificate))

    assert [soon(31), soon(29), soon(29, lived=300), soon(31, lived=300)] == [False, False, True, False]
    assert [soon(4, lived=6), soon(3, lived=7)] == [False, True]


def test_missing_files_are_named(good: TlsFiles) -> None:
    good.ca.unlink()
    assert problem(good) == f"TRINITY_BUFFER_TLS_CA: {good.ca} cannot be read: No such file or directory"


def test_a_key_that_others_can_read_is_refused(good: TlsFiles) -> None:
    good.key.chmod(0o640)  # the group may: Kubernetes gives files to a pod's group
    good.load()
    good.key.chmod(0o644)
    assert problem(good) == (
        f"TRINITY_BUFFER_TLS_KEY: {good.key} has mode 0644 and can be read by others; chmod 600 {good.key}"
    )


def test_a_key_of_another_certificate_is_refused(good: TlsFiles, authority: ca.Pair) -> None:
    good.key.write_bytes(ca.issue(authority, "one", role="buffer", days=1).key)
    assert problem(good).startswith(f"TRINITY_BUFFER_TLS_KEY: {good.key} does not belong to the certificate in")


def test_expired_and_future_certificates_are_refused(
    good: TlsFiles, authority: ca.Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = ca.issue(authority, "one", role="buffer", days=-1)
    good.cert.write_bytes(pair.certificate)
    good.key.write_bytes(pair.key)
    assert " expired at " in problem(good) and problem(good).endswith("`trinity certs rotate`")
    monkeypatch.setattr(ca, "_CLOCK_SKEW", -ca._CLOCK_SKEW)
    pair = ca.issue(authority, "one", role="buffer", days=1)
    good.cert.write_bytes(pair.certificate)
    good.key.write_bytes(pair.key)
    assert " is valid from " in problem(good)


@pytest.mark.parametrize(("name", "setting"), [("tls.crt", "CERT"), ("tls.key", "KEY"), ("ca.crt", "CA")])
def test_files_that_are_no_pem_are_refused(good: TlsFiles, tmp_path: Path, name: str, setting: str) -> None:
    for content in (b"", b"nothing", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"):
        (tmp_path / name).write_bytes(content)
        assert problem(good).startswith(f"TRINITY_BUFFER_TLS_{setting}: {tmp_path / name} ")


def test_a_certificate_without_identity_is_refused(good: TlsFiles, authority: ca.Pair) -> None:
    pair = ca.issue(authority, "nats", hosts=["nats"], days=1)
    good.cert.write_bytes(pair.certificate)
    good.key.write_bytes(pair.key)
    assert "has 0 URIs trinity://<role>/<name> in its subjectAltName, must have one" in problem(good)


@pytest.mark.parametrize(
    ("uris", "reason"),
    [
        (["trinity://reader/x", "trinity://operator/x"], "has 2 URIs"),
        (["spiffe://operator/x"], "has 0 URIs"),
        (["trinity://OPERATOR/x"], "the role 'OPERATOR', which is none"),
        (["trinity://operator@reader/x"], "the role 'operator@reader', which is none"),
        (["trinity://reader:1/x"], "the role 'reader:1', which is none"),
        (["trinity://reader/"], "must be trinity://<role>/<name>"),
        (["trinity://reader/../operator"], "must be trinity://<role>/<name>"),
        (["trinity://reader/x?role=operator"], "must be trinity://<role>/<name>"),
    ],
)
def test_a_caller_has_one_name_in_one_form(uris: list[str], reason: str) -> None:
    """By an authority of one's own, which may sign such certificates."""
    key = ec.generate_private_key(ec.SECP256R1())
    now, nothing = datetime.datetime.now(datetime.UTC), x509.Name([])
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])
    signed = (
        x509.CertificateBuilder(nothing, nothing, key.public_key(), 1, now, now + datetime.timedelta(days=1))
        .add_extension(names, critical=True)
        .sign(key, hashes.SHA256())
    )
    with pytest.raises(Unauthenticated, match=re.escape(reason)):
        caller_of_certificate({"x509_pem_cert": [signed.public_bytes(serialization.Encoding.PEM)]})


def test_the_three_settings_come_together() -> None:
    assert TlsFiles.from_environment({}) is None
    with pytest.raises(InvalidInput, match=r"TRINITY_TLS_KEY: is not set, but TRINITY_TLS_CERT is a\.crt; set"):
        TlsFiles.from_environment({"TRINITY_TLS_CERT": "a.crt", "TRINITY_TLS_CA": "ca.crt"})


@pytest.mark.parametrize("host", ["", "a b", "buffer:7001", "-x", "x" * 254, "http://x", "a/b", "a,b"])
def test_what_is_no_host_is_refused(authority: ca.Pair, host: str) -> None:
    with pytest.raises(InvalidInput, match=r"^host: is "):
        ca.issue(authority, "one", hosts=[host], days=1)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "x" * 65, "a\nb", ".hidden"])
def test_what_is_no_name_is_refused(authority: ca.Pair, name: str) -> None:
    with pytest.raises(InvalidInput, match=r"^name: is "):
        ca.issue(authority, name, role="buffer", days=1)


def test_a_certificate_of_a_host_alone_needs_one(authority: ca.Pair) -> None:
    with pytest.raises(InvalidInput, match=r"^hosts: is empty"):
        ca.issue(authority, "nats", days=1)
