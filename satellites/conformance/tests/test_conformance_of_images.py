"""The conformance suite decodes what an environment shows, and names what breaks the contract."""

import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc.aio
import pytest

from support.fakes.data.pictures import picture
from support.fakes.environments.gallery import Gallery, GalleryInProcess
from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.conformance import Result, Sample, Verdict, check_provider, episodes
from trinity.sdk import Environment, Observation, serving
from trinity.sdk.arena import Arena
from trinity.sdk.servicer import ProviderServicer

pytestmark = pytest.mark.core

RESET, PLAYED = "a reset is answered", "an episode is played, one sound answer per action"
UNASKED = "a reset without `images` is INVALID_ARGUMENT"
DECODED, SAME = "images can be decoded", "the same seed gives the same episode"


async def check(kind: type[Environment]) -> dict[str, Result]:
    async with serving(kind) as address:
        return {one.check: one async for one in check_provider(address, Sample(), "gallery")}


@pytest.mark.parametrize("kind", [Gallery, GalleryInProcess])
async def test_sound_images_pass(kind: type[Environment]) -> None:
    found = await check(kind)
    assert [one for one in found.values() if one.verdict is Verdict.FAILED] == []
    assert found[DECODED].verdict is Verdict.OK
    assert found[SAME].verdict is Verdict.NOTE, "no two of its pictures are alike, and their text is the same"


class Unannounced(Gallery):
    description = replace(Gallery.description, images=False)


class Late(Gallery):
    """What it shows after the first action is no image."""

    def step(self, action: str) -> Observation:
        return replace(super().step(action), images=[b"GIF89a"])


class Broken(Gallery):
    def reset(self, *arguments: object) -> Observation:
        return replace(super().reset(*arguments), images=[picture(), picture()[:60]])  # type: ignore[arg-type]


class Vast(Gallery):
    def reset(self, *arguments: object) -> Observation:
        return replace(super().reset(*arguments), images=[picture(4097, 4096, "1")])  # type: ignore[arg-type]


class Blind(Gallery):
    def _seen(self, reward: float) -> Observation:
        return replace(super()._seen(reward), images=())


class Single(Gallery):
    """Gives a file in place of a list of files."""

    def reset(self, *arguments: object) -> Observation:
        return replace(super().reset(*arguments), images=picture())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "name", "verdict", "said"),
    [
        (Unannounced, RESET, Verdict.FAILED, "announces none"),
        (Single, RESET, Verdict.FAILED, "its observation cannot be sent"),
        (Late, PLAYED, Verdict.FAILED, "its images[0] is no PNG, JPEG or WebP file (6 bytes)"),
        (Broken, DECODED, Verdict.FAILED, "images[1] of turn 0 cannot be decoded"),
        (Vast, DECODED, Verdict.FAILED, "images of turn 0 have 16781312 pixels together, at most 16777216"),
        (Blind, DECODED, Verdict.NOTE, "no answer of an episode had any"),
    ],
)
async def test_images_that_break_the_contract_are_named(
    kind: type[Environment], name: str, verdict: Verdict, said: str
) -> None:
    found = (await check(kind))[name]
    assert (found.verdict, said in found.detail) == (verdict, True), found


class Lenient(ProviderServicer):
    """Takes clients for ones that show images."""

    async def Episode(
        self, requests: AsyncIterator[pb.EpisodeRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.EpisodeResponse]:
        async def changed() -> AsyncIterator[pb.EpisodeRequest]:
            async for request in requests:
                if request.HasField("reset"):
                    request.reset.images = True
                yield request

        async for response in super().Episode(changed(), context):
            yield response


async def test_clients_that_show_none_are_refused() -> None:
    assert (await check(Gallery))[UNASKED].verdict is Verdict.OK
    server = grpc.aio.server()
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(Lenient(Arena([Gallery])), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    found = {one.check: one async for one in check_provider(address, Sample(), "gallery")}
    await server.stop(grace=0)
    assert {one.check for one in found.values() if one.verdict is Verdict.FAILED} == {UNASKED}


async def test_an_episode_has_32_mib_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "MAX_EPISODE_IMAGES_BYTES", 100)
    found = (await check(Gallery))[DECODED]
    assert (found.verdict, "bytes up to turn 1, at most 100" in found.detail) == (Verdict.FAILED, True), found


async def test_without_pillow_images_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stored(Gallery):
        def _seen(self, reward: float) -> Observation:
            return Observation("?", reward, self.at == 3, images=[file])

    file = picture()
    monkeypatch.setitem(sys.modules, "PIL", None)
    found = (await check(Stored))[DECODED]
    assert (found.verdict, "pip install pillow" in found.detail) == (Verdict.SKIPPED, True), found
