"""Images of tasks: read from rows in every form, refused by name, and as many tokens as the model's processor makes."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from support.fakes.data.experience import make_group, make_task
from support.fakes.data.vision import ASKED, KINDS, make_files, picture
from trinity.config import make_plan
from trinity.config.load import parse
from trinity.data import datasets, images
from trinity.data.experience import Group, Limits, TaskKind
from trinity.data.tables import DatasetError
from trinity.data.task_source import TaskSource
from trinity.data.vision import ImageRules, image_rules, why_no_images
from trinity.data.wire import (
    decode_outcome,
    decode_task,
    encode_outcome,
    outcome_from_proto,
    parse_outcome,
    task_to_proto,
)
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core

RULES = ImageRules(token=47, patch=4, merge=2, least_pixels=64, most_pixels=128 * 128)
WHITE = picture(colour="white")


@pytest.mark.parametrize("size", [(32, 32), (1, 200), (7, 9), (300, 20), (1000, 900), (129, 127), (12, 20)])
@pytest.mark.parametrize(
    "rules", [RULES, ImageRules(1, 14, 2, 56 * 56, 14 * 14 * 4 * 1280), ImageRules(1, 16, 2, 2**16, 2**24)]
)
def test_grids_are_those_of_the_processor(size: tuple[int, int], rules: ImageRules) -> None:
    width, height = size
    rows, columns = smart_resize(height, width, rules.patch * rules.merge, rules.least_pixels, rules.most_pixels)
    assert rules.grid(width, height) == (1, rows // rules.patch, columns // rules.patch)
    assert rules.tokens(width, height) == rows * columns // (rules.patch * rules.merge) ** 2


def test_the_rules_are_in_the_models_files(tmp_path: Path) -> None:
    for kind in KINDS:
        assert image_rules(str(make_files(tmp_path / "a", kind))) == RULES
    assert image_rules(str(tmp_path / "none")) is None
    assert why_no_images(str(tmp_path / "a")) is why_no_images(str(tmp_path / "none")) is None
    assert image_rules(str(tmp_path / "a"), wanted=False) is None
    for kind in ASKED:
        make_files(tmp_path / "a", kind)
        assert image_rules(str(tmp_path / "a")) is None
        assert "reads images if model.images is true" in (why_no_images(str(tmp_path / "a")) or "")
        assert image_rules(str(tmp_path / "a"), wanted=True) == RULES
    make_files(tmp_path / "a")
    config = json.loads((tmp_path / "a/config.json").read_text())
    (tmp_path / "b").mkdir()
    (tmp_path / "b/config.json").write_text(json.dumps({**config, "image_token_id": None}))
    with pytest.raises(InvalidInput, match="has no image processor that can be used"):
        image_rules(str(tmp_path / "b"))
    (tmp_path / "b/config.json").write_text(json.dumps({**config, "model_type": "gemma3"}))
    assert image_rules(str(tmp_path / "b")) is None
    assert "'gemma3' trains on text only" in (why_no_images(str(tmp_path / "b")) or "")


def test_a_column_holds_images_in_any_form(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(WHITE)
    url = "data:image/png;base64," + base64.b64encode(WHITE).decode()
    forms: list[Any] = [
        "a.png", str(tmp_path / "a.png"), WHITE, {"bytes": WHITE, "path": None}, {"bytes": None, "path": "a.png"}, url,
        {"type": "image_url", "image_url": {"url": url}}, {"type": "image", "image": "a.png"}, ["a.png"],
    ]  # fmt: skip
    for form in forms:
        assert images.of_row({"i": form}, "i", tmp_path) == (WHITE,), form
    assert images.of_row({"i": ["a.png", WHITE]}, "i", tmp_path) == (WHITE, WHITE)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, "'i' is missing"),
        ({"i": []}, "'i' is an empty list"),
        ({"i": 3}, "'i' holds 3, must be a path, bytes or an image part"),
        ({"i": "no.png"}, "no.png' cannot be read: No such file"),
        ({"i": "https://example.org/a.png"}, "URLs are not fetched. List its beginning in format.image_urls, or"),
        ({"i": "data:image/png;base64,%%"}, "is no base64"),
        ({"i": b"GIF89a"}, "row 3: 'i': 6 bytes: image: is no image that Pillow reads"),
        ({"i": {"path": "cut.png"}}, "row 3: 'i': cut.png: image: cannot be decoded"),
        ({"i": picture(mode="I;16")}, "has Pillow's mode 'I;16'; convert it"),
        ({"i": picture(mode="CMYK", colour=(0, 0, 0, 0), form="TIFF")}, "has Pillow's mode 'CMYK'"),
        ({"i": picture(2100, 2)}, "one side more than 200 times the other"),
        ({"i": [WHITE, WHITE, WHITE]}, "takes 48 tokens, model.max_prompt_tokens is 40; make it smaller"),
        ({"i": bytes(images.LARGEST_BYTES + 1)}, "a task takes 6,291,456. Make them smaller"),
    ],
)
def test_what_is_no_image_is_refused_by_row_and_file(row: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "cut.png").write_bytes(picture(64, 64)[:-40])
    with pytest.raises(DatasetError) as error:
        images.check(row, 3, "i", tmp_path, RULES, 40)
    assert said in str(error.value)
    assert str(error.value).startswith("row 3: ")


def conversation(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "Count."}, {"role": "user", "content": list(parts)}]


def test_messages_hold_images_as_openais_parts(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(WHITE)
    wide = picture(16, 8)
    url = "data:image/png;base64," + base64.b64encode(wide).decode()
    asked = conversation(
        {"type": "text", "text": "How many in ", "image_url": None},
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": " and "},
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
    )
    asked += [{"role": "assistant", "content": "Two."}, {"role": "user", "content": "And now?"}]
    assert images.of_row({"m": asked}, "m", tmp_path) == (WHITE, wide)
    assert images.as_text(asked, "m") == [
        asked[0], {"role": "user", "content": "How many in <image> and <image>"}, *asked[2:]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (conversation({"type": "text", "text": "?"}), "'m' has no image in its messages"),
        (conversation({"type": "video", "video": "a.mp4"}), "in message 1; parts are text, image_url or image"),
        (conversation({"type": "text"}), "in message 1; parts are text"),
        (conversation("a.png"), "'m' has a part 'a.png' in message 1"),
        (conversation({"type": "image_url", "image_url": {"url": "https://a.org/b.png"}}), "URLs are not fetched"),
        (conversation({"type": "image", "image": "gone.png"}), "gone.png' cannot be read"),
    ],
)
def test_messages_without_images_that_can_be_read_are_refused(value: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError) as error:
        images.check({"m": value}, 3, "m", tmp_path, RULES, 40)
    assert said in str(error.value)
    assert str(error.value).startswith("row 3: ")
    with pytest.raises(DatasetError, match="it must hold messages"):
        images.as_text("a.png", "m")


def test_an_image_of_too_many_pixels_is_not_decoded() -> None:
    with pytest.raises(InvalidInput, match="9000 x 9000 pixels; at most 64,000,000"):
        images.rgb(picture(9000, 9000, "1"))


def test_transparent_pixels_are_white() -> None:
    for mode, clear in (("RGBA", (0, 0, 0, 0)), ("LA", (0, 0))):
        assert images.rgb(picture(mode=mode, colour=clear)).getpixel((0, 0)) == (255, 255, 255)
    assert images.rgb(picture(mode="L", colour=7)).getpixel((0, 0)) == (7, 7, 7)


def test_images_stand_at_their_markers_or_first() -> None:
    image, text = {"type": "image"}, {"type": "text", "text": "Why?"}
    assert images.parts("Why?", 2) == [image, image, text]
    assert images.parts("<image>Why?<image>", 2) == [image, text, image]
    with pytest.raises(InvalidInput, match="are 1, and the prompt has 2 times"):
        images.parts("<image><image>", 1)


def test_placeholders_are_as_many_as_tokens_and_back() -> None:
    wide = picture(16, 8)
    prompt = [1, 47, 2, 47, 3]
    whole = images.expanded(prompt, [WHITE, wide], RULES)
    assert whole == [1, *[47] * 16, 2, *[47] * 2, 3]
    shown = images.placed(whole, [WHITE, wide], RULES)
    assert shown == (images.PlacedImage(1, WHITE), images.PlacedImage(18, wide))
    assert images.collapsed(whole, shown, RULES) == prompt
    with pytest.raises(InvalidInput, match="has 2 image placeholders for 1 images"):
        images.expanded(prompt, [WHITE], RULES)


def test_tokens_that_a_policy_sampled_are_no_placeholders() -> None:
    """They have their id, and may stand before an image or touch it."""
    told = images.expanded([2, 47, 3], [WHITE], RULES)
    (image,) = images.placed(told, [WHITE], RULES)
    tokens = [1, 47, 9, 47, *told[1:], 47, 5]
    shown = (image.moved(3),)
    assert shown == (images.PlacedImage(4, WHITE),)
    assert images.collapsed(tokens, shown, RULES) == [1, 0, 9, 0, 47, 3, 0, 5]
    assert images.collapsed([47, 1], (), replace(RULES, token=0)) == [47, 1]
    images.check_placeholders("e", tokens, shown, RULES)
    images.check_placeholders("e", [*[47] * 32], (images.PlacedImage(0, WHITE), images.PlacedImage(16, WHITE)), RULES)
    with pytest.raises(InvalidInput, match="have more image placeholders than their 1 images take"):
        images.placed([*told, 47], [WHITE], RULES)
    with pytest.raises(InvalidInput, match="have more image placeholders than their 0 images take"):
        images.placed(told, [], RULES)
    with pytest.raises(InvalidInput, match="has no 16 image placeholders at 1"):
        images.placed(told[:-4], [WHITE], RULES)


def test_an_environments_images_stand_at_its_markers_unless_there_are_others() -> None:
    image = {"type": "image"}
    assert images.observed("a <image>", 1) == [{"type": "text", "text": "a "}, image]
    for text in ("You said <image>: <image>", "none"):
        assert images.observed(text, 1) == [image, {"type": "text", "text": text}]
        assert images.plain(images.observed(text, 1)) == f"<image>{text}"
    assert images.plain("text") == "text"


def experience_of(image: bytes, prompt: list[int], *places: int, files: tuple[bytes, ...] = ()) -> Group:
    """A group of one experience with the image at these places; `files` are the task's."""
    group = make_group(make_task(images=files, repeat_times=1))
    first = group.experiences[0]
    tokens = np.array([*prompt, *[47] * first.response_length], np.int32)  # the policy sampled the same token
    shown = tuple(images.PlacedImage(place, image) for place in places)
    return replace(group, experiences=(replace(first, token_ids=tokens, prompt_length=len(prompt), images=shown),))


