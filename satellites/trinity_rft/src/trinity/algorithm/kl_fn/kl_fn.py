"""Trinity-RFT's KL functions: the plugin gives calculate_kl, and Trinity the coefficient and the mean."""

from abc import ABC, abstractmethod
from typing import Any

from trinity.algorithm.declared import Made, arguments, check_kind, declare
from trinity.common.refusals import NotMapped
from trinity.common.registry import Registry
from trinity.plugins.declarations import KL_FUNCTIONS

_OF_TRINITY = ("calculate_kl_loss", "apply_kl_penalty_to_reward", "update_kl_coef")


class KLFn(ABC):
    """Returns the KL of each token, for log-probabilities float [B, R]."""

    def __init__(
        self,
        adaptive: bool = False,
        kl_coef: float = 0.001,
        target_kl: float | None = None,
        horizon: float | None = None,
    ) -> None:
        """The defaults: Trinity applies the YAML's."""
        self.adaptive, self.kl_coef, self.target_kl, self.horizon = adaptive, kl_coef, target_kl, horizon

    @abstractmethod
    def calculate_kl(self, logprob: Any, ref_logprob: Any, old_logprob: Any = None) -> Any: ...

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {}


def _add(name: str, kind: Any) -> None:
    check_kind(name, kind, KLFn, "KL_FN")
    if own := [method for method in _OF_TRINITY if hasattr(kind, method)]:
        raise NotMapped(f"{name!r} of KL_FN defines {own[0]}; a plugin gives only calculate_kl", "algorithms")
    make = Made(kind)

    def estimate(lp: Any, ref: Any, old: Any, **args: Any) -> Any:
        return make(args).calculate_kl(lp, ref, old)

    declare(KL_FUNCTIONS, name, kind, estimate, arguments(kind, tuple(KL_FUNCTIONS.args)))


KL_FN = Registry("KL_FN", _add, lambda: ())
