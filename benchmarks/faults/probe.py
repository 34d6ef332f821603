"""Record what a training process learns from, whatever system it belongs to.

`install()` patches torch itself, so that nothing is taken from what the system says: token ids that are embedded while
gradients are on, each optimizer step with checksums of the weights before and after it, and each sampled response with
the weights that its process had. Records are lines of FAULTS_RECORDS/train-PID.jsonl and sample-PID.jsonl; a line is
with the operating system before the process can be killed for its next one.
"""

import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


def record(name: str, /, **values: Any) -> None:
    """Appends a line to this process's file of the name."""
    path = Path(os.environ["FAULTS_RECORDS"]) / f"{name}-{os.getpid()}.jsonl"
    line = json.dumps({"time": time.time(), "pid": os.getpid(), **values})
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


def install(**patches: Callable[[ModuleType], None]) -> None:
    """Patches torch now, or as soon as the process imports it; also a system's own modules, by their names."""
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
    _PATCHES.update(patches)
    for name in _PATCHES:
        if name in sys.modules:
            _patch(name)


def _patch(name: str) -> None:
    """Patches an imported module once, also if the probe is installed again."""
    if name not in _DONE:
        _DONE.add(name)
        _PATCHES[name](sys.modules[name])


def _record_forwards(module: Any) -> None:
    """Records the ids of an embedding layer. vLLM has its own, which it compiles."""
    plain = module.Embedding.forward

    def forward(self: Any, ids: Any) -> Any:
        import torch

        if torch.is_grad_enabled():
            rows = ids.reshape(1, -1) if ids.dim() < 2 else ids.flatten(0, -2)
            record("train", kind="forward", ids=rows.tolist())
        return plain(self, ids)

    module.Embedding.forward = forward


def _record_steps(module: Any) -> None:
    before: dict[int, dict[str, Any]] = {}

    def begin(optimizer: Any, *_: Any) -> None:
        before[id(optimizer)] = _before(optimizer)

    def end(optimizer: Any, *_: Any) -> None:
        _record_step(optimizer, before.pop(id(optimizer)))

    module.register_optimizer_step_pre_hook(begin)
    module.register_optimizer_step_post_hook(end)


def steps_of(update: Callable[..., Any], optimizer_of: Callable[[Any], Any]) -> Callable[..., Any]:
    """Wraps a method that updates the weights of an optimizer without calling its `step`."""

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = _before(optimizer_of(self))
        found = update(self, *args, **kwargs)
        _record_step(optimizer_of(self), before)
        return found

    return step


def _before(optimizer: Any) -> dict[str, Any]:
    return {"before": checksum(optimizer), "bits": bits(_weights(optimizer))}


def _record_step(optimizer: Any, before: dict[str, Any]) -> None:
    import torch

    finite = all(bool(torch.isfinite(whole(weights)).all()) for weights in _weights(optimizer))
    record("train", kind="step", **before, after=checksum(optimizer), finite=finite)


def _weights(optimizer: Any) -> list[Any]:
    return [weights for group in optimizer.param_groups for weights in group["params"]]


def bits(weights: Iterable[Any]) -> int:
    """Returns the sum of all weights' bits as integers: equal however a system splits, joins, orders or pads them.

    FAULTS_DTYPE: the engine's dtype, to which weights are rounded before.
    """
    import torch

    dtype = getattr(torch, os.environ.get("FAULTS_DTYPE", "float32"))
    rounded = (whole(one).to(dtype).float().contiguous() for one in weights)
    return sum(int(one.view(torch.int32).sum(dtype=torch.int64)) for one in rounded)


def whole(weights: Any) -> Any:
    """Returns a tensor's values on this process: all of them, with one rank."""
    local = getattr(weights, "to_local", None)  # of FSDP's tensors
    return (local() if local else weights).detach()


def _record_samples(module: Any) -> None:
    """transformers samples in a process that has the weights."""
    plain = module.GenerationMixin.generate

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        has = bits(self.parameters())
        found = plain(self, *args, **kwargs)
        for ids in getattr(found, "sequences", found).tolist():
            record("sample", ids=ids, bits=has)
        return found

    module.GenerationMixin.generate = generate


def checksum(optimizer: Any) -> str:
    """Returns a checksum of the bits of all weights that the optimizer changes."""
    import torch

    digest = hashlib.blake2b(digest_size=12)
    for weights in _weights(optimizer):
        digest.update(whole(weights).contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


_DONE: set[str] = set()
_PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "torch.nn.modules.sparse": _record_forwards,
    "torch.optim.optimizer": _record_steps,
    "transformers.generation.utils": _record_samples,
}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Patches a module right after its first import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _PATCHES or (spec := importlib.machinery.PathFinder.find_spec(name, path)) is None:
            return None
        assert spec.loader is not None
        plain = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            plain(module)
            _patch(name)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
