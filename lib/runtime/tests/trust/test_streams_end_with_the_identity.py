"""A stream that runs ends when its caller's token is replaced, or its certificate expires; calls of others go on."""

import asyncio
import datetime
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from trinity.runtime import files, rpc
from trinity.runtime.trust import ca, tls
from trinity.runtime.trust.gate import Gate
from trinity.runtime.trust.identity import Identity
from trinity.runtime.trust.roles import Role
from trinity.runtime.trust.tls import TlsFiles, TlsIdentity, server_credentials
from trinity.runtime.trust.tokens import KnownTokens, make_tokens

pytestmark = [pytest.mark.core, pytest.mark.timeout(120)]

BATCHES = "/trinity.api.buffer.v1.BufferService/StreamBatches"
EPISODE = "/trinity.api.environment.v1.EnvironmentService/Episode"


async def _answer_once(_: Any, __: Any) -> AsyncIterator[bytes]:
    yield b"first"
    await asyncio.Event().wait()


async def _echo(requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


def _server(gate: Gate) -> grpc.aio.Server:
    server = grpc.aio.server(interceptors=[rpc.Edge(gate)], options=rpc.SERVER_OPTIONS)
    given = ((BATCHES, grpc.unary_stream_rpc_method_handler(_answer_once, bytes, bytes)),
             (EPISODE, grpc.stream_stream_rpc_method_handler(_echo, bytes, bytes)))  # fmt: skip
    for path, handler in given:
        _, service, method = path.split("/")
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    return server


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "ADMIT_AGAIN_SECONDS", 0.05)


async def test_a_replaced_token_ends_the_stream_of_its_role_alone(tmp_path: Path) -> None:
    make_tokens(tmp_path)
    server = _server(Gate(KnownTokens(tmp_path)))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    trainer, explorer = (
        rpc.channel(address, identity=Identity(role, tmp_path)) for role in (Role.TRAINER, Role.EXPLORER)
    )
    batches, episode = trainer.unary_stream(BATCHES)(b""), explorer.stream_stream(EPISODE)()
    assert await batches.read() == b"first"
    files.write_atomic(tmp_path / "tokens/trainer", b"another")
    with pytest.raises(grpc.aio.AioRpcError, match="none of this run's") as caught:
        await batches.read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    await episode.write(b"turn")
    assert await episode.read() == b"turn"
    episode.cancel()
    await trainer.close()
    await explorer.close()
    await server.stop(None)


async def test_an_expired_certificate_ends_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = ca.make_authority(1)

    def identity(role: Role) -> TlsIdentity:
        pair, folder = ca.issue(authority, role, role=role, hosts=("localhost",), days=1), tmp_path / role
        folder.mkdir()
        found = TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")
        for path, content in ((found.cert, pair.certificate), (found.key, pair.key), (found.ca, authority.certificate)):
            files.write_atomic(path, content, mode=0o600)
        return TlsIdentity(found)

    server = _server(Gate(None))
    address = f"localhost:{server.add_secure_port('127.0.0.1:0', server_credentials(identity(Role.BUFFER)))}"
    await server.start()
    async with rpc.channel(address, identity=Identity(Role.TRAINER, tls=identity(Role.TRAINER))) as trainer:
        batches = trainer.unary_stream(BATCHES)(b"")
        assert await batches.read() == b"first"

        class Tomorrow(datetime.datetime):
            @classmethod
            def now(cls, tz: datetime.tzinfo | None = None) -> "Tomorrow":
                return super().now(tz) + datetime.timedelta(days=2)

        monkeypatch.setattr(tls.datetime, "datetime", Tomorrow)
        with pytest.raises(grpc.aio.AioRpcError, match="certificate expired at") as caught:
            await batches.read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    await server.stop(None)
