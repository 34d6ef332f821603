"""An attached provider that freezes, restarts or leaves: who keeps the name, and what Describe says."""

import asyncio
import time
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from support.fakes.environments.odd_environments import Odd
from support.servers.attaching import (
    TOKEN,
    Player,
    Service,
    health,
    offer,
    raw_attach,
    refused,
    to_the_end,
    until,
)
from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.environment import attached
from trinity.environment.attached import Attachment
from trinity.environment.hub import AttachedScorer, Hub
from trinity.runtime.trust.attach_tokens import AttachToken, AttachTokens
from trinity.sdk import AttachRefused, attaching
from trinity.sdk.arena import Arena
from trinity.sdk.client import Provider
from trinity.sdk.contract import ScoreRequest
from trinity.sdk.errors import Failed, Unavailable
from trinity.sdk.wire import offer_from_proto

pytestmark = pytest.mark.core


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached, "_PROBE_SECONDS", 0.3)
    monkeypatch.setattr(attached, "_GRACE_SECONDS", 0.1)


@pytest.mark.parametrize("instance", ["1", "2"])
async def test_the_name_of_a_provider_that_is_frozen_or_lost_is_free_at_once(
    service: Service, instance: str, quick: None
) -> None:
    """`instance` 1: the same process again, whose loss the service has not noticed; 2: a restarted one."""
    old = await raw_attach(service)
    player = Player(service)
    playing = asyncio.create_task(player.reset())
    await old.read()
    begin = time.monotonic()
    new = await raw_attach(service, instance=instance)
    assert time.monotonic() - begin < 5
    code, details = await refused(playing)
    assert (code, "another took its name" in details) == (grpc.StatusCode.UNAVAILABLE, True)
    code, details = await refused(to_the_end(old))
    assert (code, "another took its name" in details) == (grpc.StatusCode.ALREADY_EXISTS, True), details
    assert len(service.arena.sources["odd"].attachments) == 1  # type: ignore[attr-defined]
    assert (await health(service))["raw"].health == pb.PROVIDER_HEALTH_SERVING
    new.cancel()
    await until(lambda: not service.hub.attachments)


async def test_of_two_twins_one_is_refused_and_the_other_keeps_its_episodes(service: Service) -> None:
    """A copied machine: the same name and the same instance."""
    async with attaching(Odd, address=service.address, token=TOKEN, name="twin") as first:
        player = Player(service)
        await player.reset()
        second = Provider(Odd, address=service.address, token=TOKEN, name="twin")
        second._offer = replace(second._offer, instance=first._offer.instance)
        with pytest.raises(AttachRefused, match="named 'twin' is attached, and it answers; take another name"):
            await asyncio.wait_for(second.run(), 10)
        assert (await player.step("on")).reward == 0.5
        assert first.attached.is_set()


async def test_a_provider_that_freezes_is_away_and_its_episodes_do_not_fail_by_time(
    service: Service, quick: None
) -> None:
    call = await raw_attach(service)
    player = Player(service)
    code, details = await refused(player.reset())
    assert (code, "nor does it answer anything else" in details) == (grpc.StatusCode.UNAVAILABLE, True), details
    await until(lambda: not service.hub.attachments)
    found = (await health(service))["raw"]
    assert (found.health, list(found.environments)) == (pb.PROVIDER_HEALTH_AWAY, ["odd"])
    assert "does not answer" in found.reason
    assert abs(found.since_seconds - time.time()) < 10
    await asyncio.wait_for(to_the_end(call), 5)  # ends with OK: once it thaws it attaches again


async def test_describe_lists_the_providers_with_their_health_and_since_when(service: Service) -> None:
    begin = time.time()
    async with attaching(Odd, address=service.address, token=TOKEN, name="one", scorers={"s": lambda *_: 1.0}):
        player = Player(service)
        await player.reset()
        found = (await health(service))["one"]
        assert (found.health, found.reason, found.open) == (pb.PROVIDER_HEALTH_SERVING, "", 1)
        assert (list(found.environments), list(found.scorers)) == (["odd"], ["s"])
        assert begin <= found.since_seconds <= time.time()
        await refused(player.step("raise"))
        found = (await health(service))["one"]
        assert (found.health, "broken inside" in found.reason) == (pb.PROVIDER_HEALTH_FAILING, True)
        again = Player(service)
        await again.reset()
        await again.step("done")
        assert (await health(service))["one"].health == pb.PROVIDER_HEALTH_SERVING
    await until(lambda: not service.hub.attachments)
    found = (await health(service))["one"]
    assert (found.health, "went away" in found.reason) == (pb.PROVIDER_HEALTH_AWAY, True)


async def test_a_provider_that_still_closes_an_episode_is_full_and_healthy(service: Service) -> None:
    class Slow(Odd):
        description = replace(Odd.description, max_parallel_episodes=1)

        def close(self) -> None:
            time.sleep(0.5)

    async with attaching(Slow, address=service.address, token=TOKEN, name="one"):
        player = Player(service)
        await player.reset()
        await player.step("done")
        await player.call.done_writing()
        await to_the_end(player.call)
        code, details = await refused(Player(service).reset())
        assert (code, "its limit" in details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        assert (await health(service))["one"].health == pb.PROVIDER_HEALTH_SERVING


async def test_few_of_many_that_went_away_are_remembered() -> None:
    hub = Hub(Arena(), AttachTokens(TOKEN))
    for number in range(120):
        hub.remove(await hub.admit(offer_from_proto(offer(provider=str(number)))), "over")
    assert list(hub.away) == [str(number) for number in range(20, 120)]


async def test_no_score_is_asked_of_a_provider_that_is_gone() -> None:
    token = AttachToken("of the test", "")
    gone, here = (Attachment(name, "1", {}, frozenset({"s"}), token) for name in ("gone", "here"))
    scorer = AttachedScorer("s")
    scorer.attachments = [gone, here]
    gone.end("it does not answer")
    here.open["s"] = 3
    asking = asyncio.create_task(scorer(ScoreRequest("s")))
    await until(lambda: here.open["s"] == 4)
    here.end("it went away")
    with pytest.raises(Failed, match="it went away"):
        await asking
    with pytest.raises(Unavailable, match="s: its attached provider went away"):
        await scorer(ScoreRequest("s"))
