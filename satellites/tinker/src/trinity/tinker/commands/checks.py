"""Checks commands before they are stored. What passes can be executed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trinity.runtime.errors import InvalidInput
from trinity.tinker.commands.wire import Datum, Forward

_RATIO_INPUTS = {"target_tokens": "i", "logprobs": "f", "advantages": "f"}


@dataclass(frozen=True)
class LossKind:
    """Tensors that a loss reads, with the kind of their elements (i, f), and its numbers with their defaults."""

    inputs: Mapping[str, str]
    config: Mapping[str, float]


_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES = {
    "cross_entropy": LossKind({"target_tokens": "i", "weights": "f"}, {}),
    "importance_sampling": LossKind(_RATIO_INPUTS, {}),
    "ppo": LossKind(_RATIO_INPUTS, _CLIP),
    "cispo": LossKind(_RATIO_INPUTS, _CLIP),
}
_CLIENT_SIDE = "compute it in the client: forward_backward_custom with a function"


@dataclass(frozen=True)
class Base:
    """The base model: its name for clients, its vocabulary, and the most tokens of a sequence."""

    name: str
    vocabulary: int
    longest: int

    def check(self, name: str) -> None:
        """Raises InvalidInput for another model."""
        if name != self.name:
            raise InvalidInput("base_model", f"is {name[:200]!r}, which is not loaded here; loaded is {self.name!r}")


def clip_bounds(config: Mapping[str, float | str]) -> tuple[float, float]:
    """Returns the lower and the upper bound of the ratio. Raises InvalidInput."""
    low, high = (float({**_CLIP, **config}[name]) for name in _CLIP)
    if not 0 <= low <= 1 <= high < math.inf:
        problem = f"is {low:g} with clip_high_threshold {high:g}; 0 <= low <= 1 <= high must hold"
        raise InvalidInput("loss_fn_config.clip_low_threshold", problem)
    return low, high


def check_forward(forward: Forward, base: Base) -> None:
    """Raises InvalidInput with the field, its value, and what it must be."""
    kind = LOSSES.get(forward.loss)
    if kind is None:
        names = ", ".join(LOSSES)
        raise InvalidInput("loss_fn", f"is {forward.loss[:100]!r}; known are {names}. For any other, {_CLIENT_SIDE}")
    for name, value in forward.config.items():
        if name not in kind.config:
            known = f"it takes {', '.join(kind.config)}" if kind.config else "it takes none"
            raise InvalidInput(f"loss_fn_config.{name[:100]}", f"is no number of {forward.loss}; {known}")
        if isinstance(value, str):
            raise InvalidInput(f"loss_fn_config.{name}", f"is the text {value[:100]!r}; must be a number")
    if kind.config:
        clip_bounds(forward.config)
    if not forward.data:
        raise InvalidInput("data", "is empty; give at least one sequence")
    for index, datum in enumerate(forward.data):
        _check_datum(f"data[{index}]", datum, forward.loss, kind, base)


def _check_datum(place: str, datum: Datum, loss: str, kind: LossKind, base: Base) -> None:
    length = len(datum.tokens)
    if not 1 <= length <= base.longest:
        raise InvalidInput(f"{place}.model_input", f"has {length} tokens; must have 1 to {base.longest}")
    check_tokens(f"{place}.model_input", datum.tokens, base)
    if unknown := sorted(set(datum.inputs) ^ set(kind.inputs)):
        word = "lacks" if unknown[0] in kind.inputs else "has"
        wanted = ", ".join(kind.inputs)
        raise InvalidInput(f"{place}.loss_fn_inputs", f"{word} {unknown[0][:100]!r}; {loss} reads {wanted}")
    for name, element in kind.inputs.items():
        values, field = datum.inputs[name], f"{place}.loss_fn_inputs.{name}"
        if len(values) != length:
            raise InvalidInput(field, f"has {len(values)} elements for {length} tokens; must have one for each")
        if element == "i" and values.dtype.kind != "i":
            raise InvalidInput(field, "is float32; must be int64")
        if element == "f" and not np.isfinite(values).all():
            at = int(np.flatnonzero(~np.isfinite(values))[0])
            raise InvalidInput(field, f"is {values[at]} at {at}; must be finite")
    check_tokens(f"{place}.loss_fn_inputs.target_tokens", datum.inputs["target_tokens"], base)


def check_tokens(field: str, tokens: Sequence[int] | np.ndarray, base: Base) -> None:
    """Raises InvalidInput for a token that is not in the vocabulary."""
    tokens = np.asarray(tokens)
    outside = np.flatnonzero((tokens < 0) | (tokens >= base.vocabulary))
    if len(outside):
        at = int(outside[0])
        raise InvalidInput(field, f"has token {tokens[at]} at {at}; the vocabulary has 0 to {base.vocabulary - 1}")
