"""Servers refuse malformed bytes, too large messages and unknown calls, and keep serving."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from support.servers.buffer_run import BufferRun
from support.servers.nats import NatsServer
from support.servers.service import ServiceProcess
from trinity.api.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from trinity.api.environment.v1 import environment_pb2, environment_pb2_grpc
from trinity.api.explorer.v1 import explorer_pb2, explorer_pb2_grpc
from trinity.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from trinity.data.experience import Limits
from trinity.explorer.servicer import ExplorerServicer, check_prompt
from trinity.runtime import rpc
from trinity.runtime.errors import InvalidInput, to_status
from trinity.trainer.process.control import Control
from trinity.trainer.servicer import TrainerServicer

pytestmark = pytest.mark.core

NONSENSE = b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"
METHODS = {
    "buffer": ["PublishTasks", "CommitStep", "Rewind", "GetLedgerEntry", "Stats", "ListDeadLetters"],
    "environment": ["Describe", "Score"],
    "sync": ["Join", "Report", "Leave", "Publish", "ListVersions", "ListMembers"],
    "explorer": ["Generate", "Chat", "Drain", "Status"],
    "trainer": ["Status", "Pause", "Resume", "Checkpoint"],
}
STREAMS = {"buffer": "StreamBatches", "sync": "Watch"}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Starts buffer, sync and environment as processes."""
    folder = tmp_path_factory.mktemp("nonsense")
    nats = NatsServer(folder / "nats")
    nats.start()
    run = BufferRun(folder, nats).start()
    environment = ServiceProcess("environment", folder, REFLECTION="1").start()
    yield {"buffer": run.buffer.address, "sync": run.sync.address, "environment": environment.address}
    environment.kill()
    run.stop()
    nats.stop()


