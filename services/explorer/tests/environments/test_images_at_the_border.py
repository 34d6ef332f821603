"""Images of environments are looked at where they arrive, and models that read none get no episode that shows any."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from support.fakes.data.pictures import picture
from support.fakes.environments.gallery import Gallery
from trinity.data.vision import ImageRules
from trinity.explorer.environments import episode as episode_module
from trinity.explorer.environments.client import EnvironmentCause, EnvironmentClient, EnvironmentFailed
from trinity.sdk import Observation, serving

pytestmark = pytest.mark.core

RULES = ImageRules(token=47, patch=4, merge=2, least_pixels=64, most_pixels=128 * 128)


@pytest.fixture
async def client() -> AsyncIterator[EnvironmentClient]:
    async with serving(Gallery) as address:
        made = EnvironmentClient("127.0.0.1:1", [("gallery", address)], wait_seconds=0.2, images=RULES)
        yield made
        await made.close()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
async def test_an_answer_has_the_files_that_were_shown(client: EnvironmentClient, form: str) -> None:
    shown = [picture(form=form), picture(9, 9, form=form)]
    async with client.episode("gallery", {"shown": [file.hex() for file in shown]}) as episode:
        first = await episode.reset()
        second = await episode.step("on")
    assert (first.images, second.images) == (tuple(shown), tuple(shown))


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ([picture(4097, 4096, "1")], "its images have 16781312 pixels together, at most 16777216"),
        ([picture(4096, 2100, "1")] * 2, "its images have 17203200 pixels together"),
        ([picture()[:60]], r"its images\[0\] cannot be decoded"),
        ([picture(), picture(mode="I;16")], r"its images\[1\] has Pillow's mode 'I;16'"),
        ([picture(2, 500)], r"its images\[0\] is 2 x 500 pixels, one side more than 200 times the other"),
    ],
)
async def test_an_image_that_the_model_cannot_see_fails_the_episode_with_its_cause(
    client: EnvironmentClient, shown: list[bytes], said: str
) -> None:
    async with client.episode("gallery", {"shown": [file.hex() for file in shown]}) as episode:
        with pytest.raises(EnvironmentFailed, match=said) as failure:
            await episode.reset()
    assert failure.value.cause is EnvironmentCause.CONTRACT_VIOLATION


async def test_an_episode_shows_no_more_than_its_part_of_a_group(
    client: EnvironmentClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = picture()
    monkeypatch.setattr(episode_module, "MAX_EPISODE_IMAGES_BYTES", 2 * len(file))
    async with client.episode("gallery", {"shown": [file.hex()]}) as episode:
        await episode.reset()
        await episode.step("on")
        said = f"the images of its episode have {3 * len(file)} bytes, at most {2 * len(file)}"
        with pytest.raises(EnvironmentFailed, match=said) as failure:
            await episode.step("on")
    assert failure.value.cause is EnvironmentCause.CONTRACT_VIOLATION


async def test_a_model_that_reads_text_alone_gets_no_episode_with_images() -> None:
    async with serving(Gallery) as address:
        made = EnvironmentClient("127.0.0.1:1", [("gallery", address)], wait_seconds=0.2)
        async with made.episode("gallery", {}) as episode:
            with pytest.raises(EnvironmentFailed, match="shows images, and the model reads none") as failure:
                await episode.reset()
        await made.close()
    assert (failure.value.cause, failure.value.passing) == (EnvironmentCause.REFUSED, False)


class Unannounced(Gallery):
    description = replace(Gallery.description, images=False)


class Many(Gallery):
    def reset(self, *_: object) -> Observation:
        return Observation("", images=[picture()] * 17)


class Large(Gallery):
    def reset(self, *_: object) -> Observation:
        return Observation("", images=[picture() + bytes(4 << 20)])


class Text(Gallery):
    def reset(self, *_: object) -> Observation:
        return Observation("", images=[b"a text"])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Unannounced, "has 1 images, and its description announces none"),
        (Many, "has 17 images, at most 16"),
        (Large, "its images have .* bytes together, at most 4194304"),
        (Text, r"its images\[0\] is no PNG, JPEG or WebP file \(6 bytes\)"),
    ],
)
async def test_an_answer_against_the_contract_ends_its_episode_at_the_provider(kind: type[Gallery], said: str) -> None:
    async with serving(kind) as address:
        made = EnvironmentClient("127.0.0.1:1", [("gallery", address)], wait_seconds=0.2, images=RULES)
        async with made.episode("gallery", {}) as episode:
            with pytest.raises(EnvironmentFailed, match=said) as failure:
                await episode.reset()
        await made.close()
    assert failure.value.cause is EnvironmentCause.CONTRACT_VIOLATION
