"""A provider that breaks the contract or does not read fails its own episodes alone."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio
import pytest

from support.fakes.environments.odd_environments import OddInLoop
from support.servers.attaching import (
    TOKEN,
    Player,
    Service,
    offer,
    raw_attach,
    refused,
    until,
)
from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.environment import attached
from trinity.environment.hub import Hub
from trinity.runtime.trust.attach_tokens import AttachTokens
from trinity.sdk import attaching
from trinity.sdk.arena import Arena
from trinity.sdk.contract import Reset
from trinity.sdk.errors import Unavailable
from trinity.sdk.wire import offer_from_proto

pytestmark = pytest.mark.core


async def test_a_reply_of_an_unknown_id_is_answered_with_close(service: Service) -> None:
    call = await raw_attach(service)
    await call.write(pb.AttachRequest(replies=[pb.ProviderReply(id=77, response=pb.EpisodeResponse())]))
    async with asyncio.timeout(5):
        (answer,) = (await call.read()).calls
    assert (answer.id, answer.WhichOneof("call")) == (77, "close")
    call.cancel()


def lie(**fields: Any) -> Callable[[int], list[pb.ProviderReply]]:
    return lambda identity: [pb.ProviderReply(id=identity, response=pb.EpisodeResponse(**{"turn": 1, **fields}))]


LIES: dict[str, tuple[Callable[[int], list[pb.ProviderReply]], str]] = {
    "nan": (lie(reward=float("nan")), "reward is nan"),
    "huge": (lie(observation="x" * 1_100_000), "observation is longer"),
    "order": (lie(turn=5), "turn 5 instead of 1"),
    "info": (lie(info_json="{"), "info_json is not JSON"),
    "beyond": (lie(reward=1.5e6), "its reward is 1.5e+06, must be in [-1e+06, 1e+06]; scale it, or raise"),
    "long name": (lie(metrics={"n" * 10_000: 1.0}), "a name of 10000 characters, at most 256"),
    "wide metric": (lie(metrics={"x": -1e39}), "metric x is -1e+39"),
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
    hub = Hub(Arena(), AttachTokens(TOKEN))
    attachment = await hub.admit(offer_from_proto(offer()))
    source = hub._arena.sources["odd"]
    playing = source.player()  # its calls are bounded by themselves
    for _ in range(6):
        assert not attachment.peer.gone
        await source.player().close()
    waiting = asyncio.create_task(playing.play(Reset("odd"), 10))
    with pytest.raises(Exception, match=r"the attached provider .* does not read: 7 calls wait"):
        await waiting
    assert len(attachment.outbox) == 0
    with pytest.raises(Unavailable):
        source.player()


async def test_of_a_flood_of_replies_in_one_message_only_the_first_are_read(service: Service) -> None:
    call, neighbour = await raw_attach(service), await raw_attach(service, provider="neighbour")
    flooding = service.hub.attachments["raw"]
    await call.write(pb.AttachRequest(replies=[pb.ProviderReply(id=77)] * 60_000))
    await until(lambda: "raw" not in service.hub.attachments)
    assert "calls wait to be sent" in service.hub.away["raw"].reason
    assert flooding.peer.strays < 15_000
    await neighbour.write(pb.AttachRequest(replies=[pb.ProviderReply(id=5)]))
    assert (await neighbour.read()).calls[0].HasField("close")
    neighbour.cancel()
    call.cancel()


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
