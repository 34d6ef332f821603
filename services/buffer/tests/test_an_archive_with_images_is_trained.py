"""Groups of an archive reach the trainer with their images, which the model must read."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from support.fakes.data.archives import facts, groups_of
from support.fakes.data.pictures import picture
from support.fakes.data.vision import make_files
from trinity.archive import open_archive
from trinity.buffer.ledger.offline import _Recorded
from trinity.config.schema.buffer import ExperienceBufferConfig
from trinity.config.schema.model import ModelConfig
from trinity.data.experience import Group
from trinity.data.images import expanded, placed
from trinity.data.vision import image_rules
from trinity.data.wire import decode_outcome
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core

SHOWN = (picture(24, 16, colour="red"), picture())


def with_images(group: Group, model: Path) -> Group:
    rules = image_rules(str(model))
    assert rules is not None
    prompt = expanded([1, rules.token, 2, rules.token, 3], SHOWN, rules)
    made = []
    for one in group.experiences:
        tokens = np.array([*prompt, *one.token_ids[one.prompt_length :]], np.int32)
        images = placed(prompt, SHOWN, rules)
        made.append(dataclasses.replace(one, token_ids=tokens, prompt_length=len(prompt), images=images))
    return dataclasses.replace(group, experiences=tuple(made))


def test_a_group_is_trained_as_it_was_stored_or_refused(tmp_path: Path) -> None:
    model, path = make_files(tmp_path / "model"), str(tmp_path / "kept.jsonl")
    (_, text), (_, other) = groups_of(1, 2)
    shown = with_images(other, model)
    moved = [dataclasses.replace(one, images=tuple(i.moved(1) for i in one.images)) for one in shown.experiences]
    wrong = dataclasses.replace(shown, experiences=tuple(moved))
    archive = open_archive(path, "kept", "run")
    archive.append([(1, text), (2, shown), (3, wrong)], position=3)
    archive.close()
    source = ExperienceBufferConfig(name="kept", path=path)
    recorded = _Recorded(source, ModelConfig(model_path=str(model)))
    assert [facts(decode_outcome(recorded.part(row).outcome)) for row in (0, 1)] == [facts(text), facts(shown)]  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"group 2 of .*experiences\[0\].token_ids: has no .* image placeholders"):
        recorded.part(2)
    blind = _Recorded(source, ModelConfig(model_path=str(model), images=False))
    assert decode_outcome(blind.part(0).outcome)
    with pytest.raises(InvalidInput, match="has images in group 1, and a model of type 'qwen2_5_vl' reads images if"):
        blind.part(1)
