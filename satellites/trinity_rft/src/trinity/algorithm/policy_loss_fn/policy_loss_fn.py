"""Trinity-RFT's policy losses: one number for the tensors of a micro-batch, a mean that loss_agg_mode names."""

from abc import ABC, abstractmethod
from typing import Any

from trinity.algorithm.declared import Made, arguments, check_kind, declare, inputs
from trinity.common.registry import Registry
from trinity.plugins.arguments import Argument
from trinity.plugins.declarations import POLICY_LOSSES

_INPUTS = {
    "logprob": "logprobs",
    "old_logprob": "old_logprobs",
    "ref_logprob": "reference_logprobs",
    "action_mask": "mask",
    "advantages": "advantages",
}
_MODE = "loss_agg_mode"
_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


class PolicyLossFn(ABC):
    """Called with those of logprob, old_logprob, ref_logprob, advantages (float [B, R]) and action_mask (bool [B, R])
    that its __call__ names; returns the loss and metrics."""

    def __init__(self, backend: str = "verl") -> None:
        self.backend = backend

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]: ...

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {}


def part_of_batch(x: Any, share: Any) -> Any:
    """The part that a mean over the micro-batch has in the mean over the batch: by its tokens, or its sequences."""
    if share.mode == "token-mean":
        return x.mask.sum() / max(share.totals.tokens, 1)
    return (x.mask.sum(-1) > 0).sum() / max(share.totals.sequences, 1)


def report_of(metrics: dict[str, Any], x: Any) -> dict[str, Any]:
    """Numbers of a micro-batch as tensors [2]: their sums over its tokens, and these."""
    tokens = x.mask.sum().float()
    return {f"{name}": x.mask.new_tensor([float(value), 1.0]).float() * tokens for name, value in metrics.items()}


def _add(name: str, kind: Any) -> None:
    check_kind(name, kind, PolicyLossFn, "POLICY_LOSS_FN")
    taken = inputs(kind, _INPUTS, "POLICY_LOSS_FN")
    own = arguments(kind)
    has_mode = _MODE in own
    make = Made(kind)

    def loss(x: Any, share: Any, **args: Any) -> tuple[Any, dict[str, Any]]:
        if not bool((x.mask > 0).any()):
            return (x.logprobs * 0).sum(), {}
        tensors = {theirs: getattr(x, ours) for theirs, ours in taken.items()}
        if "action_mask" in tensors:
            tensors["action_mask"] = x.mask > 0
        found, metrics = make({**args, **({_MODE: share.mode} if has_mode else {})})(**tensors)
        return found * part_of_batch(x, share), report_of(metrics, x)

    mode = own.pop(_MODE, None)
    modes = _MODES if has_mode else _MODES[:1]
    own[_MODE] = Argument(mode.default if mode is not None else None, "string", True, modes)
    traits = ["mean"] + ["ratio"] * ("old_logprob" in taken) + ["reference"] * ("ref_logprob" in taken)
    declare(POLICY_LOSSES, name, kind, loss, own, traits)


POLICY_LOSS_FN = Registry("POLICY_LOSS_FN", _add, lambda: ())
