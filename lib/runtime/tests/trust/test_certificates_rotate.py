"""Servers and channels over mTLS: who is refused, and that replaced files interrupt no call."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from trinity.runtime import rpc
from trinity.runtime.errors import Unauthenticated
from trinity.runtime.trust import ca
from trinity.runtime.trust.identity import of_certificate
from trinity.runtime.trust.tls import TlsFiles, TlsIdentity, peer_of, server_credentials

pytestmark = pytest.mark.core

_SECONDS = 20.0


@pytest.fixture(scope="module")
def authority() -> ca.Pair:
    return ca.make_authority(10)


def files(folder: Path, authority: ca.Pair, role: str, *, days: float = 10, roots: bytes = b"") -> TlsFiles:
    """The three files of `role/one`, made or replaced."""
    folder.mkdir(exist_ok=True)
    pair = ca.issue(authority, "one", role=role, hosts=["127.0.0.1", "localhost"], days=days)
    written = TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")
    for path, content in ((written.ca, roots or authority.certificate), (written.cert, pair.certificate)):
        path.write_bytes(content)
    written.key.touch(0o600)
    written.key.write_bytes(pair.key)
    return written


class Echo:
    """Answers with the caller; `Count` sends a number each time `go` is set, three times."""

    def __init__(self) -> None:
        self.go = asyncio.Semaphore(0)

    async def who(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        peer = peer_of(context.auth_context())
        return repr(peer and (peer.role, peer.name)).encode()

    async def count(self, request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        for number in range(3):
            await self.go.acquire()
            yield bytes([number])


@asynccontextmanager
async def serving(identity: TlsIdentity) -> AsyncIterator[tuple[str, Echo]]:
    echo, server = Echo(), grpc.aio.server()
    handlers = {
        "Who": grpc.unary_unary_rpc_method_handler(echo.who),
        "Count": grpc.unary_stream_rpc_method_handler(echo.count),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Echo", handlers)])
    port = server.add_secure_port("127.0.0.1:0", server_credentials(identity))
    await server.start()
    try:
        yield f"127.0.0.1:{port}", echo
    finally:
        await server.stop(0)


def connect(address: str, client: TlsIdentity) -> Any:
    return rpc.channel(address, identity=of_certificate(client))


async def who(channel: Any) -> str:
    return (await channel.unary_unary("/test.Echo/Who")(b"", timeout=_SECONDS)).decode()


async def refused(channel: grpc.aio.Channel) -> grpc.StatusCode:
    async with channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await who(channel)
    return caught.value.code()


async def test_a_caller_is_who_its_certificate_says(tmp_path: Path, authority: ca.Pair) -> None:
    server = TlsIdentity(files(tmp_path / "server", authority, "buffer"))
    client = TlsIdentity(files(tmp_path / "client", authority, "explorer"))
    async with serving(server) as (address, _), connect(address, client) as channel:
        assert await who(channel) == "('explorer', 'one')"


async def test_a_wrong_ca_an_expired_certificate_and_none_are_refused(tmp_path: Path, authority: ca.Pair) -> None:
    server = TlsIdentity(files(tmp_path / "server", authority, "buffer"))
    other = files(tmp_path / "other", ca.make_authority(10), "explorer", roots=authority.certificate)
    old = files(tmp_path / "old", authority, "explorer", days=-1)
    async with serving(server) as (address, _):
        other_channel = connect(address, TlsIdentity(other))
        assert await refused(other_channel) is grpc.StatusCode.UNAVAILABLE
        roots = grpc.ssl_channel_credentials(authority.certificate, old.key.read_bytes(), old.cert.read_bytes())
        assert await refused(grpc.aio.secure_channel(address, roots)) is grpc.StatusCode.UNAVAILABLE
        nameless = grpc.ssl_channel_credentials(authority.certificate)
        assert await refused(grpc.aio.secure_channel(address, nameless)) is grpc.StatusCode.UNAVAILABLE
        assert await refused(grpc.aio.insecure_channel(address)) is grpc.StatusCode.UNAVAILABLE


async def test_a_server_at_another_host_is_refused(tmp_path: Path, authority: ca.Pair) -> None:
    server_files = files(tmp_path / "server", authority, "buffer")
    pair = ca.issue(authority, "one", role="buffer", hosts=["buffer.example"], days=1)
    server_files.cert.write_bytes(pair.certificate)
    server_files.key.write_bytes(pair.key)
    client = TlsIdentity(files(tmp_path / "client", authority, "explorer"))
    async with serving(TlsIdentity(server_files)) as (address, _):
        assert await refused(connect(address, client)) is grpc.StatusCode.UNAVAILABLE


async def test_a_rotation_to_another_ca_interrupts_no_call(tmp_path: Path, authority: ca.Pair) -> None:
    new = ca.make_authority(10)
    both = authority.certificate + new.certificate
    server = TlsIdentity(files(tmp_path / "server", authority, "buffer", roots=both))
    client = TlsIdentity(files(tmp_path / "client", authority, "explorer", roots=both))
    async with serving(server) as (address, echo), connect(address, client) as channel:
        call = channel.unary_stream("/test.Echo/Count")(b"", timeout=_SECONDS)
        echo.go.release()
        assert await call.read() == b"\0"
        before = channel.newest()
        for folder, role in (("server", "buffer"), ("client", "trainer")):
            files(tmp_path / folder, new, role, roots=both)
            assert await who(channel) in ("('explorer', 'one')", "('trainer', 'one')")
        assert await who(channel) == "('trainer', 'one')"
        assert channel.newest() is not before
        del before
        echo.go.release()
        echo.go.release()
        assert [await call.read(), await call.read(), await call.read()] == [b"\1", b"\2", grpc.aio.EOF]
        files(tmp_path / "server", new, "buffer", roots=new.certificate)
        files(tmp_path / "client", new, "trainer", roots=new.certificate)
        assert await who(channel) == "('trainer', 'one')"


async def test_a_blocking_channel_follows_its_files_too(tmp_path: Path, authority: ca.Pair) -> None:
    server = TlsIdentity(files(tmp_path / "server", authority, "buffer"))
    client = TlsIdentity(files(tmp_path / "client", authority, "explorer"))
    async with serving(server) as (address, echo):

        def calls() -> list[Any]:
            with rpc.blocking_channel(address, identity=of_certificate(client)) as channel:
                ask = channel.unary_unary("/test.Echo/Who")
                numbers = channel.unary_stream("/test.Echo/Count")(b"", timeout=_SECONDS)
                before = ask(b"", timeout=_SECONDS)
                files(tmp_path / "client", authority, "trainer")
                after = ask(b"", timeout=_SECONDS)
                for _ in range(3):
                    loop.call_soon_threadsafe(echo.go.release)
                return [before, after, *numbers]

        loop = asyncio.get_running_loop()
        explorer, trainer = b"('explorer', 'one')", b"('trainer', 'one')"
        found = await asyncio.wait_for(asyncio.to_thread(calls), 3 * _SECONDS)
    assert found == [explorer, trainer, b"\0", b"\1", b"\2"]


def test_files_that_cannot_be_used_replace_nothing(tmp_path: Path, authority: ca.Pair) -> None:
    written = files(tmp_path / "client", authority, "explorer")
    identity = TlsIdentity(written)
    first = identity.current()
    written.cert.write_bytes(ca.issue(authority, "one", role="trainer", days=1).certificate)
    assert identity.current() is first, "the key still belongs to the old certificate"
    written.key.unlink()
    assert identity.current() is first
    files(tmp_path / "client", authority, "trainer", days=-1)
    assert identity.current() is first, "expired"
    files(tmp_path / "client", authority, "trainer")
    assert identity.current().role == "trainer"


def test_a_certificate_that_expired_on_an_open_connection_counts_no_more(authority: ca.Pair) -> None:
    valid, old = (ca.issue(authority, "gpu-7", role="explorer", days=days).certificate for days in (1, -1))
    peer = peer_of({"x509_pem_cert": [valid]})
    assert peer is not None and (peer.role, peer.name) == ("explorer", "gpu-7")
    assert peer_of({}) is None
    nameless = ca.issue(authority, "nats", hosts=["nats"], days=1).certificate
    for shown, problem in ((old, "expired at"), (nameless, "has 0 URIs"), (b"no PEM", "the caller's ")):
        with pytest.raises(Unauthenticated, match=problem):
            peer_of({"x509_pem_cert": [shown]})
