"""Trinity-RFT's entropy losses: a mean over the tokens of a micro-batch, times entropy_coef."""

from abc import ABC, abstractmethod
from typing import Any

from trinity.algorithm.declared import Made, arguments, check_kind, declare, inputs
from trinity.algorithm.policy_loss_fn.policy_loss_fn import part_of_batch
from trinity.common.registry import Registry
from trinity.plugins.declarations import ENTROPY_LOSSES

_INPUTS = {"entropy": "entropy", "action_mask": "mask"}
_COEFFICIENT = "entropy_coef"


class EntropyLossFn(ABC):
    """Called with entropy (float [B, R]) and action_mask (bool [B, R]); returns the term and metrics.

    Its entropy_coef is 1: Trinity applies the YAML's.
    """

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]: ...

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {}


def _add(name: str, kind: Any) -> None:
    check_kind(name, kind, EntropyLossFn, "ENTROPY_LOSS_FN")
    taken = inputs(kind, _INPUTS, "ENTROPY_LOSS_FN")
    args = arguments(kind)
    coefficient = {_COEFFICIENT: 1.0} if args.pop(_COEFFICIENT, None) is not None else {}
    make = Made(kind)

    def mean(x: Any, share: Any, **given: Any) -> Any:
        if not bool((x.mask > 0).any()):
            return (x.entropy * 0).sum()
        tensors = {theirs: getattr(x, ours) for theirs, ours in taken.items()}
        if "action_mask" in tensors:
            tensors["action_mask"] = x.mask > 0
        found, _ = make({**given, **coefficient})(**tensors)
        return found * part_of_batch(x, share.by("token-mean"))

    declare(ENTROPY_LOSSES, name, kind, mean, args)


ENTROPY_LOSS_FN = Registry("ENTROPY_LOSS_FN", _add, lambda: ())
