"""Providers that attach: admission, episodes, and that a bad one fails its own episodes alone."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from support.odd_environments import Odd, OddInLoop
from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.environment import attached
from trinity.environment.hub import Hub
from trinity.environment.servicer import EnvironmentServicer
from trinity.environments import ENVIRONMENTS
from trinity.environments.scorers import SCORERS
from trinity.runtime import rpc
from trinity.sdk import AttachRefused, ScoreItem, attach, attaching
from trinity.sdk.arena import Arena
from trinity.sdk.contract import PROTOCOL_VERSION
from trinity.sdk.errors import Away

pytestmark = pytest.mark.core

TOKEN = "secret"


@dataclass
class Service:
    """An environment service of this process."""

    address: str
    arena: Arena
    hub: Hub
    stub: environment_pb2_grpc.EnvironmentServiceStub


@asynccontextmanager
async def serve(address: str = "127.0.0.1:0", token: str = TOKEN) -> AsyncIterator[Service]:
    arena = Arena(ENVIRONMENTS.values(), SCORERS)
    hub = Hub(arena, token)
    server = grpc.aio.server(interceptors=[rpc.Edge()], options=rpc.SERVER_OPTIONS)
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(EnvironmentServicer(arena, hub), server)
    address = f"127.0.0.1:{server.add_insecure_port(address)}"
    await server.start()
    async with rpc.channel(address) as channel:
        yield Service(address, arena, hub, environment_pb2_grpc.EnvironmentServiceStub(channel))
    await server.stop(grace=0)
    await arena.drain(1)


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with serve() as running:
        yield running


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as opened:
        yield opened


async def until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


class Player:
    """A client's side of one episode."""

    def __init__(self, service: Service, **task: Any) -> None:
        self.call = service.stub.Episode(timeout=60)
        self.turn = 0
        self._reset = pb.Reset(environment="odd", task_json=json.dumps(task), seed=7)

    async def reset(self) -> pb.EpisodeResponse:
        await self.call.write(pb.EpisodeRequest(reset=self._reset))
        return await self._read()

    async def step(self, text: str) -> pb.EpisodeResponse:
        self.turn += 1
        await self.call.write(pb.EpisodeRequest(action=pb.Action(text=text, turn=self.turn)))
        return await self._read()

    async def _read(self) -> pb.EpisodeResponse:
        answer = await self.call.read()
        if answer is grpc.aio.EOF:
            raise AssertionError(f"{await self.call.code()}: {await self.call.details()}")
        return answer


async def refused(work: Any) -> tuple[grpc.StatusCode, str]:
    try:
        await work
    except grpc.aio.AioRpcError as error:
        return error.code(), str(error.details())
    except AssertionError as error:
        code, _, details = str(error).removeprefix("StatusCode.").partition(": ")
        return grpc.StatusCode[code], details
    raise AssertionError("it was not refused")


def offer(**changes: Any) -> pb.Offer:
    described = pb.EnvironmentDescription(name="odd", step_timeout_seconds=0.3, max_parallel_episodes=0)
    base = {"protocol_version": PROTOCOL_VERSION, "token": TOKEN, "provider": "raw", "instance": "1"}
    return pb.Offer(**{**base, "environments": [described], **changes})  # type: ignore[arg-type]


async def raw_attach(service: Service, **changes: Any) -> Any:
    """The stream of a provider that this test plays by hand."""
    call = service.stub.Attach(timeout=60)
    await call.write(pb.AttachRequest(offer=offer(**changes)))
    first = await call.read()
    if first is grpc.aio.EOF:
        raise AssertionError(f"{await call.code()}: {await call.details()}")
    assert first.accepted.protocol_version == PROTOCOL_VERSION
    return call


