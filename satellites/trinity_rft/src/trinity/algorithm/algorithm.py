"""Trinity-RFT's algorithms: the parts that an algorithm_type chooses."""

from typing import Any

from trinity.algorithm.declared import check_kind
from trinity.common.refusals import NotMapped
from trinity.common.registry import Registry
from trinity.plugins.declarations import ALGORITHMS, Algorithm

_PARTS = {
    "policy_loss_fn": "policy_loss",
    "advantage_fn": "advantage",
    "kl_loss_fn": "kl_loss",
    "kl_penalty_fn": "kl_penalty",
    "entropy_loss_fn": "entropy_loss",
    "sample_strategy": "sample_strategy",
    "repeat_times": "repeat_times",
    "loss_agg_mode": "loss_aggregation",
}


class AlgorithmType:
    """default_config() names the parts. Trinity finds by itself what use_reference and the other flags say, but for
    use_critic."""

    use_critic: bool = False
    use_reference: bool = False
    compute_advantage_in_trainer: bool = False
    can_balance_batch: bool = True
    schema: Any = "experience"

    @classmethod
    def default_config(cls) -> dict[str, Any]:
        raise NotImplementedError(f"{cls.__name__} has no default_config()")


def _add(name: str, kind: Any) -> None:
    check_kind(name, kind, AlgorithmType, "ALGORITHM_TYPE")
    given = kind.default_config()
    own = {key for key in given if key in _PARTS or (key.endswith("_args") and key.removesuffix("_args") in _PARTS)}
    if other := sorted(given.keys() - own):
        raise NotMapped(f"{name!r} of ALGORITHM_TYPE sets {other[0]!r}; known: {', '.join(_PARTS)}", "algorithms")
    if "policy_loss_fn" not in given:
        raise NotMapped(f"{name!r} of ALGORITHM_TYPE has no policy_loss_fn", "algorithms")
    parts = {_PARTS[key]: value for key, value in given.items() if key in _PARTS and value is not None}
    args = {key.removesuffix("_args"): dict(given[key] or {}) for key in own - _PARTS.keys()}
    critic = bool(kind.use_critic)
    ALGORITHMS.add(Algorithm(name=name, module=kind.__module__, args=args, critic=critic, **parts))


ALGORITHM_TYPE = Registry("ALGORITHM_TYPE", _add, lambda: ())
