"""An answer of 100 MB breaks the contract: no attempt waits for room at the provider that sent it."""

import grpc
import grpc.aio
import pytest

from support.fakes.environments.environment_provider import LIES, ScriptedProvider
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.explorer.environments.client import EnvironmentClient
from trinity.explorer.environments.types import EnvironmentCause, EnvironmentFailed

pytestmark = pytest.mark.core


async def test_an_answer_beyond_the_limit_breaks_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIES, "flood", {"observation": "x" * 100_000_000})
    provider = ScriptedProvider("flood", step_seconds=20.0)
    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(provider, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    client = EnvironmentClient("127.0.0.1:1", [("flood", address)])
    try:
        async with client.episode("flood", {}) as episode:
            await episode.reset()
            with pytest.raises(EnvironmentFailed, match="larger than max") as failed:
                await episode.step("1")
        assert (failed.value.cause, failed.value.passing) == (EnvironmentCause.CONTRACT_VIOLATION, False)
    finally:
        await client.close()
        await server.stop(grace=0)