@pytest.mark.parametrize("files", [(), (WHITE,), (WHITE, picture(9, 9))])
def test_a_group_keeps_each_image_once_whether_the_task_or_an_environment_showed_it(files: tuple[bytes, ...]) -> None:
    made = experience_of(WHITE, [1, *[47] * 16, 2, *[47] * 16], 1, 18, files=files)
    group = replace(made, task=replace(made.task, repeat_times=2), experiences=made.experiences * 2)
    data = encode_outcome(group)
    read = decode_outcome(data)
    assert isinstance(read, Group)
    assert (read.task.images, data.count(WHITE)) == (files, 1)
    assert [one.images for one in read.experiences] == [made.experiences[0].images] * 2
    read.experiences[0].check("e", Limits(images=RULES))
    assert decode_task(task_to_proto(group.task).SerializeToString()).images == files


@pytest.mark.parametrize(
    ("prompt", "places", "said"),
    [
        ([1, *[47] * 15], (1,), r"token_ids: has no 16 image placeholders at 1, as its image there takes"),
        ([1], (0,), "has no 16 image placeholders at 0"),
        ([1], (-1,), "has no 16 image placeholders at -1"),
        ([1], (4000,), "has no 16 image placeholders at 4000"),
        ([1, *[47] * 17], (1, 2), "has no 16 image placeholders at 2"),
        ([47] * 16, (0,) * 129, "images: are 129, at most 128"),
    ],
)
def test_images_whose_placeholders_are_not_there_are_refused(
    prompt: list[int], places: tuple[int, ...], said: str
) -> None:
    """Sampled tokens are none: the first case has one behind the prompt."""
    with pytest.raises(InvalidInput, match=said):
        experience_of(WHITE, prompt, *places).check(Limits(images=RULES))


