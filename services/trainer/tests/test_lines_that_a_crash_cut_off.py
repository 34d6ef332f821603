"""A trainer that was killed while it wrote its lines of a step, or had no room: the lines that come next are whole."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog
import torch

from support.fakes.data.experience import make_experience
from support.fakes.data.pictures import picture
from trinity.trainer.data.batch import TrainBatch, TrainSequence
from trinity.trainer.engine.step import StepDone
from trinity.trainer.observers import Experiences, Notes
from trinity.trainer.process.ranks import Ranks

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


def test_a_full_disk_costs_the_lines_of_a_step_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is logged once, until a step can be written again."""
    done, experiences = _step(), Experiences(tmp_path)
    file = tmp_path / "buffer/experience_buffer.jsonl"
    experiences.begin(3)
    with structlog.testing.capture_logs() as logs:
        experiences.trained(done)
        with file.open("a") as lines:
            lines.write('{"step": 5, "cut')  # what the disk had room for
        file.rename(file.with_suffix(".away"))
        file.symlink_to("/dev/full")
        for _ in range(2):
            experiences.trained(done)
        file.unlink()
        file.with_suffix(".away").rename(file)
        experiences.trained(done)
    whole = file.read_text().splitlines()
    assert (len(whole), whole[4], whole[5:]) == (9, '{"step": 5, "cut', whole[:4])
    [said] = logs
    assert (said["event"], said["file"]) == ("trainer.step.not_written", str(file))
    assert "No space left on device" in said["reason"]


def test_notes_and_images_that_have_no_place_cost_no_run(tmp_path: Path) -> None:
    (tmp_path / "monitor").touch()  # where their folders would be
    (tmp_path / "buffer").mkdir()
    (tmp_path / "buffer/images").touch()
    engine: Any = SimpleNamespace(device=torch.device("cpu"), micro_batch_tokens=64)
    pictured = replace(_step().batch.sequences[0], images=(SimpleNamespace(file=picture()),))  # type: ignore[arg-type]
    done = replace(_step(), batch=TrainBatch(4, (pictured,)))
    observers = [Notes(tmp_path, engine, Ranks(0, 1, 0), lambda step: step, lambda: 0), Experiences(tmp_path)]
    with structlog.testing.capture_logs() as logs:
        for observer in observers:
            observer.begin(3)
            observer.trained(done)
            observer.close()
    assert [entry["event"] for entry in logs] == ["trainer.step.not_written"] * 2


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
