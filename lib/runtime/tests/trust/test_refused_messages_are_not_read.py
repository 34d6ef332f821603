"""Who may not call makes a server hold no message: eight calls of 60 MB took 700 MB once, without an identity."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from trinity.runtime import rpc
from trinity.runtime.trust.gate import Gate
from trinity.runtime.trust.identity import Identity
from trinity.runtime.trust.roles import Role
from trinity.runtime.trust.tokens import KnownTokens, make_tokens

pytestmark = [pytest.mark.core, pytest.mark.timeout(120)]

COMMIT = "/trinity.api.buffer.v1.BufferService/CommitStep"
LARGE = bytes(32 * 2**20)


async def _length(request: bytes, _: Any) -> bytes:
    return str(len(request)).encode()


HANDLER = grpc.unary_unary_rpc_method_handler(_length, bytes, bytes)


async def _handler_for(gate: Gate | None, **metadata: str) -> Any:
    async def found(_: Any) -> Any:
        return HANDLER

    details: Any = SimpleNamespace(method=COMMIT, invocation_metadata=tuple(metadata.items()))
    return await rpc.Edge(gate).intercept_service(found, details)


async def test_the_handler_of_a_refused_call_reads_nothing(tmp_path: Path) -> None:
    make_tokens(tmp_path)
    gate = Gate(KnownTokens(tmp_path))
    shown = {role: {"authorization": f"Bearer {(tmp_path / 'tokens' / role).read_text()}"} for role in Role}
    for metadata in ({}, {"authorization": "Bearer another"}, shown[Role.EXPLORER]):
        assert (await _handler_for(gate, **metadata)).request_streaming
    assert not (await _handler_for(gate, **shown[Role.TRAINER])).request_streaming
    assert not (await _handler_for(Gate(None))).request_streaming, "with certificates the handshake decides"
    assert not (await _handler_for(None)).request_streaming


@pytest.mark.parametrize(
    ("role", "code"),
    [(None, "UNAUTHENTICATED"), (Role.EXPLORER, "PERMISSION_DENIED"), (Role.TRAINER, "OK")],
)
async def test_large_messages_get_the_same_answers_as_small_ones(tmp_path: Path, role: Role | None, code: str) -> None:
    make_tokens(tmp_path)
    server = grpc.aio.server(interceptors=[rpc.Edge(Gate(KnownTokens(tmp_path)))], options=rpc.SERVER_OPTIONS)
    _, service, method = COMMIT.split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: HANDLER}),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with rpc.channel(address, identity=Identity(role, tmp_path) if role else None) as channel:
        for message in (b"", LARGE):
            call = channel.unary_unary(COMMIT)(message, timeout=60)
            assert (await call.code()).name == code
            if code == "OK":
                assert await call == str(len(message)).encode()
            else:
                assert "CommitStep" in await call.details()
    await server.stop(None)
