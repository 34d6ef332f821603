"""Advantages and masks that need a pass of the models are those of the step's lines, metrics and recorded tokens."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.fakes.data.experience import make_group, make_task
from support.programs.trainer.training import BASE
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.config import make_plan
from trinity.config.schema import Config
from trinity.data.wire import encode_outcome
from trinity.trainer.algorithms.inputs import LossInputs
from trinity.trainer.data.batch import TrainBatch
from trinity.trainer.data.client import RawBatch
from trinity.trainer.engine.step import StepTrainer
from trinity.trainer.engine.token_record import TokenRecord
from trinity.trainer.observers import Experiences, StepMonitor
from trinity.trainer.process.control import Control
from trinity.trainer.process.ranks import Ranks
from trinity.trainer.process.times import StepTimes

pytestmark = pytest.mark.core


class Engine:
    """Its advantages are 0, 1, 2 and 3, of which it drops the first and trains the last twice."""

    def token_record(self) -> TokenRecord:
        return TokenRecord(Ranks(0, 1, 0), 1, torch.device("cpu"))

    def train_batch(
        self, batch: TrainBatch, last_step: int, record: TokenRecord
    ) -> tuple[TrainBatch, dict[str, float]]:
        first, *others = (replace(s, advantage=float(row)) for row, s in enumerate(batch.sequences))
        copy = replace(others[-1], experience=None)
        trained = (replace(first, mask=first.mask & False), *others, copy)
        for s in trained:
            values = torch.full((1, s.response_length), s.advantage)
            record.add([s], LossInputs(values, values, values, values, values), None)
        return replace(batch, sequences=trained), {}


def test_lines_metrics_and_tokens_are_of_the_batch_as_it_was_trained(tmp_path: Path) -> None:
    """The algorithm has a KL penalty in the reward: a batch is decoded without advantages."""
    config = {**BASE, "model": {**BASE["model"], "model_path": "m"}, "checkpoint_root_dir": str(tmp_path)}
    plan = make_plan(Config.model_validate({**config, "algorithm": {**BASE["algorithm"], "kl_penalty_fn": "k2"}}))
    group = make_group(make_task())
    raw = RawBatch(pb.LedgerEntry(step=1), [pb.BatchGroup(outcome=encode_outcome(group))])
    raw.entry.groups.add(task_id=group.task.task_id)
    engine: Any = Engine()
    trainer, control = StepTrainer(plan, engine, True, tmp_path, lambda step: step, True), Control()
    assert [s.advantage for s in trainer.decode(raw).sequences] == [0, 0, 0, 0]
    done = trainer.train(raw)
    for observer in (Experiences(tmp_path), StepMonitor(plan, tmp_path, control, StepTimes())):
        observer.begin(0)
        observer.trained(done)
    lines = [json.loads(line) for line in (tmp_path / "buffer/experience_buffer.jsonl").read_text().splitlines()]
    assert [line["advantage"] for line in lines] == [0, 1, 2, 3]
    masks = [base64.b64decode(line["arrays"]["mask"]) for line in lines]
    assert masks == [bytes(12), *[b"\1" * 12] * 3]
    assert [values and float(values.logprobs[0]) for values in done.tokens] == [0, 1, 2, 3, None]
    assert control.progress.tokens_trained == 4 * 12
    rewards = [experience.reward for experience in group.experiences]
    assert control.progress.metrics["sample/reward_mean"] == sum(rewards) / 4, "of each rollout once"
