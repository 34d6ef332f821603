"""Versions of a run that trains adapters. They hold only the adapters, which engines merge with the base model.

    W = W_base + alpha / rank * B A         (Hu et al., LoRA, arXiv:2106.09685, equation 3)

A [rank, in] and B [out, rank] of each adapted W [out, in] are the tensors of the version, under the names that peft's
adapter files have; everything else is the base model's. So a version is never a difference to another one: it
needs only itself and version 0. The sum is made in float32 and rounded once, to what the engine computes in.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trinity.runtime.errors import InvalidInput

if TYPE_CHECKING:
    import torch

_WEIGHT = ".weight"
_FIELD = "manifest.lora"
_OF_LANGUAGE_MODEL = re.compile(r"^model\.(?!language_model\.|visual\.)")


@dataclass(frozen=True)
class LoraTarget:
    """An adapted matrix of the base model, [out, in]; the merged matrix has the same name and shape."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Lora:
    """Rank, alpha and targets of a version's adapters."""

    rank: int
    alpha: float
    targets: tuple[LoraTarget, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises InvalidInput unless `shapes`, the version's tensors, are one A and one B for each target."""
        if self.rank < 1 or not 0 < self.alpha < math.inf:
            raise InvalidInput(f"{_FIELD}.rank", f"is {self.rank} with alpha {self.alpha}; both must be > 0")
        if not self.targets:
            raise InvalidInput(f"{_FIELD}.targets", "is empty")
        expected: dict[str, tuple[int, ...]] = {}
        for target in self.targets:
            if len(target.shape) != 2 or not target.name.endswith(_WEIGHT):
                raise InvalidInput(f"{_FIELD}.targets", f"has {target.name} {list(target.shape)}, which is no matrix")
            rows, columns = target.shape
            expected |= zip(adapter_names(target.name), ((self.rank, columns), (rows, self.rank)), strict=True)
        for name in sorted(expected.keys() | shapes.keys()):
            if shapes.get(name) != expected.get(name):
                found, due = (list(s[name]) if name in s else "not there" for s in (shapes, expected))
                raise InvalidInput("manifest.tensors", f"{name} is {found}; the adapted matrices need it {due}")

    def check_base(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises InvalidInput unless `shapes`, the base model's tensors, have every target."""
        known = {in_model(name): shape for name, shape in shapes.items()} | dict(shapes)
        for target in self.targets:
            if known.get(target.name) != target.shape:
                found = list(known[target.name]) if target.name in known else "not there"
                raise InvalidInput(
                    "model.model_path",
                    f"{target.name} is {found} in the base model's files; the adapters are for {list(target.shape)}",
                )


def in_model(name: str) -> str:
    """Returns the name in memory of a tensor in the files of a model with a vision tower.

    The files of Qwen2.5-VL lack a part of some names, and those of Gemma 3 and Mistral 3 have another order.
    """
    if name.startswith("visual."):
        return f"model.{name}"
    if name.startswith("language_model.model."):
        return name.replace("language_model.model.", "model.language_model.", 1)
    return _OF_LANGUAGE_MODEL.sub("model.language_model.", name)


def adapter_names(target: str) -> tuple[str, str]:
    """Returns the names of A and B in peft's adapter files for a matrix of the base model."""
    module = f"base_model.model.{target.removesuffix(_WEIGHT)}"
    return f"{module}.lora_A{_WEIGHT}", f"{module}.lora_B{_WEIGHT}"


def merged(
    base: Iterable[tuple[str, "torch.Tensor"]], adapters: Mapping[str, "torch.Tensor"], scale: float, device: Any
) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Yields the base model's tensors; adapted ones as float32 sums computed on `device`.

    `base` is not changed. Raises InvalidInput, at the end, if an adapter's matrix did not come.
    """
    left = dict(adapters)
    for name, tensor in base:
        names = next((each for each in map(adapter_names, (name, in_model(name))) if each[0] in left), ())
        a, b = (left.pop(adapter, None) for adapter in names) if names else (None, None)
        if a is not None and b is not None:
            tensor = tensor.to(device).float().addmm(b.to(device).float(), a.to(device).float(), alpha=scale)
        yield name, tensor
    if left:
        raise InvalidInput(next(iter(left)), "is an adapter of a matrix that the base model's files do not have")