def test_a_group_whose_files_and_references_do_not_agree_is_refused() -> None:
    message = parse_outcome(encode_outcome(experience_of(WHITE, [1, *[47] * 16], 1)))
    message.group.images.append(b"of no experience")
    with pytest.raises(InvalidInput, match=r"group.images\[1\]: is in no experience"):
        outcome_from_proto(message)
    del message.group.images[:]
    with pytest.raises(
        InvalidInput, match=r"experiences\[0\].images\[0\].digest: .* no image of the task or the group"
    ):
        outcome_from_proto(message)


def source_of(folder: Path, rows: list[dict[str, Any]], **form: str) -> TaskSource:
    (folder / "a.png").write_bytes(WHITE)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    taskset = {
        "path": str(folder / "rows.jsonl"),
        "default_workflow_type": "simple_mm_workflow",
        "format": {"prompt_key": "q", "response_key": "a", **form},
    }
    buffer = {"batch_size": 1, "explorer_input": {"taskset": taskset}}
    config = {"model": {"model_path": "m"}, "buffer": buffer, "algorithm": {"repeat_times": 2}}
    plan = make_plan(parse(json.dumps(config), "test"))
    return TaskSource.open("run", plan, plan.config.buffer.explorer_input.taskset, TaskKind.TRAIN)  # type: ignore[arg-type]


