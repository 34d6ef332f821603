"""Record what vLLM's engine core loads and samples, and have it load wrong weights where a case says so.

engine.json, in the folder of the grader's file, tells one process what every later load becomes:
{"how": "noise" or "stale", "pid": its id}.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import probe

MODEL = "vllm.model_executor.models.qwen2"
IN_PLACE = "trinity.explorer.engine.replay"
NOISE = 0.02  # of each weight's standard deviation: the model's own is about as large


class OnCpu:
    """The weights that the newest load gave. vLLM packs its own on a CPU, which changes their bits."""

    def __init__(self) -> None:
        self._bits = 0
        self._given: list[tuple[str, Any]] = []
        self._held: list[tuple[str, Any]] | None = None

    def load(self, plain: Any, model: Any, weights: Iterable[tuple[str, Any]]) -> Any:
        given = [(name, tensor.clone()) for name, tensor in weights]
        how = _how()
        if how == "noise":
            import torch

            given = [(name, tensor + NOISE * torch.randn_like(tensor)) for name, tensor in given]
        elif how == "stale":
            self._held = given = self._held or self._given or given
        self._given = given
        self._bits = probe.bits(tensor for _, tensor in given)
        return plain(model, iter(given))

    def bits(self) -> int:
        return self._bits


class OnGpu:
    """The model's own parameters, which a system may load in several calls."""

    def __init__(self) -> None:
        self._bits, self._model, self._held = 0, None, dict[str, Any]()

    def load(self, plain: Any, model: Any, weights: Iterable[tuple[str, Any]]) -> Any:
        found = plain(model, weights)
        self.loaded(model)
        return found

    def loaded(self, model: Any) -> None:
        self._model = model

    def bits(self) -> int:
        """Damages what was loaded since the last call, where a case says so."""
        if self._model is not None:
            self._damage(dict(self._model.named_parameters()))
            self._bits, self._model = probe.bits(self._model.parameters()), None
        return self._bits

    def _damage(self, parameters: dict[str, Any]) -> None:
        import torch

        how = _how()
        with torch.no_grad():
            for name, parameter in parameters.items():
                if how == "noise":
                    parameter += NOISE * torch.randn_like(parameter)
                elif how == "stale":
                    parameter.copy_(self._held[name])
        self._held = {name: parameter.detach().clone() for name, parameter in parameters.items()}


class Sampled:
    """Notes for each response the weights that the engine held at its start."""

    def __init__(self, weights: OnCpu | OnGpu) -> None:
        self._weights, self._began = weights, dict[str, int]()

    def began(self, request: str) -> None:
        self._began.setdefault(request, self._weights.bits())

    def ended(self, request: str, ids: Iterable[int]) -> None:
        if (bits := self._began.pop(request, None)) is not None:
            probe.record("sample", ids=list(ids), bits=bits)


def _how() -> str:
    try:
        told = json.loads(Path(os.environ["FAULTS_GRADER"]).with_name("engine.json").read_text())
    except FileNotFoundError:
        return ""
    return str(told["how"]) if told["pid"] == os.getpid() else ""


def install(weights: OnCpu | OnGpu | None = None) -> None:
    weights = weights or (OnGpu() if os.environ.get("FAULTS_DTYPE") else OnCpu())
    sampled = Sampled(weights)

    def loads(module: ModuleType) -> None:
        model: Any = module.Qwen2ForCausalLM
        plain = model.load_weights
        model.load_weights = lambda self, given: weights.load(plain, self, given)

    def loads_in_place(module: ModuleType) -> None:
        loader: Any = module.Loader
        plain = loader.load

        def load(self: Any, *args: Any, **kwargs: Any) -> None:
            plain(self, *args, **kwargs)
            if isinstance(weights, OnGpu):
                weights.loaded(self._model)

        loader.load = load

    def samples(module: ModuleType) -> None:
        scheduler: Any = module.Scheduler
        plain_schedule, plain_free = scheduler.schedule, scheduler._free_request

        def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = plain_schedule(self, *args, **kwargs)
            for one in found.scheduled_new_reqs:
                weights.bits()  # damages them before a canary measures, too
                if one.sampling_params.prompt_logprobs is None:  # else a canary, which only measures
                    sampled.began(one.req_id)
            return found

        def free(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            sampled.ended(request.request_id, request.all_token_ids)
            return plain_free(self, request, *args, **kwargs)

        scheduler.schedule, scheduler._free_request = schedule, free

    probe.install(**{MODEL: loads, IN_PLACE: loads_in_place, "vllm.v1.core.sched.scheduler": samples})
