"""The conformance suite against the environment service itself, over real gRPC."""

import json
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.conformance import Verdict, check_provider
from trinity.conformance.episodes import Sample
from trinity.environment.hub import Hub
from trinity.environment.servicer import EnvironmentServicer
from trinity.environments import ENVIRONMENTS
from trinity.environments.scorers import SCORERS
from trinity.runtime import rpc
from trinity.runtime.trust.attach_tokens import AttachTokens
from trinity.sdk.arena import Arena

pytestmark = pytest.mark.core

TEST = "echo 1 > /logs/verifier/reward.txt"
TASKS = {
    "countdown": '{"nums": [10, 4, 4], "target": 24}',
    "math": '{"question": "6 x 7?", "answer": "42"}',
    "sokoban": "{}",
    "frozen_lake": "{}",
    "sudoku": "{}",
    "number_line": "{}",
    "points24": "{}",
    "blackjack": "{}",
    "nim": "{}",
    "sandbox": json.dumps({"instruction": "Say hi.", "tests": [{"path": "test.sh", "text": TEST}]}),
}


@pytest.fixture
async def address() -> AsyncIterator[str]:
    arena = Arena(ENVIRONMENTS.values(), SCORERS)
    server = grpc.aio.server(interceptors=[rpc.Edge()], options=rpc.SERVER_OPTIONS)
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(
        EnvironmentServicer(arena, Hub(arena, AttachTokens())), server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(grace=0)
    await arena.drain(1)


@pytest.mark.parametrize("name", TASKS)
async def test_every_check_passes(address: str, name: str) -> None:
    sample = Sample(TASKS[name], action="<think>hm</think><answer>7</answer>", max_steps=4)
    results = [result async for result in check_provider(address, sample, name)]
    assert [result for result in results if result.verdict is Verdict.FAILED] == []
    played = {result.check: result.verdict for result in results if result.subject == name}
    assert played["an episode is played, one sound answer per action"] is Verdict.OK


@pytest.mark.parametrize("name", SCORERS)
async def test_every_scorer_is_sound_on_hostile_answers(address: str, name: str) -> None:
    results = [result async for result in check_provider(address, Sample(), name)]
    (scored,) = [result for result in results if result.subject == name]
    assert scored.verdict is Verdict.OK, scored.detail
