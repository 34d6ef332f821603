"""One table allows and denies callers with certificates and with tokens, on real services."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from support.servers.certificates import authority_of, identity_of, make_certificates, signed_by, tls_settings
from support.servers.nats import NatsServer
from support.servers.service import ServiceProcess
from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.api.sync.v1 import sync_pb2_grpc
from trinity.cluster.certs import certs
from trinity.runtime import rpc
from trinity.runtime.trust import ca
from trinity.runtime.trust.identity import Identity
from trinity.runtime.trust.roles import METHODS, Role
from trinity.runtime.trust.tokens import make_tokens
from trinity.sdk import Environment, Observation, Tls, attaching

pytestmark = pytest.mark.core

TOKEN = "for-attaching"
HEALTH = "/grpc.health.v1.Health/Check"
EPISODE = "/trinity.api.environment.v1.EnvironmentService/Episode"
DESCRIBE = "/trinity.api.environment.v1.EnvironmentService/Describe"
OK, DENIED, GONE = grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates") / "identity")


@pytest.fixture(scope="module")
def service(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """Starts an environment service with a certificate."""
    folder = tmp_path_factory.mktemp("service")
    process = ServiceProcess("environment", folder, ATTACH_TOKEN=TOKEN, **tls_settings(certificates, "environment"))
    yield process.start()
    process.stop()


async def called(channel: grpc.aio.Channel, path: str) -> tuple[grpc.StatusCode, str]:
    """Returns the code and text that answer an empty request."""
    async with channel:
        call = channel.unary_unary(path)(b"", timeout=20)
        return await call.code(), str(await call.details())


@pytest.mark.parametrize("role", Role)
async def test_a_certificate_gives_its_role(service: ServiceProcess, certificates: Path, role: Role) -> None:
    identity = identity_of(certificates, role)
    assert (await called(rpc.channel(service.address, identity=identity), HEALTH))[0] is OK
    code, reason = await called(rpc.channel(service.address, identity=identity), DESCRIBE)
    if role in METHODS[DESCRIBE]:
        assert code is OK
    else:
        assert code is DENIED and f"role {role} may not call {DESCRIBE[1:]}" in reason


async def test_no_caller_without_a_certificate_is_answered(service: ServiceProcess, certificates: Path) -> None:
    assert (await called(rpc.channel(service.address, identity=None), HEALTH))[0] is GONE, "without TLS"
    roots = grpc.ssl_channel_credentials((certificates / "reader/ca.crt").read_bytes())
    assert (await called(grpc.aio.secure_channel(service.address, roots), HEALTH))[0] is GONE


async def test_a_certificate_of_another_authority_is_refused(
    service: ServiceProcess, certificates: Path, tmp_path: Path
) -> None:
    other = make_certificates(tmp_path / "other")
    (other / "operator/ca.crt").write_bytes((certificates / "operator/ca.crt").read_bytes())
    code, _ = await called(rpc.channel(service.address, identity=identity_of(other, "operator")), HEALTH)
    assert code is GONE
    stranger = make_certificates(tmp_path / "stranger")
    code, reason = await called(rpc.channel(service.address, identity=identity_of(stranger, "operator")), HEALTH)
    assert code is GONE and "CERTIFICATE_VERIFY_FAILED" in reason, "the caller checks the server as well"


@pytest.mark.parametrize(("role", "days"), [("operator", -1), ("", 1), ("boss", 1)])
async def test_expired_nameless_and_unknown_roles_are_no_callers(
    service: ServiceProcess, certificates: Path, role: str, days: float
) -> None:
    """The test bypasses the caller's checks: only the server's count."""
    authority = authority_of(certificates)
    pair = ca.issue(authority, "other", role=role, hosts=["localhost"], days=days)
    shown = grpc.ssl_channel_credentials(authority.certificate, pair.key, pair.certificate)
    code, _ = await called(grpc.aio.secure_channel(service.address, shown), HEALTH)
    assert code is (GONE if days < 0 else grpc.StatusCode.UNAUTHENTICATED)


@pytest.mark.timeout(120)
async def test_a_revoked_certificate_is_refused_and_others_are_not(service: ServiceProcess, certificates: Path) -> None:
    for name in ("gpu-8", "gpu-9"):
        certs.issue("explorer", name, certificates)
    lost, kept = (rpc.channel(service.address, identity=identity_of(certificates, name)) for name in ("gpu-8", "gpu-9"))
    streams = [channel.stream_stream(EPISODE)(timeout=60) for channel in (lost, kept)]
    for channel in (lost, kept):
        await channel.unary_unary(HEALTH)(b"", timeout=20)
    certs.revoke(["gpu-8"], certificates)
    with pytest.raises(grpc.aio.AioRpcError, match=r"certificate [0-9a-f]{40} of gpu-8 is revoked") as refused:
        await lost.unary_unary(HEALTH)(b"", timeout=20)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert await streams[0].code() is grpc.StatusCode.UNAUTHENTICATED, "on an open stream too"
    await kept.unary_unary(HEALTH)(b"", timeout=20)
    assert not streams[1].done()
    streams[1].cancel()
    certs.rotate(["gpu-8"], certificates)
    await lost.unary_unary(HEALTH)(b"", timeout=20)
    for channel in (lost, kept):
        await channel.close()


@pytest.mark.parametrize("role", ["explorer", ""])
async def test_a_holder_of_a_certificate_is_no_authority(
    service: ServiceProcess, certificates: Path, role: str
) -> None:
    """TLS accepts both, because it ignores the path length of the authority's certificate."""
    authority = authority_of(certificates)
    holder = signed_by(authority, role, "gpu-7", may_sign=True)
    forged = signed_by(holder, "operator", "operator", may_sign=False)
    for chain, key in ((holder.certificate, holder.key), (forged.certificate + holder.certificate, forged.key)):
        shown = grpc.ssl_channel_credentials(authority.certificate, key, chain)
        code, reason = await called(grpc.aio.secure_channel(service.address, shown), HEALTH)
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert "certificate: CN=gpu-7 names a holder and is a CA's (CA:TRUE)" in reason


