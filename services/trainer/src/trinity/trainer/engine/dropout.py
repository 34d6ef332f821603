"""No dropout while the policy and the critic are trained.

Sampling engines have none: with dropout the same weights would give random other log-probabilities, and ratios to the
engine's would not be 1. Without it a step has no randomness, so a resumed run needs no generator state.
"""

from collections.abc import Iterator
from typing import Any

import structlog
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

log = structlog.get_logger(__name__)


def disable_dropout(model: nn.Module, name: str) -> None:
    """Set every dropout and layer drop of a transformers model to 0, in its modules and its config."""
    was: dict[str, float] = {}
    for holder, attribute in _rates(model):
        rate = getattr(holder, attribute)
        label = type(holder).__name__ if attribute == "p" else attribute
        was[label] = max(rate, was.get(label, 0.0))
        setattr(holder, attribute, 0.0)
    if was:
        log.info("trainer.model.dropout", model=name, was=was, now=0.0)


def _rates(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """What holds a rate above 0, and the rate's name: `p` of Dropout, else attributes that are called after it."""
    modules = list(model.modules())
    configs = {id(config): config for module in modules if (config := getattr(module, "config", None)) is not None}
    for holder in (*modules, *configs.values()):
        for name, value in list(vars(holder).items()):
            named = "drop" in name or (name == "p" and isinstance(holder, _DropoutNd))
            if named and isinstance(value, float) and value > 0:
                yield holder, name