def test_a_task_carries_its_images_and_says_what_is_wrong_with_one(tmp_path: Path) -> None:
    rows = [{"q": "?", "a": "1", "i": "a.png"}, {"q": "?", "a": "1", "i": "gone.png"}]
    source = source_of(tmp_path, rows, image_key="i")
    good, bad = source.train_task(0, 1, 0), source.train_task(1, 2, 0)
    assert (good.images, good.raw["i"]) == ((WHITE,), [images.digest(WHITE).hex()])
    assert bad.images == ()
    assert "gone.png' cannot be read" in bad.raw["i"]["problem"]


def test_a_dataset_of_the_hub_has_the_files_of_its_images(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("datasets")
    kinds = hub.Features({"q": hub.Value("string"), "i": hub.List(hub.Image()), "s": hub.Image()})
    file = {"bytes": WHITE, "path": None}
    found = hub.Dataset.from_dict({"q": ["?"], "i": [[file, file]], "s": [file]}, features=kinds)
    monkeypatch.setattr(hub, "load_dataset", lambda *_, **__: found)
    monkeypatch.setattr(datasets, "_hub_silence", lambda _: "")
    (row,) = datasets.read("some/pictures")
    assert row["q"] == "?"
    assert images.of_row(row, "i", Path()) == (WHITE, WHITE)
    assert images.of_row(row, "s", Path()) == (WHITE,)


def test_a_task_of_messages_has_text_and_its_images_apart(tmp_path: Path) -> None:
    part = {"type": "image", "image": "a.png"}
    rows = [{"q": conversation(part, {"type": "text", "text": "?"}), "a": "1"}, {"q": conversation(), "a": "1"}]
    source = source_of(tmp_path, rows, image_key="q")
    good, bad = source.train_task(0, 1, 0), source.train_task(1, 2, 0)
    assert good.images == (WHITE,)
    assert good.raw["q"] == [{"role": "system", "content": "Count."}, {"role": "user", "content": "<image>?"}]
    assert "has no image in its messages" in bad.raw["q"]["problem"]
