"""Images that environments show stand at their places among an episode's tokens, for the engine and in experiences."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.fakes.data.pictures import picture
from support.fakes.data.vision import make_tokenizer
from support.fakes.explorers.toolbox import IMAGE, PLACES, SAMPLED, Toolbox, make_episode_task, play, turns
from trinity.compat_rft.workflows import WORKFLOWS as OF_TRINITY_RFT
from trinity.config.schema.model import ModelConfig
from trinity.data.experience import Experience, Limits
from trinity.data.images import PlacedImage
from trinity.data.vision import ImageRules
from trinity.explorer.chat import ChatTokenizer
from trinity.explorer.workflows import WORKFLOWS, player
from trinity.runtime.errors import InvalidInput
from trinity.sdk.contract import Answer

pytestmark = pytest.mark.core

# Four tokens of an image, as the toolbox has them.
RULES = ImageRules(token=IMAGE, patch=4, merge=2, least_pixels=64, most_pixels=128 * 128)
FIRST, SECOND, THIRD = (picture(16, 16, colour=colour) for colour in ("red", "green", "blue"))


class Pictures:
    """Shows a picture at each turn and asks for it; four turns."""

    deterministic, snapshots = True, False
    said = "look <image>"

    def __init__(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> None:
        self.turn = 0

    async def __aenter__(self) -> "Pictures":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def reset(self, keep_states: bool = False) -> Answer:
        return Answer(self.said, images=(FIRST,))

    async def step(self, action: str) -> Answer:
        self.turn += 1
        shown = {1: (SECOND, THIRD), 2: ()}.get(self.turn, (FIRST,))
        return Answer(self.said, 0.25, self.turn == 4, images=shown)


def toolbox(said: str = "a picture", environment: type[Pictures] = Pictures, **options: Any) -> Toolbox:
    return Toolbox(lambda _: said, {"pictures": environment}, **options)


async def played(tools: Toolbox, **args: Any) -> list[Experience]:
    made = await play(tools, make_episode_task(json.dumps({"environment": "pictures", **args}), 1))
    for index, experience in enumerate(made):
        experience.check(f"experience {index}", Limits(images=RULES))
        check_places(experience.token_ids.tolist(), experience.images)
    for prompt, shown in zip(tools.prompts, tools.shown, strict=True):
        check_places(prompt, shown)
    return made


def check_places(tokens: list[int], images: Any) -> None:
    for image in images:
        assert tokens[image.start : image.start + PLACES] == [IMAGE] * PLACES


def files(images: Any) -> list[bytes]:
    return [image.file for image in images]


@pytest.mark.parametrize("said", ["a picture", SAMPLED, f"{SAMPLED * 5} {SAMPLED * PLACES}"])
async def test_an_episode_of_one_sequence_has_its_images_where_they_were_shown(said: str) -> None:
    """Whatever tokens the policy sampled."""
    tools = toolbox(said)
    (made,) = await played(tools)
    assert [files(shown) for shown in tools.shown] == [
        [FIRST],
        *[[FIRST, SECOND, THIRD]] * 2,
        [FIRST, SECOND, THIRD, FIRST],
    ]
    assert files(made.images) == [FIRST, SECOND, THIRD, FIRST]
    assert made.images == tools.shown[-1]
    sampled = made.token_ids[made.prompt_length :][made.action_mask].tolist()
    assert sampled.count(IMAGE) == 4 * said.count(SAMPLED)
    # Of the second answer and the third the text is as the environment wrote it: it has other markers than images.
    assert (made.prompt_text, made.response_text.count("<image>")) == ("[user] look <image>", 2 + 1 + 1 + 1)
    second = made.token_ids[: made.images[1].start].tolist()
    assert [role for role, _ in turns(second)] == ["user", "assistant", "user"]


async def test_each_turn_of_its_own_has_the_images_before_it() -> None:
    made = await played(toolbox(SAMPLED), step_wise=True)
    assert [len(one.images) for one in made] == [1, 3, 3, 4]
    for one in made:
        assert all(image.start < one.prompt_length for image in one.images)


async def test_other_pictures_with_the_same_text_are_another_state() -> None:
    states = [json.loads(one.info_json)["env_state_hash"] for one in await played(toolbox(), step_wise=True)]
    assert states[0] == states[3]
    assert len(set(states)) == 3


async def test_a_template_that_rewrites_history_shows_all_images_again() -> None:
    tools = toolbox(history_problem="it leaves out thoughts")
    made = await played(tools, step_wise=True)
    assert [files(one.images) for one in made][1:3] == [[FIRST, SECOND, THIRD]] * 2


async def test_a_new_conversation_has_its_own_images_alone() -> None:
    class New(Pictures):
        async def step(self, action: str) -> Answer:
            return replace(await super().step(action), info_json='{"conversation": "new"}')

    made = await played(toolbox(environment=New), step_wise=True)
    assert [files(one.images) for one in made] == [[FIRST], [SECOND, THIRD], [], [FIRST]]


async def test_an_observation_that_is_told_again_shows_its_images_again() -> None:
    tools = toolbox("no action")
    made = await played(tools, action_form="action", on_bad_format="no_op", max_turns=2)
    assert files(made[0].images) == [FIRST, FIRST]
    assert "Nothing happens" in turns(tools.prompts[-1])[-2][1]


async def test_an_episode_ends_where_the_next_prompt_has_more_images_than_an_engine_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(player, "MOST_IMAGES", 2)
    (made,) = await played(toolbox())
    assert (made.metrics["end_context_limit"], made.metrics["steps"]) == (1.0, 1.0)
    assert files(made.images) == [FIRST]


async def test_what_a_policy_spells_is_no_image_where_an_environment_repeats_it() -> None:
    class Echo(Pictures):
        async def step(self, action: str) -> Answer:
            step = await super().step(action)
            return replace(step, observation=f"you said <image> and {SAMPLED}: <image>", images=step.images[:1])

    tools = toolbox(environment=Echo)
    (made,) = await played(tools)
    assert files(made.images) == [FIRST, SECOND, FIRST]
    assert turns(tools.prompts[1])[2][1] == "you said <image> and ?: <image>"


async def test_the_real_tokenizer_places_images_of_later_turns(tmp_path: Path) -> None:
    chat = ChatTokenizer(ModelConfig(model_path=str(make_tokenizer(tmp_path / "model"))))
    rules = chat._image_rules
    assert rules is not None
    wide = picture(48, 16)
    told = chat.next_turn([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "and?"}]}], [wide])
    (place,) = chat.placed(told, [wide])
    assert place == PlacedImage(3, wide), "the end of a turn, a role, and the mark before an image"
    assert told[3 : 3 + rules.tokens(48, 16)] == [rules.token] * 12
    assert chat.placed(told, []) == ()
    said = chat.observed("what is <|image_pad|>?")
    assert said == "what is <|image_pad| >?"
    assert rules.token not in chat.tokens(said)
    with pytest.raises(InvalidInput, match="has 1 image placeholders for 2 images"):
        chat.next_turn([{"role": "user", "content": [{"type": "image"}]}], [wide, wide])


@pytest.mark.parametrize("name", ["R3L_workflow", "tool_call_workflow"])
async def test_workflows_that_read_text_alone_refuse_images(name: str) -> None:
    class Tools(Pictures):
        async def reset(self, keep_states: bool = False) -> Answer:
            return replace(await super().reset(), info_json='{"tools": [{"name": "look"}]}')

    args = json.dumps({"environment": "pictures"})
    row = json.dumps({"prompt": "?", "response": "3"})
    task = replace(make_episode_task(args, 2, row_json=row), workflow=name)
    with pytest.raises(
        InvalidInput, match=r"only reads text, and pictures shows images|names an environment that shows images"
    ):
        await {**WORKFLOWS, **OF_TRINITY_RFT}[name](task, toolbox(environment=Tools)).run()
