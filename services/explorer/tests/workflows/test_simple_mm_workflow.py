"""simple_mm_workflow: the images of a task at their places in the prompt, and experiences that have them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.fakes.data.vision import make_model, picture
from support.fakes.explorers.toolbox import Toolbox, make_episode_task
from trinity.config.schema.model import ModelConfig
from trinity.data.experience import Limits, Task
from trinity.data.images import PlacedImage
from trinity.explorer.chat import ChatTokenizer
from trinity.explorer.workflows import WORKFLOWS
from trinity.runtime.errors import InvalidInput
from trinity.sdk.contract import Score

pytestmark = pytest.mark.core

SMALL, WIDE = picture(colour="red"), picture(48, 16)


class SeeingTools(Toolbox):
    """With a real tokenizer."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        super().__init__(lambda _: "3", scored=lambda *_: Score(1.0, {}))
        self.tokenizer = tokenizer

    def prompt(self, *args: Any, **options: Any) -> list[int]:
        return self.tokenizer.prompt(*args, **options)

    def placed(self, token_ids: Sequence[int], images: Sequence[bytes]) -> tuple[PlacedImage, ...]:
        return self.tokenizer.placed(token_ids, images)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(ModelConfig(model_path=str(make_model(tmp_path_factory.mktemp("vision") / "model"))))


def task(question: str | list[dict[str, str]], *shown: bytes, column: Any = None) -> Task:
    made = make_episode_task("{}", 2, row_json=json.dumps({"prompt": question, "response": "3", "image": column}))
    return replace(made, images=shown, format_json=json.dumps({**made.format, "image_key": "image"}))


async def test_experiences_have_the_images_that_the_prompt_shows(tokenizer: ChatTokenizer) -> None:
    tools = SeeingTools(tokenizer)
    asked = task("a <image> b <image>", SMALL, WIDE)
    made = await WORKFLOWS["simple_mm_workflow"](asked, tools).run()
    rules = tokenizer._image_rules
    assert rules is not None
    (shown,) = tools.shown
    assert [image.file for image in shown] == [SMALL, WIDE]
    assert [e.images for e in made] == [shown] * 2
    first, second = (image.start for image in shown)
    assert (second - first) == 16 + len(" b ") + 2, "an image of 16 tokens, the text, and the marks around images"
    for experience in made:
        experience.check("e", Limits(images=rules))


async def test_images_stand_in_the_message_that_has_their_marker(tokenizer: ChatTokenizer) -> None:
    async def places(*turns: str, shown: Sequence[bytes] = (SMALL, WIDE)) -> list[int]:
        roles = ("user", "assistant", "user")
        asked = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
        (first, *_) = await WORKFLOWS["simple_mm_workflow"](task(asked, *shown), SeeingTools(tokenizer)).run()
        return [image.start for image in first.images]

    at, later = await places("<image> a", "b", "and <image>")
    # Each turn has a mark before and behind it, and so has each image.
    assert (at, later - at - 16) == (2, 1 + len(" a") + 1 + len("?b?") + 1 + len("and ") + 1)
    at, later = await places("a", "b", "c")
    assert (at, later - at - 16) == (len("?a??b??") + 1, 2), "both before the last text"
    with pytest.raises(InvalidInput, match="are 1, and the prompt has 2 times <image>"):
        await places("<image>", "b", "<image>", shown=(SMALL,))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            task("how many?", column={"problem": "'image': 'a.png' cannot be read"}),
            "task.image: 'image': 'a.png' cannot",
        ),
        (task("how many?"), "task.image: has no image"),
        (task("<image>", SMALL, SMALL), "are 2, and the prompt has 1 times <image>"),
        (task("what is <|image_pad|>?", SMALL), "has 2 image placeholders for 1 images"),
    ],
)
async def test_an_attempt_without_the_images_of_its_task_fails(
    asked: Task, said: str, tokenizer: ChatTokenizer
) -> None:
    with pytest.raises(InvalidInput) as error:
        await WORKFLOWS["simple_mm_workflow"](asked, SeeingTools(tokenizer)).run()
    assert said in str(error.value)


async def test_a_prompt_that_is_too_long_is_not_cut_within_an_image(tokenizer: ChatTokenizer) -> None:
    tools = SeeingTools(tokenizer)
    tools.max_prompt_tokens = 20
    with pytest.raises(InvalidInput, match=r"tokens with its images, model\.max_prompt_tokens is 20"):
        await WORKFLOWS["simple_mm_workflow"](task("how many?", SMALL), tools).run()


def test_a_model_that_reads_text_alone_gets_no_images(quickstart_model: Path) -> None:
    plain = ChatTokenizer(ModelConfig(model_path=str(quickstart_model)))
    with pytest.raises(InvalidInput, match=r"are 1, and the model .* reads none"):
        plain.prompt([{"role": "user", "content": "?"}], images=[SMALL])
