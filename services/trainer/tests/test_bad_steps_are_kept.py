"""Batches of bad steps are stored with the groups that cause them; then the run stops or skips the batch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support.experience import make_group, make_task
from support.training import BASE
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.api.common.v1 import experience_pb2
from trinity.config import make_plan
from trinity.config.schema import Config
from trinity.data.wire import encode_outcome
from trinity.trainer.control import Control
from trinity.trainer.data import kept
from trinity.trainer.data.bad_steps import NotFinite, OutOfMemory, Undecodable
from trinity.trainer.data.batch import TrainBatch
from trinity.trainer.data.client import RawBatch
from trinity.trainer.loop import TrainLoop
from trinity.trainer.ranks import Ranks

pytestmark = pytest.mark.core

STEP = 3


class Engine:
    """Fails every step, and names the group that causes it."""

    device = torch.device("cpu")
    micro_batch_tokens = 64

    def __init__(self, problem: Exception) -> None:
        self._problem = problem

    def train(self, batch: TrainBatch, last_step: int) -> dict[str, float]:
        raise self._problem

    def per_group_stats(self, batch: TrainBatch) -> list[dict[str, Any]]:
        groups = sorted({sequence.group for sequence in batch.sequences})
        return [{"group": group, "loss": 0.5, "finite": group != 1} for group in groups]


class Loop(TrainLoop):
    """Notes the checkpoints that it would write."""

    saved: tuple[int, ...] = ()

    def _save(self, step: int) -> None:
        self.saved = (*self.saved, step)


def loop_of(problem: Exception, policy: str, folder: Path) -> Loop:
    config = {**BASE, "model": {**BASE["model"], "model_path": "m"}, "checkpoint_root_dir": str(folder)}
    plan = make_plan(Config.model_validate({**config, "trainer": {"on_bad_step": policy}}))
    engine: Any = Engine(problem)
    return Loop(plan, "run", Ranks(0, 1, 0), engine, Control(), None, None, folder)


def raw_batch() -> RawBatch:
    raw = RawBatch(pb.LedgerEntry(step=STEP))
    for number in range(3):
        group = make_group(make_task(number + 1, repeat_times=4))
        raw.entry.groups.add(task_id=group.task.task_id, log_sequence=10 + number, num_experiences=4)
        raw.groups.append(pb.BatchGroup(outcome=encode_outcome(group)))
    return raw


def test_a_bad_batch_is_skipped_and_kept_whole(tmp_path: Path) -> None:
    loop, raw = loop_of(NotFinite("loss", STEP), "skip", tmp_path), raw_batch()
    batch, metrics = loop._learn(raw)
    assert metrics == {"bad_step": 1.0}
    assert (batch.step, len(batch.sequences)) == (STEP, 12)
    assert loop.saved == ()
    report = json.loads((tmp_path / f"bad_steps/step_{STEP}/report.json").read_text())
    assert report["blamed"] == [{"group": 1, "task_id": raw.entry.groups[1].task_id, "log_sequence": 11}]
    assert [group["log_sequence"] for group in report["groups"]] == [10, 11, 12]
    again = kept.read_batch(tmp_path, STEP)
    assert again.entry == raw.entry
    assert again.groups == raw.groups


def test_a_bad_batch_ends_the_run_after_a_checkpoint_of_the_step_before(tmp_path: Path) -> None:
    loop = loop_of(NotFinite("loss", STEP), "stop", tmp_path)
    with pytest.raises(NotFinite, match=r"step 3: the loss is not finite; groups 1 of the batch") as raised:
        loop._learn(raw_batch())
    assert raised.value.for_good, "the same batch would come again"
    assert loop.saved == (STEP - 1,)


def test_weights_that_an_update_of_the_bad_step_has_changed_are_no_checkpoint(tmp_path: Path) -> None:
    problem = NotFinite("norm of the gradient", STEP)
    problem.updates = 1
    loop = loop_of(problem, "stop", tmp_path)
    with pytest.raises(NotFinite):
        loop._learn(raw_batch())
    assert loop.saved == ()


def test_memory_that_runs_out_is_a_bad_step_too(tmp_path: Path) -> None:
    loop = loop_of(OutOfMemory("memory is not enough", STEP, [2]), "skip", tmp_path)
    assert loop._learn(raw_batch())[1] == {"bad_step": 1.0}
    report = json.loads((tmp_path / f"bad_steps/step_{STEP}/report.json").read_text())
    assert (report["problem"], [group["group"] for group in report["blamed"]]) == ("memory is not enough", [2])
    assert report["groups"] == [], "statistics need memory too"


def test_a_reward_that_is_not_finite_never_reaches_the_models(tmp_path: Path) -> None:
    raw = raw_batch()
    raw.entry.groups[2].experiences.add(index=0, reward=float("inf"))
    loop = loop_of(AssertionError("the engine was asked"), "stop", tmp_path)
    with pytest.raises(NotFinite, match=r"step 3: the reward is not finite; groups 2 of the batch"):
        loop._learn(raw)


@pytest.mark.parametrize("damage", ["info_json", "bytes", "index"])
def test_a_group_that_cannot_be_decoded_is_named_with_its_explorer(tmp_path: Path, damage: str) -> None:
    raw = raw_batch()
    outcome = experience_pb2.Outcome.FromString(raw.groups[1].outcome)
    outcome.group.experiences[0].info_json = "[1]" if damage == "info_json" else ""
    raw.groups[1].outcome = b"\xff" if damage == "bytes" else outcome.SerializeToString()
    if damage == "index":
        raw.entry.groups[1].experiences.add(index=9, reward=1.0)
    loop = loop_of(AssertionError("the engine was asked"), "stop", tmp_path)
    task = raw.entry.groups[1].task_id
    with pytest.raises(Undecodable, match=f"step 3: the group of task '{task}'") as raised:
        loop._learn(raw)
    assert ("of explorer 'tester', attempt 1," in str(raised.value)) == (damage != "bytes")
    assert str(raised.value).endswith("; groups 1 of the batch; `trinity batch skip 3 --reason TEXT` passes it")
    assert raised.value.for_good
    assert kept.read_batch(tmp_path, STEP).groups == raw.groups
    report = json.loads((tmp_path / f"bad_steps/step_{STEP}/report.json").read_text())
    assert report["blamed"] == [{"group": 1, "task_id": task, "log_sequence": 11}]


def test_a_step_that_an_operator_skips_is_passed_untrained(tmp_path: Path) -> None:
    raw = RawBatch(raw_batch().entry)
    raw.entry.skip_reason = "a bad group"
    loop = loop_of(AssertionError("the engine was asked"), "stop", tmp_path)
    assert loop._learn(raw) == (TrainBatch(STEP, ()), {"skipped_step": 1.0})
    assert loop._train(raw) == STEP


def test_a_step_that_was_not_kept_has_no_batch(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        kept.read_batch(tmp_path, 9)