@pytest.fixture
async def edges(tmp_path: Path) -> AsyncIterator[dict[str, str]]:
    """Starts the edges of explorer and trainer, without their engines."""
    server = grpc.aio.server(interceptors=[rpc.Edge()], options=rpc.SERVER_OPTIONS)
    explorer_pb2_grpc.add_ExplorerServiceServicer_to_server(ExplorerServicer(None), server)  # type: ignore[arg-type]
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(TrainerServicer(Control(), "run", 1, tmp_path), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield {"explorer": f"127.0.0.1:{port}", "trainer": f"127.0.0.1:{port}"}
    await server.stop(grace=0)


def _path(service: str, method: str) -> str:
    return f"/trinity.api.{service}.v1.{service.capitalize()}Service/{method}"


async def _code(channel: grpc.aio.Channel, path: str, data: bytes) -> grpc.StatusCode:
    try:
        await channel.unary_unary(path)(data, timeout=20)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def _check(service: str, address: str) -> None:
    async with rpc.channel(address) as channel:
        for method in METHODS[service]:
            assert await _code(channel, _path(service, method), NONSENSE) is grpc.StatusCode.INVALID_ARGUMENT, method
        first = _path(service, METHODS[service][0])
        assert await _code(channel, _path(service, "Nothing"), b"") is grpc.StatusCode.UNIMPLEMENTED
    async with grpc.aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        huge = b"\x0a" + bytes(rpc.MAX_MESSAGE_BYTES + 1)
        assert await _code(channel, first, huge) is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("service", ["buffer", "environment", "sync"])
async def test_a_process_refuses_nonsense_and_goes_on(servers: dict[str, str], service: str) -> None:
    await _check(service, servers[service])
    async with rpc.channel(servers[service]) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("service", ["explorer", "trainer"])
async def test_an_edge_refuses_nonsense(edges: dict[str, str], service: str) -> None:
    await _check(service, edges[service])
    async with rpc.channel(edges["trainer"]) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        assert (await stub.Status(trainer_pb2.StatusRequest(), timeout=10)).world_size == 1
        assert explorer_pb2.DESCRIPTOR.services_by_name["ExplorerService"]


@pytest.mark.parametrize("service", STREAMS)
async def test_a_stream_refuses_nonsense(servers: dict[str, str], service: str) -> None:
    async with rpc.channel(servers[service]) as channel:
        call = channel.unary_stream(_path(service, STREAMS[service]))(NONSENSE, timeout=20)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in call:
                pass
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_episode_stream_refuses_nonsense(servers: dict[str, str]) -> None:
    async with rpc.channel(servers["environment"]) as channel:
        call = channel.stream_stream(_path("environment", "Episode"))(timeout=20)
        await call.write(NONSENSE)
        assert await asyncio.wait_for(call.code(), 20) is grpc.StatusCode.INVALID_ARGUMENT


async def test_reflection_is_off_unless_it_is_asked_for(servers: dict[str, str]) -> None:
    async with rpc.channel(servers["sync"]) as channel:
        # One message: a stream that the server ends at once may end with the client's own INTERNAL.
        path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        request = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
        assert await _code(channel, path, request) is grpc.StatusCode.UNIMPLEMENTED


async def test_reflection_names_the_service(servers: dict[str, str]) -> None:
    service = "environment"
    async with rpc.channel(servers[service]) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in stub.ServerReflectionInfo(iter([request]), timeout=10):
            names = [found.name for found in answer.list_services_response.service]
            assert f"trinity.api.{service}.v1.{service.capitalize()}Service" in names
            break


async def test_deep_json_and_endless_fences_are_the_callers_mistake(
    servers: dict[str, str], edges: dict[str, str]
) -> None:
    deep = "[" * 200_000
    async with rpc.channel(servers["buffer"]) as channel:
        request = buffer_pb2.FenceRequest(run="x", versions=range(1, 100_001))
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Fence(request, timeout=20)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND  # the run's rules, first of all
    assert to_status(RecursionError("too deep")) == (
        grpc.StatusCode.INVALID_ARGUMENT, "request: is nested too deeply",
    )  # fmt: skip
    async with rpc.channel(servers["environment"]) as channel:
        call = environment_pb2_grpc.EnvironmentServiceStub(channel).Episode(timeout=20)
        await call.write(
            environment_pb2.EpisodeRequest(reset=environment_pb2.Reset(environment="frozen_lake", task_json=deep))
        )
        assert await asyncio.wait_for(call.code(), 20) is grpc.StatusCode.INVALID_ARGUMENT


async def test_refused_calls_write_a_bounded_number_of_lines(servers: dict[str, str], tmp_path: Path) -> None:
    environment = ServiceProcess("environment", tmp_path).start()
    try:
        async with rpc.channel(environment.address) as channel:
            for _ in range(300):
                await _code(channel, _path("environment", "Score"), NONSENSE)
        lines = [event for event in environment.events() if str(event["event"]).startswith("rpc.call.refused")]
        assert 0 < len(lines) <= 100
    finally:
        environment.kill()


async def test_open_episodes_are_bounded(tmp_path: Path) -> None:
    environment = ServiceProcess("environment", tmp_path, MAX_EPISODES="3").start()
    try:
        async with rpc.channel(environment.address) as channel:
            stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
            reset = environment_pb2.EpisodeRequest(reset=environment_pb2.Reset(environment="frozen_lake"))
            calls = [stub.Episode(timeout=30) for _ in range(4)]
            for call in calls[:3]:
                await call.write(reset)
                assert (await call.read()).turn == 0
            await calls[3].write(reset)
            assert await asyncio.wait_for(calls[3].code(), 20) is grpc.StatusCode.RESOURCE_EXHAUSTED
            calls[0].cancel()
            async with asyncio.timeout(20):
                while True:
                    again = stub.Episode(timeout=30)
                    await again.write(reset)
                    if (await again.read()) is not grpc.aio.EOF:
                        break
                    await asyncio.sleep(0.05)
    finally:
        environment.kill()


@pytest.mark.parametrize("ids", [[], [-1], [100], [1] * 64])
def test_prompts_that_the_engine_cannot_continue_are_refused(ids: list[int]) -> None:
    with pytest.raises(InvalidInput, match="prompt_token_ids"):
        check_prompt(ids, Limits(tokens=64, vocabulary=100), "prompt_token_ids")
    check_prompt([99] * 63, Limits(tokens=64, vocabulary=100), "prompt_token_ids")
