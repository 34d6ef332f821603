"""`trinity env list` and `trinity status`: every provider with its health, since when and why."""

import asyncio
import re
import time

import grpc.aio
import pytest

from support.fakes.environments.environment_provider import ScriptedProvider, serving
from support.fakes.environments.odd_environments import Odd
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.environment.hub import Hub
from trinity.environment.servicer import EnvironmentServicer
from trinity.reading.alarms import Known, alarms
from trinity.reading.client import provider_facts
from trinity.reading.wire import provider_line
from trinity.runtime import rpc
from trinity.runtime.process import free_port
from trinity.runtime.trust.attach_tokens import AttachTokens
from trinity.sdk import attaching
from trinity.sdk.arena import Arena

pytestmark = pytest.mark.core


async def test_each_has_its_health_and_what_it_offers() -> None:
    arena = Arena()
    hub = Hub(arena, AttachTokens("secret"))
    server = grpc.aio.server(interceptors=[rpc.Edge()])
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(EnvironmentServicer(arena, hub), server)
    service = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    silent = f"127.0.0.1:{free_port()}"
    async with (
        attaching(Odd, address=service, token="secret", name="attached"),
        serving(ScriptedProvider("good")) as up,
    ):
        named = [("good", up.address), ("bad", silent), ("odd", "attached"), ("later", "attached")]
        there = {one["provider"]: one for one in await provider_facts(service, named)}
    async with asyncio.timeout(20):
        while hub.attachments:
            await asyncio.sleep(0.02)
    (gone,) = await provider_facts(service, [])
    await server.stop(grace=0)
    assert {name: one["health"] for name, one in there.items()} == {
        "attached": "serving",
        up.address: "serving",
        silent: "away",
        "later": "away",
    }
    assert (there["attached"]["offers"], there[silent]["offers"]) == (["odd"], ["bad"])
    assert abs(there["attached"]["since_seconds"] - time.time()) < 60
    assert (gone["health"], gone["offers"]) == ("away", ["odd"])
    said = r"attached: away for \d+ s; offers odd; the attached provider attached went away"
    assert re.fullmatch(said, provider_line(gone))
    status = {"providers": [there["attached"], gone], "explorers": [], "processes": []}
    (alarm,) = alarms(Known(None, status, [], []))
    assert alarm.text.startswith("provider attached: away for ")


async def test_a_service_that_does_not_answer_is_named() -> None:
    silent = f"127.0.0.1:{free_port()}"
    (one,) = await provider_facts(silent, [("odd", "attached")])
    assert (one["health"], one["reason"]) == ("away", f"{silent} does not answer (UNAVAILABLE)")
