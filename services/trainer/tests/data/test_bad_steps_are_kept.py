"""Batches of bad steps are stored with the groups that cause them; then the run stops or skips the batch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support.fakes.data.experience import make_group, make_task
from support.programs.trainer.training import BASE
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.api.common.v1 import experience_pb2
from trinity.config import make_plan
from trinity.config.schema import Config
from trinity.data.wire import encode_outcome
from trinity.trainer.data import bad_steps
from trinity.trainer.data.bad_steps import BadStep, NotFinite, OutOfMemory, Undecodable
from trinity.trainer.data.batch import TrainBatch
from trinity.trainer.data.client import RawBatch
from trinity.trainer.data.source import Command, Finish, Skip, Train
from trinity.trainer.engine.step import StepDone, StepTrainer
from trinity.trainer.loop import TrainLoop
from trinity.trainer.process.control import Control
from trinity.trainer.publishing import NoVersions

pytestmark = pytest.mark.core

STEP = 3


class Engine:
    """Fails every step, and names the group that causes it."""

    device = torch.device("cpu")
    micro_batch_tokens = 64

    def __init__(self, problem: Exception) -> None:
        self._problem = problem

    def train_batch(self, batch: TrainBatch, last_step: int, record: None) -> tuple[TrainBatch, dict[str, float]]:
        raise self._problem

    def per_group_stats(self, batch: TrainBatch) -> list[dict[str, Any]]:
        groups = sorted({sequence.group for sequence in batch.sequences})
        return [{"group": group, "loss": 0.5, "finite": group != 1} for group in groups]


class Checkpoints:
    """Notes the steps of the checkpoints that it would write."""

    def __init__(self) -> None:
        self.saved: list[int] = []

    def resume(self) -> tuple[int, int]:
        return STEP - 1, 0

    def save(self, step: int) -> None:
        self.saved.append(step)

    def save_if_due(self, step: int) -> None: ...
    def settle(self) -> None: ...


class Batches:
    """One command, then the end."""

    def __init__(self, command: Command) -> None:
        self._commands = [command, Finish()]

    def open(self, step: int) -> None: ...

    def next(self, step: int) -> Command:
        return self._commands.pop(0)


class Observer:
    """Records the steps."""

    def __init__(self) -> None:
        self.steps: list[StepDone] = []

    def begin(self, step: int) -> None: ...

    def trained(self, done: StepDone) -> None:
        self.steps.append(done)

    def close(self) -> None: ...


def trainer_of(problem: Exception, policy: str, folder: Path, **changes: Any) -> StepTrainer:
    config = {**BASE, **changes, "model": {**BASE["model"], "model_path": "m"}, "checkpoint_root_dir": str(folder)}
    plan = make_plan(Config.model_validate({**config, "trainer": {"on_bad_step": policy}}))
    engine: Any = Engine(problem)
    return StepTrainer(plan, engine, True, folder, lambda step: step)


def run(trainer: StepTrainer, command: Command) -> tuple[list[int], list[StepDone], BadStep | None]:
    """The loop with this command: steps of checkpoints, finished steps, and the error that ended it."""
    checkpoints, observer, error = Checkpoints(), Observer(), None
    loop = TrainLoop(Control(), Batches(command), trainer, NoVersions(), checkpoints, [observer])
    try:
        loop.run()
    except BadStep as raised:
        error = raised
    return checkpoints.saved, observer.steps, error


def raw_batch() -> RawBatch:
    raw = RawBatch(pb.LedgerEntry(step=STEP))
    for number in range(3):
        group = make_group(make_task(number + 1, repeat_times=4))
        raw.entry.groups.add(task_id=group.task.task_id, log_sequence=10 + number, num_experiences=4)
        raw.groups.append(pb.BatchGroup(outcome=encode_outcome(group)))
    return raw


def test_a_bad_batch_is_skipped_and_kept_whole(tmp_path: Path) -> None:
    raw = raw_batch()
    saved, (done,), error = run(trainer_of(NotFinite("loss", STEP), "skip", tmp_path), Train(raw))
    assert (done.metrics, done.trained, error) == ({"bad_step": 1.0}, False, None)
    assert (done.step, len(done.batch.sequences)) == (STEP, 12)
    assert saved == []
    report = json.loads((tmp_path / f"bad_steps/step_{STEP}/report.json").read_text())
    assert report["blamed"] == [{"group": 1, "task_id": raw.entry.groups[1].task_id, "log_sequence": 11}]
    assert [group["log_sequence"] for group in report["groups"]] == [10, 11, 12]
    again = bad_steps.read_batch(tmp_path, STEP)
    assert again.entry == raw.entry
    assert again.groups == raw.groups


def test_a_bad_batch_ends_the_run_after_a_checkpoint_of_the_step_before(tmp_path: Path) -> None:
    saved, done, error = run(trainer_of(NotFinite("loss", STEP), "stop", tmp_path), Train(raw_batch()))
    assert isinstance(error, NotFinite)
    assert str(error).startswith("step 3: the loss is not finite; groups 1 of the batch")
    assert error.for_good, "the same batch would come again"
    assert (saved, done) == ([STEP - 1], [])


def test_weights_that_an_update_of_the_bad_step_has_changed_are_no_checkpoint(tmp_path: Path) -> None:
    problem = NotFinite("norm of the gradient", STEP)
    problem.updates = 1
    saved, _, error = run(trainer_of(problem, "stop", tmp_path), Train(raw_batch()))
    assert (saved, error) == ([], problem)


def test_memory_that_runs_out_is_a_bad_step_too(tmp_path: Path) -> None:
    trainer = trainer_of(OutOfMemory("memory is not enough", STEP, [2]), "skip", tmp_path)
    assert trainer.train(raw_batch()).metrics == {"bad_step": 1.0}
    report = json.loads((tmp_path / f"bad_steps/step_{STEP}/report.json").read_text())
    assert (report["problem"], [group["group"] for group in report["blamed"]]) == ("memory is not enough", [2])
    assert report["groups"] == [], "statistics need memory too"


def test_a_reward_that_is_not_finite_never_reaches_the_models(tmp_path: Path) -> None:
    raw = raw_batch()
    raw.entry.groups[2].experiences.add(index=0, reward=float("inf"))
    trainer = trainer_of(AssertionError("the engine was asked"), "stop", tmp_path)
    with pytest.raises(NotFinite, match=r"step 3: the reward is not finite; groups 2 of the batch"):
        trainer.train(raw)


@pytest.mark.parametrize("damage", ["info_json", "bytes", "index"])
def test_a_group_that_cannot_be_decoded_is_named_with_its_explorer(tmp_path: Path, damage: str) -> None:
    raw = raw_batch()
    outcome = experience_pb2.Outcome.FromString(raw.groups[1].outcome)
    outcome.group.experiences[0].info_json = "[1]" if damage == "info_json" else ""
    raw.groups[1].outcome = b"\xff" if damage == "bytes" else outcome.SerializeToString()
    if damage == "index":
        raw.entry.groups[1].experiences.add(index=9, reward=1.0)
    trainer = trainer_of(AssertionError("the engine was asked"), "stop", tmp_path)
    task = raw.entry.groups[1].task_id
    with pytest.raises(Undecodable, match=f"step 3: the group of task '{task}'") as raised:
        trainer.train(raw)
    assert ("of explorer 'tester', attempt 1," in str(raised.value)) == (damage != "bytes")
    assert str(raised.value).endswith("; groups 1 of the batch; `trinity batch skip 3 --reason TEXT` passes it")
    assert raised.value.for_good
    assert bad_steps.read_batch(tmp_path, STEP).groups == raw.groups
    report = json.loads((tmp_path / f"bad_steps/step_{STEP}/report.json").read_text())
    assert report["blamed"] == [{"group": 1, "task_id": task, "log_sequence": 11}]


def test_what_an_advantage_cannot_use_is_a_bad_step(tmp_path: Path) -> None:
    """The buffer refuses such groups; those of an older log may be without a teacher all the same."""
    trainer = trainer_of(AssertionError("asked"), "skip", tmp_path, algorithm={"algorithm_type": "jsd"})
    done = trainer.train(raw_batch())
    assert done.metrics == {"bad_step": 1.0}
    report = json.loads((tmp_path / f"bad_steps/step_{STEP}/report.json").read_text())
    assert "jsd cannot use an experience: experience.teacher_logprobs: is missing" in report["problem"]


def test_a_step_that_an_operator_skips_is_passed_untrained(tmp_path: Path) -> None:
    raw = RawBatch(raw_batch().entry)
    raw.entry.skip_reason = "a bad group"
    _, (done,), error = run(trainer_of(AssertionError("the engine was asked"), "stop", tmp_path), Skip(raw))
    assert (done.batch, done.metrics, error) == (TrainBatch(STEP, ()), {"skipped_step": 1.0}, None)


def test_a_step_that_was_not_kept_has_no_batch(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        bad_steps.read_batch(tmp_path, 9)
