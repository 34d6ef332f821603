"""The conformance suite passes providers that keep the contract, and fails others by the right check."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from support.fakes.environments.odd_environments import EvenCoroutine, EvenInProcess, OddInLoop
from support.fakes.environments.snapshots import Windy, WindyInCoroutines, WindyInProcess, WindyInThread
from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.conformance import Result, Sample, Verdict, check_provider, episodes
from trinity.sdk import Description, Environment, InvalidInput, Observation, serving
from trinity.sdk.arena import Arena
from trinity.sdk.contract import Reset, info_problem
from trinity.sdk.provider import client
from trinity.sdk.scoring import ScoreItem
from trinity.sdk.servicer import ProviderServicer

pytestmark = pytest.mark.core

PLAYED = "an episode is played, one sound answer per action"


class Count(Environment):
    """Counts to three."""

    description = Description("count", "Counts to three.", 12, step_timeout_seconds=3.0)
    isolation = "none"

    def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        self.count = 0
        return Observation(f"seed {seed}")

    def step(self, action: str) -> Observation:
        self.count += 1
        return Observation(f"{self.count}", reward=0.5, done=self.count == 3)


class Shared(Count):
    counts = itertools.count()

    def step(self, action: str) -> Observation:
        return Observation(f"{self.count}", reward=len(self.boards), done=False)

    def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        self.boards.append(self)
        return super().reset(task, args, seed)

    def close(self) -> None:
        self.boards.remove(self)

    boards: list[object] = []  # noqa: RUF012 - the mistake that is to be found


class Generous(Count):
    """Its rewards are above the bound of a run."""

    def step(self, action: str) -> Observation:
        return replace(super().step(action), reward=6e5)


class Announced(Count):
    description = Description("count", "Counts to three.", 12, step_timeout_seconds=3.0, deterministic=True)


class Random(Count):
    numbers = itertools.count()

    def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        super().reset(task, args, seed)
        return Observation(str(next(self.numbers)))


class LateRandom(Announced):
    """Announces that it is deterministic, and its last turn is not."""

    numbers = itertools.count()

    def step(self, action: str) -> Observation:
        made = super().step(action)
        return replace(made, info={"drawn": next(self.numbers)}) if made.done else made


class Fragile(Count):
    def step(self, action: str) -> Observation:
        if "<think>" in action:
            raise RecursionError("too deep")
        return super().step(action)


def length(item: ScoreItem, args: dict[str, Any]) -> float:
    return float(len(item.response))


class Liar(ProviderServicer):
    """An honest provider whose messages are changed on their way."""

    def __init__(self, kind: str, environment: type[Environment] = Count) -> None:
        self.kind = kind
        self.numbers = itertools.count()
        super().__init__(Arena([environment], {"length": length}))

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.DescribeResponse:
        answer = await super().Describe(request, context)
        if self.kind == "version":
            answer.protocol_version = 1
        if self.kind == "silent":
            answer.environments[0].step_timeout_seconds = 0.1
        if self.kind == "endless time":
            answer.environments[0].step_timeout_seconds = 0
        if self.kind == "limit":
            answer.environments[0].max_parallel_episodes = 3
        return answer

    async def Episode(
        self, requests: AsyncIterator[pb.EpisodeRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.EpisodeResponse]:
        async for response in super().Episode(self._changed(requests), context):
            if response.turn == 1:
                if self.kind == "nan":
                    response.reward = float("nan")
                elif self.kind == "info":
                    response.info_json = '{"success": "yes"}'
                elif self.kind == "turn":
                    response.turn = 4
                elif self.kind == "silent":
                    await asyncio.sleep(60)
                elif self.kind == "twice":
                    yield response
            if self.kind == "reward of reset":
                response.reward = 1.0
            yield response
        if self.kind == "never ends":
            await asyncio.sleep(60)

    async def _changed(self, requests: AsyncIterator[pb.EpisodeRequest]) -> AsyncIterator[pb.EpisodeRequest]:
        turn = 0
        async for request in requests:
            if request.HasField("reset") and self.kind == "any environment":
                request.reset.environment = "count"
            if request.HasField("reset") and self.kind == "any state" and request.reset.state:
                request.reset.state, request.reset.turn = b"", 0
            if request.HasField("reset") and self.kind == "states unasked":
                request.reset.keep_states = True
            if request.HasField("reset") and self.kind == "any json" and request.reset.task_json != "{}":
                request.reset.task_json = "{}"
            if request.HasField("action"):
                turn += 1
                if self.kind == "any turn":
                    request.action.turn = turn
                if self.kind == "any length":
                    request.action.text = request.action.text[:10]
            yield request

    async def Score(self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext) -> pb.ScoreResponse:
        answer = await super().Score(request, context)
        if self.kind == "short" and answer.scores:
            del answer.scores[-1]
        if self.kind == "moody":
            for score in answer.scores:
                score.reward = next(self.numbers)
        return answer


@asynccontextmanager
async def lying(servicer: ProviderServicer) -> AsyncIterator[str]:
    server = grpc.aio.server()
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(grace=0)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(episodes, "_RELEASE_SECONDS", 1.0)


async def check(address: str, sample: Sample | None = None, only: str = "") -> list[Result]:
    return [result async for result in check_provider(address, sample or Sample(), only)]


def failed(results: list[Result]) -> dict[str, str]:
    return {result.check: result.detail for result in results if result.verdict is Verdict.FAILED}


@pytest.mark.parametrize("kind", [Count, OddInLoop, EvenCoroutine, EvenInProcess])
async def test_a_provider_that_keeps_the_contract_passes(kind: type[Environment]) -> None:
    async with serving(kind, scorers={"length": length}) as address:
        results = await check(address)
    assert failed(results) == {}
    assert len(results) >= 25


async def test_a_provider_is_reached_past_a_proxy_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with serving(Count, scorers={"length": length}) as address:
        assert failed(await check(address, only="length")) == {}


@pytest.mark.parametrize(
    ("kind", "checks", "said"),
    [
        ("version", {"Describe is sound"}, "is 1, must be 2"),
        ("endless time", {"Describe is sound"}, "step_timeout_seconds: is 0.0, must be above 0"),
        ("any environment", {"an unknown environment is NOT_FOUND"}, "it was answered"),
        ("any turn", {"an action with another turn is INVALID_ARGUMENT"}, "answers turn 1 instead of 2"),
        ("any json", {"a task that is no JSON is INVALID_ARGUMENT"}, "it was answered"),
        ("any length", {"a text over 1 MiB is INVALID_ARGUMENT"}, "it was answered"),
        ("limit", {"the announced limit is kept"}, "4 episodes were open at once; 3 are announced"),
        ("never ends", {"closing the client's side ends with OK"}, "still open"),
        ("reward of reset", {PLAYED}, "the reward of the reset is 1.0"),
        ("short", {"scores are in order, finite or errors"}, "8 scores for 9 items"),
        ("moody", {"scores are in order, finite or errors"}, "other scores the second time"),
    ],
)
async def test_a_violation_fails_its_own_check_and_no_other(kind: str, checks: set[str], said: str) -> None:
    async with lying(Liar(kind)) as address:
        found = failed(await check(address))
    assert set(found) == checks
    assert said in " ".join(found.values())


@pytest.mark.parametrize(
    ("kind", "check_name", "said"),
    [
        ("nan", PLAYED, "its reward is nan"),
        ("info", "info has what workflows read, in its kind", "its info.success is str, must be true or false"),
        ("turn", PLAYED, "it answers turn 4 instead of 1"),
        ("silent", PLAYED, "no answer to action 1"),
        ("twice", "nothing comes that was not asked for", "a second answer"),
    ],
)
async def test_a_violation_in_every_episode_is_named(kind: str, check_name: str, said: str) -> None:
    async with lying(Liar(kind)) as address:
        found = failed(await check(address, only="count"))
    assert said in found[check_name]


RESTORED = "a restored state continues as the episode did"
DAMAGED = "a state that is damaged or too large is INVALID_ARGUMENT"
UNASKED = "states come where they are asked for alone"


@pytest.mark.parametrize("kind", [Windy, WindyInThread, WindyInProcess, WindyInCoroutines])
async def test_snapshots_pass_in_every_kind_of_isolation(kind: type[Environment]) -> None:
    async with serving(kind) as address:
        results = await check(address)
    assert failed(results) == {}
    assert {RESTORED, UNASKED, DAMAGED} <= {result.check for result in results if result.verdict is Verdict.OK}


class OtherWinds(Windy):
    """Its winds are drawn again after a restore."""

    def restore(self, state: bytes) -> None:
        super().restore(state)
        self.winds.seed()


class Stateless(Windy):
    def snapshot(self) -> bytes:
        return b""


class Endless(Windy):
    def snapshot(self) -> bytes:
        return bytes(1 << 20)


class Counted(Windy):
    def snapshot(self) -> Any:
        return self.at


@pytest.mark.parametrize(
    ("kind", "environment", "checks", "said"),
    [
        ("honest", OtherWinds, {RESTORED}, "from the state of turn 0 on, turn 1 is answered otherwise"),
        ("honest", Stateless, {RESTORED}, "no answer had a state"),
        ("honest", Endless, {RESTORED, DAMAGED}, "its snapshot has 1048576 bytes, must have at most 1048560"),
        ("honest", Counted, {RESTORED, DAMAGED}, "its snapshot is int, must be bytes"),
        ("any state", Windy, {RESTORED, DAMAGED}, "it was answered; must be refused with INVALID_ARGUMENT"),
        ("states unasked", Windy, {UNASKED}, "did not ask for states"),
    ],
)
async def test_snapshots_that_break_the_contract_are_named(
    kind: str, environment: type[Environment], checks: set[str], said: str
) -> None:
    async with lying(Liar(kind, environment)) as address:
        found = failed(await check(address))
    assert set(found) == checks
    assert said in " ".join(found.values())


async def test_states_are_refused_where_they_cannot_be_restored() -> None:
    class Methodless(Count):
        description = Description("count", "", snapshots=True)

    with pytest.raises(TypeError, match="says snapshots and must have the methods snapshot and restore"):
        Arena([Methodless])
    for reset, said in [
        (Reset("count", state=b"x"), "reset.state: was sent, and count announces no snapshots"),
        (Reset("count", keep_states=True), "reset.keep_states: was sent, and count announces no"),
        (Reset("corridor", state=b"x", turn=-1), "reset.turn: is -1"),
        (Reset("corridor", turn=2), "reset.turn: is 2"),
        (Reset("corridor", state=bytes((1 << 20) + 1)), "reset.state: has 1048577 bytes, at most"),
        (Reset("corridor", state=b"x" * 40), "reset.state: is damaged, or no state of corridor"),
    ]:
        async with Arena([Count, Windy]).enter(reset.environment) as episode:
            with pytest.raises(InvalidInput, match=said):
                await episode.reset(reset)


async def test_slots_that_are_never_released_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    servicer = Liar("honest")
    source = servicer._arena.sources["count"]
    monkeypatch.setattr(source, "_release", lambda: None)
    async with lying(servicer) as address:
        found = failed(await check(address))
    assert {"cancelled episodes free their slots", "the announced limit is kept"} <= set(found)


@pytest.mark.parametrize(
    ("environment", "check_name", "verdict"),
    [
        (Shared, "episodes side by side do not mix", Verdict.FAILED),
        (Generous, PLAYED, Verdict.FAILED),
        (Fragile, "hostile text: open tags", Verdict.FAILED),
        (Random, "the same seed gives the same episode", Verdict.NOTE),
        (Announced, "the same seed gives the same episode", Verdict.OK),
        (LateRandom, "the same seed gives the same episode", Verdict.FAILED),
    ],
)
async def test_an_environment_with_a_fault_is_named(
    environment: type[Environment], check_name: str, verdict: Verdict
) -> None:
    async with lying(Liar("honest", environment)) as address:
        results = await check(address)
    assert {result.check: result.verdict for result in results}[check_name] is verdict
    assert set(failed(results)) <= {check_name}


async def test_a_task_that_is_needed_is_asked_for() -> None:
    async with serving(OddInLoop) as address:
        results = await check(address, Sample(task_json='{"bad": true}'))
    (skipped,) = [result for result in results if result.check == "a reset is answered"]
    assert skipped.verdict is Verdict.SKIPPED
    assert "task.bad: is true" in skipped.detail


async def test_a_name_that_is_not_there_fails() -> None:
    async with serving(OddInLoop) as address:
        assert "nothing is named 'even'; known: odd" in failed(await check(address, only="even"))["Describe is sound"]


async def test_no_server_at_the_address_is_one_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    from trinity.conformance import suite

    monkeypatch.setattr(suite, "_CALL_SECONDS", 0.5)
    (result,) = await check("127.0.0.1:1")
    assert (result.check, result.verdict) == ("Describe answers", Verdict.FAILED)


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({}, ""),
        ({"success": None, "tools": [{"name": "add"}], "conversation": "new", "sampling": {}, "mine": [1]}, ""),
        ({"success": 1}, "info.success is int"),
        ({"instructions": ["x"]}, "info.instructions is list, must be a string"),
        ({"tools": {}}, "info.tools is dict"),
        ({"tools": [{"description": "x"}]}, "info.tools has {'description': 'x'}, must be an object with a name"),
        ({"conversation": "old"}, "info.conversation is 'old'"),
        ({"sampling": "hot"}, "info.sampling is str, must be an object"),
    ],
)
def test_the_keys_of_info_that_workflows_read_have_their_kind(info: dict[str, Any], said: str) -> None:
    assert said in info_problem(info)
    assert bool(said) == bool(info_problem(info))