async def test_an_attached_environment_is_played_through_the_service(service: Service, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    async with attaching(Odd, address=service.address, token=TOKEN):
        names = {one.name for one in (await service.stub.Describe(pb.DescribeRequest())).environments}
        assert names == {*ENVIRONMENTS, "odd"}
        player = Player(service, closed_file=str(closed))
        assert json.loads((await player.reset()).info_json) == {"seed": 7}
        assert (await player.step("on")).reward == 0.5
        assert (await player.step("done")).done
        await player.call.done_writing()
        assert await player.call.code() is grpc.StatusCode.OK
        await until(closed.exists)
        code, details = await refused(_after_raise(service))
        assert (code, "ValueError: broken inside" in details) == (grpc.StatusCode.INTERNAL, True)
        code, details = await refused(Player(service, bad=True).reset())
        assert (code, "task.bad: is true" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    await until(lambda: "odd" not in service.arena.sources)
    assert service.arena.open == 0


async def _after_raise(service: Service) -> None:
    player = Player(service)
    await player.reset()
    await player.step("raise")


async def test_an_attached_scorer_scores(service: Service) -> None:
    def length(item: ScoreItem, args: dict[str, Any]) -> float:
        return len(item.response) / args["unit"]

    async with attaching(address=service.address, token=TOKEN, scorers={"length": length}):
        items = [pb.ScoreItem(response="four"), pb.ScoreItem(response="")]
        request = pb.ScoreRequest(scorer="length", items=items, args_json='{"unit": 2}')
        answer = await service.stub.Score(request, timeout=10)
        assert [score.reward for score in answer.scores] == [2, 0]
        bad = pb.ScoreRequest(scorer="length", items=items, args_json="[]")
        assert (await refused(service.stub.Score(bad, timeout=10)))[0] is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"token": "guess"}, grpc.StatusCode.UNAUTHENTICATED, "offer.token"),
        ({"protocol_version": 1}, grpc.StatusCode.FAILED_PRECONDITION, "is 1; this service speaks version 2"),
        ({"provider": "there"}, grpc.StatusCode.ALREADY_EXISTS, "a provider named 'there' is attached"),
        ({"provider": ""}, grpc.StatusCode.INVALID_ARGUMENT, "offer.provider"),
        ({"scorers": ["math_reward"]}, grpc.StatusCode.ALREADY_EXISTS, "'math_reward' is built in"),
        ({"scorers": ["a", "a"]}, grpc.StatusCode.INVALID_ARGUMENT, "'a' twice"),
        ({"environments": []}, grpc.StatusCode.INVALID_ARGUMENT, "neither environments nor scorers"),
        (
            {"environments": [pb.EnvironmentDescription(name="countdown", step_timeout_seconds=1)]},
            grpc.StatusCode.ALREADY_EXISTS,
            "'countdown' is built in",
        ),
        (
            {"environments": [pb.EnvironmentDescription(name="slow", step_timeout_seconds=float("nan"))]},
            grpc.StatusCode.INVALID_ARGUMENT,
            "step_timeout_seconds: is nan",
        ),
    ],
)
async def test_an_offer_that_cannot_stand_is_refused_with_the_reason(
    service: Service, changes: dict[str, Any], code: grpc.StatusCode, said: str
) -> None:
    there = await raw_attach(service, provider="there", instance="2")
    found, details = await refused(raw_attach(service, **changes))
    assert (found, said in details) == (code, True), (found, details)
    assert list(service.hub.attachments) == ["there"]
    there.cancel()


async def test_the_sdk_raises_what_the_service_refuses(service: Service) -> None:
    with pytest.raises(AttachRefused, match=r"UNAUTHENTICATED: offer\.token: is not the service's"):
        async with attaching(Odd, address=service.address, token="guess"):
            pass
    with pytest.raises(AttachRefused, match=r"offer\.token"):
        await asyncio.to_thread(attach, Odd, address=service.address, token="guess")


async def test_no_provider_attaches_where_no_token_is_set(stack: AsyncExitStack) -> None:
    service = await stack.enter_async_context(serve(token=""))
    code, details = await refused(raw_attach(service, token=""))
    assert (code, "TRINITY_ENVIRONMENT_ATTACH_TOKEN is not set" in details) == (grpc.StatusCode.UNAUTHENTICATED, True)


