"""The names an algorithm is made of, with their default arguments. The trainer implements them; a test compares."""

from dataclasses import dataclass
from typing import Any

from trinity.config.schema.algorithm import AlgorithmConfig

Args = dict[str, Any]

ADVANTAGES: dict[str, Args] = {
    "ppo": {"gamma": 1.0, "lam": 1.0},
    "grpo": {"epsilon": 1e-6, "std_threshold": None},
}
POLICY_LOSSES: dict[str, Args] = {
    "ppo": {"clip_range": 0.2, "clip_range_low": None, "clip_range_high": None, "clip_ratio_c": 3.0},
    "sft": {"use_token_level_loss": True},
}
KL_LOSSES: dict[str, Args] = {
    "none": {},
    "k1": {"kl_coef": 0.001},
    "k2": {"kl_coef": 0.001},
    "k3": {"kl_coef": 0.001},
    "low_var_kl": {"kl_coef": 0.001},
    "abs": {"kl_coef": 0.001},
}
ENTROPY_LOSSES: dict[str, Args] = {
    "none": {},
    "default": {"entropy_coef": 0.0},
}
# `warmup` and `dpo` are names of former times for the default.
SAMPLE_STRATEGIES: dict[str, Args] = {
    "default": {},
    "staleness_control": {"staleness_limit": None},
    "mix": {"expert_data_ratio": 0.5, "sft_dataset_name": "sft_dataset"},
    "warmup": {},
    "dpo": {},
}


@dataclass(frozen=True)
class Algorithm:
    """The parts an algorithm_type chooses. `offline`: learns from a dataset, without explorers.

    `critic`: needs a value model, which the trainer cannot train yet: such a configuration can be checked, not run.
    """

    policy_loss: str
    advantage: str | None = None
    kl_loss: str = "none"
    entropy_loss: str = "none"
    offline: bool = False
    critic: bool = False
    sample_strategy: str = "default"


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(policy_loss="ppo", advantage="grpo", kl_loss="k2", entropy_loss="default"),
    "ppo": Algorithm(policy_loss="ppo", advantage="ppo", kl_loss="k2", entropy_loss="default", critic=True),
    "sft": Algorithm(policy_loss="sft", offline=True),
}

# (config key, registry, what the algorithm chooses)
PARTS = (
    ("advantage_fn", ADVANTAGES, "advantage"),
    ("policy_loss_fn", POLICY_LOSSES, "policy_loss"),
    ("kl_loss_fn", KL_LOSSES, "kl_loss"),
    ("entropy_loss_fn", ENTROPY_LOSSES, "entropy_loss"),
    ("sample_strategy", SAMPLE_STRATEGIES, "sample_strategy"),
)


@dataclass(frozen=True)
class Part:
    """A registered function and its full arguments."""

    name: str
    args: Args


@dataclass(frozen=True)
class AlgorithmPlan:
    """The algorithm with every null filled in."""

    algorithm_type: str
    offline: bool
    critic: bool
    policy_loss: Part
    advantage: Part | None
    kl_loss: Part
    entropy_loss: Part
    sample_strategy: Part
    loss_aggregation: str

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities of the frozen base model enter the loss."""
        return self.kl_loss.name != "none" and self.kl_loss.args["kl_coef"] != 0


def resolvable(config: AlgorithmConfig) -> bool:
    """Whether every name is registered."""
    return config.algorithm_type in ALGORITHMS and all(
        getattr(config, key) is None or getattr(config, key) in registry for key, registry, _ in PARTS
    )


def resolve(config: AlgorithmConfig) -> AlgorithmPlan:
    """Fill in what the YAML left null; partial arguments are merged over the defaults. The config was checked."""
    chosen = ALGORITHMS[config.algorithm_type]

    def part(key: str, registry: dict[str, Args], default: str | None) -> Part | None:
        name = getattr(config, key) or default
        if name is None:
            return None
        return Part(name, {**registry[name], **(getattr(config, f"{key}_args") or {})})

    parts = {attribute: part(key, registry, getattr(chosen, attribute)) for key, registry, attribute in PARTS}
    policy_loss, kl_loss, entropy_loss = parts["policy_loss"], parts["kl_loss"], parts["entropy_loss"]
    strategy = parts["sample_strategy"]
    assert policy_loss is not None and kl_loss is not None and entropy_loss is not None and strategy is not None
    return AlgorithmPlan(
        algorithm_type=config.algorithm_type,
        offline=chosen.offline,
        critic=chosen.critic,
        policy_loss=policy_loss,
        advantage=parts["advantage"],
        kl_loss=kl_loss,
        entropy_loss=entropy_loss,
        sample_strategy=strategy,
        loss_aggregation=config.loss_agg_mode or "token-mean",
    )
