"""`rpc.ask` raises the TrinityError of a gRPC code: a refusal in the service's words, any other failure with the
service, its address, the method and the fix; it repeats a call for as long as its caller says."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.api.sync.v1 import sync_pb2_grpc
from trinity.runtime import rpc
from trinity.runtime.errors import (
    AlreadyExists,
    Conflict,
    DataLoss,
    Full,
    InvalidInput,
    NotFound,
    PermissionDenied,
    TimedOut,
    TrinityError,
    Unauthenticated,
    Unavailable,
    error_of,
    to_status,
)

pytestmark = pytest.mark.core

REFUSALS = (NotFound, AlreadyExists, Conflict, Full, Unauthenticated, PermissionDenied, DataLoss)


class Service(sync_pb2_grpc.SyncServiceServicer):
    """Fails with the errors in turn, then answers; a watch answers once and fails."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.calls = 0

    async def ListVersions(self, request: Any, context: Any) -> pb.ListVersionsResponse:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        if request.limit == 7:
            await asyncio.sleep(60)
        return pb.ListVersionsResponse()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[pb.WatchResponse]:
        yield pb.WatchResponse(gate_step=3)
        raise self.errors.pop(0)


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Service, str]]:
    monkeypatch.setattr(rpc, "RETRY_SECONDS", (0.001, 0.002))
    server, service = grpc.aio.server(interceptors=[rpc.Edge()]), Service()
    sync_pb2_grpc.add_SyncServiceServicer_to_server(service, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield service, address
    await server.stop(0)


async def ask(address: str, limit: int = 1, seconds: float = 5.0, again: Callable[[], bool] | None = None) -> Any:
    async with rpc.channel(address) as channel:
        stub = sync_pb2_grpc.SyncServiceStub(channel)
        return await rpc.ask(stub.ListVersions, pb.ListVersionsRequest(limit=limit), seconds=seconds, again=again)


@pytest.mark.parametrize("kind", REFUSALS)
async def test_a_refusal_keeps_its_class_and_its_words(served: tuple[Service, str], kind: type[TrinityError]) -> None:
    service, address = served
    service.errors = [kind("version 9: is not there; take one of 1, 2")]
    with pytest.raises(kind, match=r"^version 9: is not there; take one of 1, 2$"):
        await ask(address)


async def test_invalid_input_keeps_its_field(served: tuple[Service, str]) -> None:
    service, address = served
    service.errors = [InvalidInput("limit", "is -1: give 1 or more")]
    with pytest.raises(InvalidInput, match=r"^limit: is -1: give 1 or more$") as raised:
        await ask(address)
    assert raised.value.field == "limit"


async def test_any_other_failure_names_service_address_method_and_fix(served: tuple[Service, str]) -> None:
    service, address = served
    service.errors = [ValueError("odd")]
    with pytest.raises(TrinityError) as raised:
        await ask(address)
    expected = f"the sync service at {address} failed in ListVersions (ValueError: odd); its log says why"
    assert str(raised.value) == expected
    assert raised.value.code is grpc.StatusCode.INTERNAL
    with pytest.raises(TimedOut, match=rf"the sync service at {address} did not answer ListVersions in time .*; check"):
        await ask(address, limit=7, seconds=0.1)
    with pytest.raises(Unavailable, match=r"the sync service at 127.0.0.1:1 does not answer ListVersions .*; check"):
        await ask("127.0.0.1:1")
    async with rpc.channel(address) as channel:
        stub = sync_pb2_grpc.SyncServiceStub(channel)
        with pytest.raises(TrinityError, match=r"has no Pin .* install the same version") as raised:
            await rpc.ask(stub.Pin, pb.PinRequest(), seconds=5)
    assert raised.value.code is grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(Unavailable, match="was closed before Pin"):
        await rpc.ask(stub.Pin, pb.PinRequest(), seconds=5)


async def test_a_call_is_repeated_while_its_caller_says_so(served: tuple[Service, str]) -> None:
    service, address = served
    service.errors = [Unavailable("NATS is away"), TimedOut("slow")]
    await ask(address, again=lambda: True)
    assert service.calls == 3
    service.errors = [Unavailable("NATS is away"), Unavailable("NATS is away"), Unavailable("NATS is away")]
    left = iter([True, False])
    with pytest.raises(Unavailable):
        await ask(address, again=lambda: next(left))
    assert service.calls == 5
    service.errors = [Conflict("not now")]
    with pytest.raises(Conflict):
        await ask(address, again=lambda: True)


async def test_threads_ask_in_the_same_way(served: tuple[Service, str]) -> None:
    service, address = served
    service.errors = [Unavailable("NATS is away"), NotFound("version 9")]

    def ask_twice() -> None:
        with rpc.blocking_channel(address) as channel:
            stub = sync_pb2_grpc.SyncServiceStub(channel)
            with pytest.raises(NotFound, match=r"^version 9$"):
                rpc.ask_blocking(stub.ListVersions, pb.ListVersionsRequest(), seconds=5, again=lambda: True)
            assert rpc.ask_blocking(stub.ListVersions, pb.ListVersionsRequest(), seconds=5) == pb.ListVersionsResponse()

    await asyncio.to_thread(ask_twice)


async def test_a_stream_raises_the_same_errors(served: tuple[Service, str]) -> None:
    service, address = served
    service.errors = [Conflict("the lease of a has ended; join again")]
    async with rpc.channel(address) as channel:
        stub, seen = sync_pb2_grpc.SyncServiceStub(channel), []
        with pytest.raises(Conflict, match=r"^the lease of a has ended; join again$"), rpc.translate(stub.Watch):
            async for answer in stub.Watch(pb.WatchRequest()):
                seen.append(answer.gate_step)
    assert seen == [3]


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_every_code_comes_back_from_its_error(code: grpc.StatusCode) -> None:
    assert to_status(error_of(code, "field: text")) == (code, "field: text")