async def test_load_goes_to_the_attached_provider_with_the_fewest_episodes(service: Service) -> None:
    async with AsyncExitStack() as providers:
        both = [
            await providers.enter_async_context(attaching(Odd, address=service.address, token=TOKEN, name=name))
            for name in ("one", "two")
        ]
        assert service.arena.sources["odd"].description.max_parallel_episodes == 512
        players = [Player(service) for _ in range(8)]
        for player in players:
            await player.reset()
        assert [provider.arena.open for provider in both] == [4, 4]
        for player in players:
            player.call.cancel()
        await until(lambda: all(provider.arena.open == 0 for provider in both) and service.arena.open == 0)


async def test_a_provider_that_disconnects_fails_its_episodes_and_the_others_continue(
    service: Service, stack: AsyncExitStack
) -> None:
    await stack.enter_async_context(attaching(Odd, address=service.address, token=TOKEN, name="stays"))
    leaving = AsyncExitStack()
    goes = await leaving.enter_async_context(attaching(Odd, address=service.address, token=TOKEN, name="goes"))
    players = [Player(service) for _ in range(4)]
    for player in players:
        await player.reset()
    await leaving.aclose()
    results = await asyncio.gather(*(player.step("on") for player in players), return_exceptions=True)
    failed = [error for error in results if isinstance(error, Exception)]
    assert len(failed) == 2
    assert all("goes went away" in str(error) for error in failed)
    assert goes.arena.open == 0
    await Player(service).reset()


async def test_a_provider_reconnects_and_its_open_episodes_are_closed(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    async with AsyncExitStack() as first:
        service = await first.enter_async_context(serve())
        provider_stack = AsyncExitStack()
        provider = await provider_stack.enter_async_context(attaching(Odd, address=service.address, token=TOKEN))
        await Player(service, closed_file=str(closed)).reset()
    await until(lambda: not provider.attached.is_set() and closed.exists() and provider.arena.open == 0)
    async with serve(service.address) as again:
        await until(lambda: bool(again.hub.attachments))
        assert (await Player(again).reset()).observation
    await provider_stack.aclose()


async def test_a_newer_stream_of_the_same_instance_takes_the_place_of_the_older(service: Service) -> None:
    old = await raw_attach(service)
    player = Player(service)
    playing = asyncio.create_task(player.reset())
    await old.read()
    new = await raw_attach(service)
    code, details = await refused(playing)
    assert (code, "connected again" in details) == (grpc.StatusCode.UNAVAILABLE, True)
    assert await old.read() is grpc.aio.EOF
    assert len(service.arena.sources["odd"].attachments) == 1  # type: ignore[attr-defined]
    new.cancel()
    await until(lambda: not service.hub.attachments)


def lie(**fields: Any) -> Callable[[int], list[pb.ProviderReply]]:
    return lambda identity: [pb.ProviderReply(id=identity, response=pb.EpisodeResponse(**{"turn": 1, **fields}))]


LIES: dict[str, tuple[Callable[[int], list[pb.ProviderReply]], str]] = {
    "nan": (lie(reward=float("nan")), "reward is nan"),
    "huge": (lie(observation="x" * 1_100_000), "observation is longer"),
    "order": (lie(turn=5), "turn 5 instead of 1"),
    "info": (lie(info_json="{"), "info_json is not JSON"),
    "scores": (lambda identity: [pb.ProviderReply(id=identity, scores=pb.ScoreResponse())], "answered with scores"),
    "silent": (lambda identity: [], "longer than 0.3 s"),
    "failure": (lambda identity: [pb.ProviderReply(id=identity, failure=pb.Failure(code=13, message="ouch"))], "ouch"),
}


@pytest.mark.parametrize("kind", LIES)
async def test_a_provider_that_breaks_the_contract_or_is_silent_fails_its_own_episode_and_is_avoided(
    service: Service, stack: AsyncExitStack, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached, "_GRACE_SECONDS", 0.1)
    await stack.enter_async_context(attaching(OddInLoop, address=service.address, token=TOKEN, name="honest"))
    call = await raw_attach(service, provider="liar")
    begun = 0

    async def play_the_liar() -> None:
        nonlocal begun
        while (response := await call.read()) is not grpc.aio.EOF:
            for one in response.calls:
                if one.HasField("reset"):
                    begun += 1
                    replies = [pb.ProviderReply(id=one.id, response=pb.EpisodeResponse())]
                else:
                    replies = LIES[kind][0](one.id) if one.HasField("action") else []
                await call.write(pb.AttachRequest(replies=replies))

    lying = asyncio.create_task(play_the_liar())
    players = [Player(service) for _ in range(2)]
    for player in players:
        await player.reset()
    results = await asyncio.gather(*(player.step("on") for player in players), return_exceptions=True)
    (failure,) = [str(one) for one in results if isinstance(one, Exception)]
    assert LIES[kind][1] in failure
    assert "liar" in failure
    for _ in range(5):
        player = Player(service)
        await player.reset()
        assert (await player.step("on")).reward == 0.5
        player.call.cancel()
    assert begun == 1
    lying.cancel()
    call.cancel()


async def test_a_provider_that_does_not_read_is_detached_before_its_queue_fills_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attached, "_MAX_UNSENT", 5)
    hub = Hub(Arena(), TOKEN)
    attachment = hub.admit(offer())
    source = hub._arena.sources["odd"]
    playing = source.player()  # its calls are bounded by themselves
    for _ in range(6):
        assert not attachment.peer.gone
        await source.player().close()
    waiting = asyncio.create_task(playing.play(pb.Reset(environment="odd"), 10))
    with pytest.raises(Exception, match=r"the attached provider .* does not read: 7 calls wait"):
        await waiting
    assert len(attachment.outbox) == 0
    with pytest.raises(Away):
        source.player()


