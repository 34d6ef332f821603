"""An episode is one stream: full games, wrong order, slow, crashing and invalid environments, clients that leave."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest

from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.environment.hub import Hub
from trinity.environment.servicer import EnvironmentServicer
from trinity.environments import ENVIRONMENTS
from trinity.environments.scorers import SCORERS
from trinity.runtime import rpc
from trinity.runtime.trust.attach_tokens import AttachTokens
from trinity.sdk.arena import Arena
from trinity.sdk.contract import PROTOCOL_VERSION
from trinity.sdk.environment import Description, Environment, Observation

pytestmark = pytest.mark.core

PUZZLE = {"nums": [10, 4, 4], "target": 24}
closed: list[str] = []


class Odd(Environment):
    """Does what the action says."""

    description = Description("odd", "for tests", max_parallel_episodes=150, step_timeout_seconds=0.5)

    def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        return Observation("ready")

    def step(self, action: str) -> Observation:
        if action == "raise":
            raise RuntimeError("broken inside")
        if action == "hang":
            time.sleep(1.5)
        if action == "exit":
            raise SystemExit(3)
        if action == "text":
            return "hello"  # type: ignore[return-value]
        text = "x" * 1_100_000 if action == "long" else ""
        info: Any = {"unsendable": {"it": self}, "listed": [1]}.get(action, {})
        return Observation(text, float("nan") if action == "lie" else 0.5, action == "done", info)

    def close(self) -> None:
        closed.append("odd")


@dataclass
class Server:
    stub: environment_pb2_grpc.EnvironmentServiceStub
    arena: Arena


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    closed.clear()
    arena = Arena([*ENVIRONMENTS.values(), Odd], SCORERS)
    running = grpc.aio.server(interceptors=[rpc.Edge()], options=rpc.SERVER_OPTIONS)
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(
        EnvironmentServicer(arena, Hub(arena, AttachTokens())), running
    )
    port = running.add_insecure_port("127.0.0.1:0")
    await running.start()
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        yield Server(environment_pb2_grpc.EnvironmentServiceStub(channel), arena)
    await running.stop(grace=0)
    await arena.drain(2)


def reset(name: str, task: dict[str, Any] | None = None, args: str = "") -> pb.EpisodeRequest:
    return pb.EpisodeRequest(reset=pb.Reset(environment=name, task_json=json.dumps(task or {}), args_json=args))


def act(text: str, turn: int = 1) -> pb.EpisodeRequest:
    return pb.EpisodeRequest(action=pb.Action(text=text, turn=turn))


async def refusal(server: Server, *messages: pb.EpisodeRequest) -> tuple[grpc.StatusCode, str]:
    call = server.stub.Episode(timeout=20)
    for message in messages:
        await call.write(message)
    try:
        for _ in messages:
            assert await call.read() is not grpc.aio.EOF
    except (grpc.aio.AioRpcError, AssertionError, asyncio.InvalidStateError):
        pass
    return await call.code(), await call.details()


async def test_a_game_of_countdown(server: Server) -> None:
    call = server.stub.Episode(timeout=20)
    await call.write(reset("countdown", PUZZLE))
    assert "24" in (await call.read()).observation
    await call.write(act("<answer>10+4+4</answer>"))
    wrong = await call.read()
    assert (wrong.reward, wrong.done) == (0, False)
    assert "its value is 18" in wrong.observation
    await call.write(act("<answer>(10-4)*4</answer>", 2))
    right = await call.read()
    assert (right.reward, right.done, right.metrics["attempts"]) == (1, True, 2)
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert server.arena.open == 0


@pytest.mark.parametrize(
    ("messages", "code", "text"),
    [
        ([act("x")], grpc.StatusCode.INVALID_ARGUMENT, "reset: is missing"),
        ([reset("contdown")], grpc.StatusCode.NOT_FOUND, "contdown"),
        ([reset("countdown", {"nums": "1,2"})], grpc.StatusCode.INVALID_ARGUMENT, "task.nums"),
        ([reset("countdown", PUZZLE, '{"max_attempts": 0}')], grpc.StatusCode.INVALID_ARGUMENT, "args.max_attempts"),
        ([reset("countdown", PUZZLE, "[]")], grpc.StatusCode.INVALID_ARGUMENT, "reset.args_json"),
        ([reset("odd"), reset("odd")], grpc.StatusCode.INVALID_ARGUMENT, "action: is missing"),
        ([reset("odd"), act("raise")], grpc.StatusCode.INTERNAL, "broken inside"),
        ([reset("odd"), act("hang")], grpc.StatusCode.DEADLINE_EXCEEDED, "0.5 s"),
        ([reset("odd"), act("lie")], grpc.StatusCode.DATA_LOSS, "nan"),
        ([reset("odd"), act("fine", 2)], grpc.StatusCode.INVALID_ARGUMENT, "action.turn: is 2, must be 1"),
        ([reset("odd"), act("done"), act("more", 2)], grpc.StatusCode.FAILED_PRECONDITION, "the episode is done"),
        ([reset("odd"), act("text")], grpc.StatusCode.INTERNAL, "must be an Observation"),
        ([reset("odd"), act("listed")], grpc.StatusCode.INTERNAL, "info of its observation is list"),
        ([reset("odd"), act("unsendable")], grpc.StatusCode.INTERNAL, "cannot be sent"),
        ([reset("odd"), act("long")], grpc.StatusCode.DATA_LOSS, "longer than"),
        ([reset("odd"), act("exit")], grpc.StatusCode.INTERNAL, "SystemExit: 3"),
        ([reset("odd"), act("x" * 1_100_000)], grpc.StatusCode.INVALID_ARGUMENT, "action.text"),
    ],
)
async def test_a_failure_is_reported_and_fails_its_own_episode_alone(
    server: Server, messages: list[pb.EpisodeRequest], code: grpc.StatusCode, text: str
) -> None:
    other = server.stub.Episode(timeout=20)
    await other.write(reset("odd"))
    await other.read()
    found, details = await refusal(server, *messages)
    assert (found, text in details) == (code, True), (found, details)
    await other.write(act("fine"))
    assert (await other.read()).reward == 0.5
    await other.done_writing()
    await other.code()
    async with asyncio.timeout(10):
        while server.arena.open:
            await asyncio.sleep(0.05)


async def test_a_hundred_clients_that_go_away_leave_nothing(server: Server) -> None:
    threads = threading.active_count()
    calls = []
    for _ in range(100):
        call = server.stub.Episode(timeout=60)
        await call.write(reset("odd"))
        calls.append(call)
    await asyncio.gather(*(call.read() for call in calls))
    assert server.arena.open == 100
    assert threading.active_count() >= threads + 100
    for call in calls:
        call.cancel()
    async with asyncio.timeout(20):
        while server.arena.open or threading.active_count() > threads:
            await asyncio.sleep(0.05)
    assert len(closed) == 100


async def test_the_announced_limit_is_kept(server: Server) -> None:
    calls = [server.stub.Episode(timeout=60) for _ in range(150)]
    for call in calls:
        await call.write(reset("odd"))
    await asyncio.gather(*(call.read() for call in calls))
    code, details = await refusal(server, reset("odd"))
    assert (code, "its limit" in details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
    for call in calls:
        call.cancel()


async def test_scores_come_in_order_and_a_bad_item_hurts_itself_alone(server: Server) -> None:
    items = [pb.ScoreItem(response="42", truth="42"), pb.ScoreItem(response="1", truth="42")]
    answer = await server.stub.Score(pb.ScoreRequest(scorer="accuracy_reward", items=items), timeout=20)
    assert [score.reward for score in answer.scores] == [1, 0]
    items = [
        pb.ScoreItem(response="<answer>1+2</answer>", task_json='{"nums": [1, 2], "target": 3}'),
        pb.ScoreItem(response="<answer>1+2</answer>", task_json='{"nums": "x"}'),
        pb.ScoreItem(response="<answer>1+2</answer>", task_json="{"),
    ]
    answer = await server.stub.Score(pb.ScoreRequest(scorer="countdown_reward", items=items), timeout=20)
    assert [score.reward for score in answer.scores] == [1, 0, 0]
    assert "task.nums" in answer.scores[1].error
    assert "task_json" in answer.scores[2].error


async def test_an_unknown_scorer_is_named_with_the_known_ones(server: Server) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await server.stub.Score(pb.ScoreRequest(scorer="acuracy_reward"), timeout=20)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert "accuracy_reward" in (refused.value.details() or "")


async def test_describe_lists_what_is_there(server: Server) -> None:
    answer = await server.stub.Describe(pb.DescribeRequest(), timeout=20)
    assert {e.name for e in answer.environments} == {*ENVIRONMENTS, "odd"}
    assert answer.protocol_version == PROTOCOL_VERSION
    assert "math_reward" in answer.scorers
