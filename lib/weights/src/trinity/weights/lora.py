"""Versions of a run that trains adapters. They hold only the adapters, which engines merge with the base model.

    W = W_base + alpha / rank * B A         (Hu et al., LoRA, arXiv:2106.09685, equation 3)

A [rank, in] and B [out, rank] of each adapted W [out, in] are the tensors of the version, under the names that peft's
adapter files have; everything else is the base model's. So a version is never a difference to another one: it
needs only itself and version 0. The sum is made in float32 and rounded once, to what the engine computes in.

The experts of a layer are adapted one by one, each with a product of this rank. Their A are the rows of one matrix
[experts x rank, in], one expert after the other; their B the columns of one matrix [out, rank x experts], where the
experts' first columns come first, then their second ones. peft (`target_parameters`) has them so. The base model's
files hold such experts as one tensor, or gate, up and down of each expert.
"""

import math
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from trinity.runtime.errors import InvalidInput

if TYPE_CHECKING:
    import torch

_WEIGHT = ".weight"
_FIELD = "manifest.lora"
_OF_LANGUAGE_MODEL = re.compile(r"^model\.(?!language_model\.|visual\.)")
_ONE_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_INNER, _OUTER = "gate_up_proj", "down_proj"  # peft wraps the second around the first
_DEEPER = ".base_layer"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LoraTarget:
    """An adapted matrix of the base model, [out, in], or the matrices of a layer's experts, [experts, out, in].

    The result of a merge has the same shape. name: of a matrix the one in the files; of experts that of transformers'
    parameter (`...experts.gate_up_proj`). transposed: experts are [experts, in, out], as those of gpt-oss.
    """

    name: str
    shape: Shape
    transposed: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Experts (1 for a matrix), out and in."""
        experts = self.shape[0] if len(self.shape) == 3 else 1
        rows, columns = self.shape[-2:]
        return (experts, columns, rows) if self.transposed else (experts, rows, columns)


@dataclass(frozen=True)
class Lora:
    """Rank, alpha and targets of a version's adapters."""

    rank: int
    alpha: float
    targets: tuple[LoraTarget, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def adapters(self) -> list[tuple[LoraTarget, tuple[str, str]]]:
        """Each target with the names of its A and B in peft's files."""
        names = {target.name for target in self.targets}
        return [(target, adapter_names(target.name, names)) for target in self.targets]

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shape of every A, [experts x rank, in], and B, [out, rank x experts], by name."""
        found: dict[str, Shape] = {}
        for target, names in self.adapters:
            experts, rows, columns = target.sizes
            found |= zip(names, ((experts * self.rank, columns), (rows, experts * self.rank)), strict=True)
        return found

    def plain(self) -> dict[str, Any]:
        """Returns the arguments of `of`, as numbers, texts, lists and dicts."""
        return asdict(self)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "Lora":
        targets = (LoraTarget(one["name"], tuple(one["shape"]), one["transposed"]) for one in plain["targets"])
        return cls(plain["rank"], plain["alpha"], tuple(targets))

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raises InvalidInput unless `shapes`, the version's tensors, are one A and one B for each target."""
        if self.rank < 1 or not 0 < self.alpha < math.inf:
            raise InvalidInput(f"{_FIELD}.rank", f"is {self.rank} with alpha {self.alpha}; both must be > 0")
        if not self.targets:
            raise InvalidInput(f"{_FIELD}.targets", "is empty")
        for target in self.targets:
            is_matrix = len(target.shape) == 2 and target.name.endswith(_WEIGHT) and not target.transposed
            if not is_matrix and not (len(target.shape) == 3 and target.name.endswith((_INNER, _OUTER))):
                what = f"has {target.name} {list(target.shape)}, which is no matrix and no layer's experts"
                raise InvalidInput(f"{_FIELD}.targets", what)
        expected = self.shapes
        for name in sorted(expected.keys() | shapes.keys()):
            if shapes.get(name) != expected.get(name):
                found, due = (list(s[name]) if name in s else "not there" for s in (shapes, expected))
                raise InvalidInput("manifest.tensors", f"{name} is {found}; the adapted matrices need it {due}")

    def check_base(self, shapes: Mapping[str, Shape]) -> None:
        """Raises InvalidInput unless `shapes`, the base model's tensors, have every target."""
        known = fused({in_model(name): shape for name, shape in shapes.items()}) | fused(shapes)
        for target in self.targets:
            if known.get(target.name) != target.shape:
                found = list(known[target.name]) if target.name in known else "not there"
                raise InvalidInput(
                    "model.model_path",
                    f"{target.name} is {found} in the base model's files; the adapters are for {list(target.shape)}",
                )


def fused(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Returns the shapes of files' tensors with the experts of each layer in one, as transformers has them in memory.

    Leaves out layers whose experts differ in shape, or are not all there.
    """
    found: dict[str, Shape] = {}
    parts: dict[str, Counter[Shape]] = {}
    for name, shape in shapes.items():
        target, _, _ = _place(name)
        if target == name or len(shape) != 2:
            found[name] = shape
        else:
            parts.setdefault(target, Counter())[shape] += 1
    for target, counts in parts.items():
        halves = 2 if target.endswith(_INNER) else 1
        (rows, columns), count = counts.most_common(1)[0]
        if len(counts) == 1 and count % halves == 0:
            found[target] = (count // halves, halves * rows, columns)
    return found


def _place(name: str) -> tuple[str, int, bool]:
    """Returns the target that a tensor of the files belongs to, its expert, and whether it is the second half (up)."""
    found = _ONE_EXPERT.fullmatch(name)
    if found is None:
        return name, 0, False
    layer, expert, kind = found.groups()
    return f"{layer}.{_OUTER if kind == 'down' else _INNER}", int(expert), kind == "up"


def in_model(name: str) -> str:
    """Returns the name in memory of a tensor in the files of a model with a vision tower.

    The files of Qwen2.5-VL lack a part of some names, and those of Gemma 3 and Mistral 3 have another order.
    """
    if name.startswith("visual."):
        return f"model.{name}"
    if name.startswith("language_model.model."):
        return name.replace("language_model.model.", "model.language_model.", 1)
    return _OF_LANGUAGE_MODEL.sub("model.language_model.", name)


def adapter_names(target: str, targets: Container[str] = ()) -> tuple[str, str]:
    """Returns the names of A and B in peft's adapter files for a matrix or experts of the base model.

    targets: all of them. If both parameters of a layer's experts are adapted, those of the first are one name deeper.
    """
    module = target.removesuffix(_WEIGHT)
    if module == target:  # experts
        module, _, kind = target.rpartition(".")
        if kind == _INNER and f"{module}.{_OUTER}" in targets:
            module += _DEEPER
    module = f"base_model.model.{module}"
    return f"{module}.lora_A{_WEIGHT}", f"{module}.lora_B{_WEIGHT}"


def module_of(adapters: str, all_adapters: Container[str], parameters: tuple[str, ...]) -> str:
    """Returns the layer, or the parameter of experts, that an adapter in peft's files is of: inverts adapter_names.

    parameters: peft's `target_parameters`, which decide if one of the two parameters of a layer's experts is adapted.
    """
    layer = adapters.removesuffix(_DEEPER)
    if not layer.endswith(".experts"):
        return adapters
    both = layer != adapters or layer + _DEEPER in all_adapters
    known = [_INNER if layer != adapters else _OUTER] if both else [_INNER, _OUTER]
    names = [f"{layer}.{parameter}" for parameter in known]
    return next((name for name in names if name.endswith(parameters)), names[0])


def target_of(module: str, shape: Shape, transposed: bool) -> LoraTarget:
    """Returns the target for a linear layer, or a parameter of experts: the one with three dimensions."""
    is_experts = len(shape) == 3
    return LoraTarget(module if is_experts else module + _WEIGHT, shape, is_experts and transposed)


def merged(
    base: Iterable[tuple[str, "torch.Tensor"]], adapters: Mapping[str, "torch.Tensor"], lora: Lora, device: Any
) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Yields the base model's tensors; adapted ones as float32 sums computed on `device`.

    `base` is not changed. Raises InvalidInput, at the end, if an adapted matrix did not come.
    """
    targets = {target.name: (target, names) for target, names in lora.adapters}
    left = {target.name: math.prod(target.shape) for target in lora.targets}
    for name, tensor in base:
        place = next((place for place in map(_place, (name, in_model(name))) if place[0] in targets), None)
        if place is not None:
            whole, expert, is_second = place
            left[whole] -= tensor.numel()
            target, (a_name, b_name) = targets[whole]
            experts, rows, columns = target.sizes
            a = adapters[a_name].reshape(experts, lora.rank, columns)
            b = adapters[b_name].reshape(rows, lora.rank, experts).permute(2, 0, 1)
            if tensor.dim() == 2:  # a matrix, or a part of one expert's
                first = rows - len(tensor) if is_second else 0
                a, b = a[expert], b[expert, first : first + len(tensor)]
            elif target.transposed:
                a, b = b.mT, a.mT
            tensor, a, b = (one.to(device).float() for one in (tensor, a, b))
            tensor = (tensor.addmm if tensor.dim() == 2 else tensor.baddbmm)(b, a, alpha=lora.scale)
        yield name, tensor
    if missing := next((name for name, elements in left.items() if elements), None):
        what = f"is an adapter of {missing}, which the base model's files do not have, or not whole"
        raise InvalidInput(targets[missing][1][0], what)
