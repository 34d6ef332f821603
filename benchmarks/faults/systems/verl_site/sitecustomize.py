"""Python imports this file at the start of every process of veRL's run, also of Ray's and vLLM's.

veRL's engine is in two processes: a worker loads weights, its parent schedules requests and has to know their bits.
veRL also leaves out an optimizer step whose gradients are not finite: its sequences belong to no step.
"""

import math
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import probe
import probe_engine


class Engine(probe_engine.OnGpu):
    def published(self, model: Any) -> None:
        """Called in the worker after all weights of a version are loaded."""
        self.loaded(model)
        new = _bits_of(os.getpid())
        new.write_text(str(super().bits()))
        new.rename(_bits_of(os.getppid()))

    def bits(self) -> int:
        """Called in the worker's parent."""
        return int(_bits_of(os.getpid()).read_text())


def _bits_of(pid: int) -> Path:
    return Path(os.environ["FAULTS_RECORDS"]) / f"bits-{pid}"


def _record_loads(module: ModuleType) -> None:
    worker: Any = module.vLLMColocateWorkerExtension
    plain = worker.update_weights_from_ipc

    def update_weights_from_ipc(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        ENGINE.published(self.model_runner.model)

    worker.update_weights_from_ipc = update_weights_from_ipc


def _record_steps_left_out(module: ModuleType) -> None:
    trainer: Any = module.FSDPEngine
    plain = trainer.optimizer_step

    def optimizer_step(self: Any) -> float:
        norm = float(plain(self))
        if not math.isfinite(norm):
            probe.record("train", kind="left out")
        return norm

    trainer.optimizer_step = optimizer_step


ENGINE = Engine()
probe_engine.install(ENGINE)
probe.install(
    **{
        "verl.workers.rollout.vllm_rollout.utils": _record_loads,
        "verl.workers.engine.fsdp.transformer_impl": _record_steps_left_out,
    }
)
