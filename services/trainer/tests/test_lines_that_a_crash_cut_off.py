"""A trainer that was killed while it wrote its lines of a step: the lines that come next are whole."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.data.experience import make_experience
from trinity.trainer.data.batch import TrainBatch, TrainSequence
from trinity.trainer.engine.step import StepDone
from trinity.trainer.observers import Experiences

pytestmark = pytest.mark.core


@pytest.mark.parametrize("left", [0, 1, 40, None], ids=["nothing", "one byte", "a part", "all but the line's end"])
def test_a_step_that_is_trained_again_has_all_its_lines(tmp_path: Path, left: int | None) -> None:
    file = tmp_path / "buffer/experience_buffer.jsonl"
    done = _step()
    first = Experiences(tmp_path)
    first.begin(3)
    first.trained(done)
    whole = file.read_text()
    lines = whole.splitlines(keepends=True)
    file.write_text("".join(lines[:2]) + lines[2].removesuffix("\n")[:left])
    again = Experiences(tmp_path)
    again.begin(3)
    again.trained(done)
    found = file.read_text().splitlines()
    assert found[-4:] == whole.splitlines(), "the first of them is joined to what was cut off"
    assert [json.loads(line)["rollout"] for line in found[-4:]] == [0, 1, 2, 3]


def _step() -> StepDone:
    rng = np.random.default_rng(0)
    sequences = []
    for rollout in range(4):
        made = make_experience(rng, rollout, 6, version=2)
        given = made.token_ids, made.prompt_length, made.logprobs, made.action_mask
        sequences.append(TrainSequence(*given, group=0, experience=made))
    group = SimpleNamespace(task_id="sums/0/18/8", ordinal=19, staleness_steps=1, log_sequence=22)
    raw: Any = SimpleNamespace(entry=SimpleNamespace(groups=[group]))
    return StepDone(raw, TrainBatch(4, tuple(sequences)), {})
