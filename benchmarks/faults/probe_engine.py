"""Record what vLLM's engine core loads and samples, and have it load wrong weights where a case says so.

The probe notes for each response the weights that the engine held at its start. engine.json, in the folder of the
grader's file, tells one process what every later load becomes: {"how": "noise" or "stale", "pid": its id}.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import probe

MODEL = "vllm.model_executor.models.qwen2"
NOISE = 0.02  # of each weight's standard deviation: the model's own is about as large


class Engine:
    """The weights of this process: sums of their bits, and the tensors of the newest load."""

    def __init__(self) -> None:
        self.bits = 0
        self._given: list[tuple[str, Any]] = []
        self._held: list[tuple[str, Any]] | None = None
        self._began: dict[str, int] = {}

    def load(self, weights: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
        """Returns what the model gets in place of these weights."""
        given = [(name, tensor.clone()) for name, tensor in weights]
        how = _how()
        if how == "noise":
            import torch

            given = [(name, tensor + NOISE * torch.randn_like(tensor)) for name, tensor in given]
        elif how == "stale":
            self._held = given = self._held or self._given or given
        self._given = given
        self.bits = probe.bits(tensor for _, tensor in given)
        return given

    def began(self, request: str) -> None:
        self._began.setdefault(request, self.bits)

    def ended(self, request: str, ids: Iterable[int]) -> None:
        if (bits := self._began.pop(request, None)) is not None:
            probe.record("sample", ids=list(ids), bits=bits)


def _how() -> str:
    try:
        told = json.loads(Path(os.environ["FAULTS_GRADER"]).with_name("engine.json").read_text())
    except FileNotFoundError:
        return ""
    return str(told["how"]) if told["pid"] == os.getpid() else ""


def install() -> None:
    engine = Engine()

    def loads(module: ModuleType) -> None:
        model: Any = module.Qwen2ForCausalLM
        plain = model.load_weights
        model.load_weights = lambda self, weights: plain(self, iter(engine.load(weights)))

    def samples(module: ModuleType) -> None:
        scheduler: Any = module.Scheduler
        plain_schedule, plain_free = scheduler.schedule, scheduler._free_request

        def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = plain_schedule(self, *args, **kwargs)
            for one in found.scheduled_new_reqs:
                engine.began(one.req_id)
            return found

        def free(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            engine.ended(request.request_id, request.all_token_ids)
            return plain_free(self, request, *args, **kwargs)

        scheduler.schedule, scheduler._free_request = schedule, free

    probe.install(**{MODEL: loads, "vllm.v1.core.sched.scheduler": samples})
