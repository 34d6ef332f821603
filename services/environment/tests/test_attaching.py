"""Providers that attach: admission, episodes, and where the load goes."""

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from support.fakes.environments.gallery import Gallery
from support.fakes.environments.odd_environments import Odd
from support.fakes.environments.snapshots import Windy
from support.servers.attaching import (
    TOKEN,
    Player,
    Service,
    raw_attach,
    refused,
    serve,
    until,
)
from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.conformance import Sample, Verdict, check_provider
from trinity.environments import ENVIRONMENTS
from trinity.sdk import AttachRefused, ScoreItem, attach, attaching

pytestmark = pytest.mark.core


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


async def test_snapshots_are_restored_through_the_service_where_all_providers_have_them(service: Service) -> None:
    async with attaching(Windy, address=service.address, token=TOKEN):
        results = [one async for one in check_provider(service.address, Sample(), "corridor")]
        snapshots = [one for one in results if "state" in one.check]
        assert [one.verdict for one in snapshots] == [Verdict.OK] * 3
        async with attaching(Stateless, address=service.address, token=TOKEN, name="other"):
            described = (await service.stub.Describe(pb.DescribeRequest())).environments
            assert [one.snapshots for one in described if one.name == "corridor"] == [False]


async def test_images_come_through_the_service_from_a_provider_that_announces_them(service: Service) -> None:
    async with attaching(Gallery, address=service.address, token=TOKEN):
        results = {one.check: one.verdict async for one in check_provider(service.address, Sample(), "gallery")}
        assert Verdict.FAILED not in results.values()
        assert results["images can be decoded"] is Verdict.OK
        async with attaching(Blind, address=service.address, token=TOKEN, name="other"):
            described = (await service.stub.Describe(pb.DescribeRequest())).environments
            assert [one.images for one in described if one.name == "gallery"] == [True]
    async with attaching(Blind, address=service.address, token=TOKEN):
        found = [one async for one in check_provider(service.address, Sample(), "gallery")]
        assert "announces none" in " ".join(one.detail for one in found if one.verdict is Verdict.FAILED)


async def test_providers_of_a_name_have_the_same_players(service: Service) -> None:
    duel = {
        "environments": [pb.EnvironmentDescription(name="duel", step_timeout_seconds=1, players=["white", "black"])]
    }
    there = await raw_attach(service, provider="there", **duel)
    duel["environments"][0].players[1] = "red"
    code, details = await refused(raw_attach(service, provider="other", **duel))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "offer.environments.duel.players: are white, red; attached providers of it announce white, black" in details
    there.cancel()


class Blind(Gallery):
    description = replace(Gallery.description, images=False)


class Stateless(Windy):
    description = replace(Windy.description, snapshots=False)


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
