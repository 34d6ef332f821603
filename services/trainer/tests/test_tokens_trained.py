"""Tokens that an operator or a workflow masks are no trained tokens."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from trinity.config import make_plan
from trinity.config.load import parse
from trinity.trainer.data.batch import TrainBatch, TrainSequence
from trinity.trainer.engine.step import StepDone
from trinity.trainer.observers import StepMonitor
from trinity.trainer.process.control import Control
from trinity.trainer.process.times import StepTimes

pytestmark = pytest.mark.core

MODEL = "model: {model_path: m, max_prompt_tokens: 8, max_response_tokens: 8}"
DATA = "buffer: {total_steps: 2, explorer_input: {taskset: {path: d}}}"


def test_only_tokens_that_the_mask_takes_are_counted(tmp_path: Path) -> None:
    masks = np.array([[True, False, True], [False, False, False]])
    sequences = tuple(TrainSequence(np.arange(5), 2, np.zeros(3, np.float32), mask, group=0) for mask in masks)
    raw: Any = SimpleNamespace()
    control = Control()
    monitor = StepMonitor(make_plan(parse(f"{MODEL}\n{DATA}\n")), tmp_path, control, StepTimes())
    monitor.trained(StepDone(raw, TrainBatch(1, sequences), {}))
    assert control.progress.tokens_trained == 2
    monitor.trained(StepDone(raw, TrainBatch(2, sequences), {"skipped_step": 1.0}))
    assert control.progress.tokens_trained == 2


class Gpus:
    """In place of the sampler of the driver."""

    def take(self) -> dict[int, float]:
        return {0: 0.9, 3: 0.25}

    def close(self) -> None:
        pass


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_step_on_gpus_has_their_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> None:
    monkeypatch.setattr("trinity.trainer.observers.torch.cuda.is_initialized", lambda: on_gpu)
    monkeypatch.setattr("trinity.trainer.observers.show_memory", lambda *_: None)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda: 0)
    monkeypatch.setattr("trinity.trainer.observers.GpuUse", Gpus)
    control, raw = Control(), cast(Any, SimpleNamespace())
    monitor = StepMonitor(make_plan(parse(f"{MODEL}\n{DATA}\n")), tmp_path, control, StepTimes())
    monitor.begin(0)
    monitor.trained(StepDone(raw, TrainBatch(1, ()), {}))
    monitor.close()
    line = json.loads((tmp_path / "monitor/trainer.jsonl").read_text())
    found = {name: value for name, value in line.items() if name.startswith("perf/gpu_use")}
    assert found == ({"perf/gpu_use/0": 0.9, "perf/gpu_use/3": 0.25} if on_gpu else {})