async def test_an_answer_without_a_call_ends_that_episode(service: Service) -> None:
    call = await raw_attach(service)
    player, neighbour = Player(service), Player(service)
    for one in (player, neighbour):
        playing = asyncio.create_task(one.reset())
        identity = (await call.read()).calls[0].id
        reply = pb.ProviderReply(id=identity, response=pb.EpisodeResponse())
        await call.write(pb.AttachRequest(replies=[reply] * (2 if one is player else 1)))
        await playing
    code, details = await refused(player.step("on"))
    assert (code, "a call that was not made" in details) == (grpc.StatusCode.DATA_LOSS, True)
    playing = asyncio.create_task(neighbour.step("on"))
    while (sent := (await call.read()).calls[0]).HasField("close"):
        pass
    answer = pb.EpisodeResponse(reward=0.25, turn=1)
    await call.write(pb.AttachRequest(replies=[pb.ProviderReply(id=sent.id, response=answer)]))
    assert (await playing).reward == 0.25
    call.cancel()


async def test_a_hundred_attached_episodes_cancelled_at_once_leave_nothing(service: Service) -> None:
    async with attaching(OddInLoop, address=service.address, token=TOKEN) as provider:
        tasks = len(asyncio.all_tasks())
        players = [Player(service) for _ in range(100)]
        await asyncio.gather(*(player.reset() for player in players))
        assert (service.arena.open, provider.arena.open) == (100, 100)
        for player in players:
            player.call.cancel()
        await until(lambda: service.arena.open == 0 and provider.arena.open == 0)
        (attachment,) = service.hub.attachments.values()
        assert attachment.peer.open == 0
        await until(lambda: len(asyncio.all_tasks()) <= tasks)


async def test_what_is_no_offer_is_refused(service: Service) -> None:
    call = service.stub.Attach(timeout=20)
    await call.write(pb.AttachRequest(replies=[pb.ProviderReply(id=1)]))
    assert (await refused(call.read()))[0] is grpc.StatusCode.INVALID_ARGUMENT
    twice = await raw_attach(service)
    await twice.write(pb.AttachRequest(offer=offer()))
    assert "came twice" in (await refused(twice.read()))[1]
    await until(lambda: not service.hub.attachments)