async def test_a_certificate_that_is_none_does_not_attach_by_a_token(
    service: ServiceProcess, certificates: Path
) -> None:
    """Attach accepts callers without an identity of the run, and refuses a false identity."""
    holder = signed_by(authority_of(certificates), "provider", "gpu-7", may_sign=True)
    shown = grpc.ssl_channel_credentials(authority_of(certificates).certificate, holder.key, holder.certificate)
    async with grpc.aio.secure_channel(service.address, shown) as channel:
        call = channel.stream_stream("/trinity.api.environment.v1.EnvironmentService/Attach")(timeout=20)
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "is a CA's" in str(await call.details())


async def test_a_token_does_not_replace_a_certificate(service: ServiceProcess, tmp_path: Path) -> None:
    make_tokens(tmp_path)
    assert (await called(rpc.channel(service.address, identity=Identity(Role.OPERATOR, tmp_path)), HEALTH))[0] is GONE


async def test_an_explorer_joins_under_the_name_of_its_certificate(
    nats_server: NatsServer, certificates: Path, tmp_path: Path
) -> None:
    sync = ServiceProcess("sync", tmp_path, NATS_URL=nats_server.url, **tls_settings(certificates, "sync")).start()
    able = pb.Capabilities(transports=["folder"], dtype="float32", tensor_parallel_size=1, engines=1)
    try:
        async with rpc.channel(sync.address, identity=identity_of(certificates, "explorer")) as channel:
            stub = sync_pb2_grpc.SyncServiceStub(channel)
            for name in ("explorer", "explorer/host-1"):
                await stub.Join(pb.JoinRequest(run="names", explorer_id=name, capabilities=able, pid=1), timeout=30)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Join(pb.JoinRequest(run="names", explorer_id="other", capabilities=able, pid=1), timeout=30)
        assert refused.value.code() is DENIED
        assert "explorer_id: is 'other', but the caller's certificate is 'explorer'" in str(refused.value.details())
    finally:
        sync.stop()


class Guess(Environment):
    isolation = "none"

    def reset(self, task: dict[str, object], args: dict[str, object], seed: int) -> Observation:
        return Observation("Guess.")

    def step(self, action: str) -> Observation:
        return Observation("Right.", reward=1.0, done=True)


async def test_a_provider_attaches_by_its_certificate_and_token(service: ServiceProcess, certificates: Path) -> None:
    files = tls_settings(certificates, "provider")
    tls = Tls(files["TLS_CERT"], files["TLS_KEY"], files["TLS_CA"])
    async with asyncio.timeout(60), attaching(Guess, address=service.address, token=TOKEN, tls=tls) as provider:
        assert provider.attached.is_set()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"TLS_KEY": "{sync}/tls.key"},
            "TRINITY_ENVIRONMENT_TLS_KEY: {sync}/tls.key does not belong to the certificate",
        ),
        ({"TLS_CA": "/nowhere/ca.crt"}, "TRINITY_ENVIRONMENT_TLS_CA: /nowhere/ca.crt cannot be read: No such file"),
        (
            {"TLS_REVOKED": "/nowhere/list"},
            "TRINITY_ENVIRONMENT_TLS_REVOKED: /nowhere/list cannot be read: No such file",
        ),
        ({"TLS_KEY": None}, "TRINITY_ENVIRONMENT_TLS_KEY: is not set, but TRINITY_ENVIRONMENT_TLS_CERT is"),
        (
            {"TLS_CERT": "{sync}/tls.crt", "TLS_KEY": "{sync}/tls.key"},
            "TRINITY_ENVIRONMENT_TLS_CERT: {sync}/tls.crt is for the role sync, must be for environment",
        ),
        (
            {"TLS_CERT": "{old}/tls.crt", "TLS_KEY": "{old}/tls.key"},
            "TRINITY_ENVIRONMENT_TLS_CERT: {old}/tls.crt expired at",
        ),
        (
            {"TLS_CERT": "{signs}/tls.crt", "TLS_KEY": "{signs}/tls.key"},
            "TRINITY_ENVIRONMENT_TLS_CERT: {signs}/tls.crt is a certificate: CN=signs names a holder and is a CA's",
        ),
    ],
)
def test_a_service_refuses_certificates_that_it_cannot_use(
    certificates: Path, tmp_path: Path, changes: dict[str, str | None], says: str
) -> None:
    certs.issue("environment", "old", certificates, days=-1)
    certs.issue("environment", "signs", certificates)
    pair = signed_by(authority_of(certificates), "environment", "signs", may_sign=True)
    (certificates / "signs/tls.crt").write_bytes(pair.certificate)
    (certificates / "signs/tls.key").write_bytes(pair.key)
    places = {name: str(certificates / name) for name in ("sync", "old", "signs")}
    settings = {**tls_settings(certificates, "environment"), **changes}
    given = {name: value.format(**places) for name, value in settings.items() if value is not None}
    process = ServiceProcess("environment", tmp_path, **given).start(wait_seconds=0)
    assert process.wait(60) == 2, "a restart would end the same way"
    assert says.format(**places) in process.tail()
