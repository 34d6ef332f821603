"""Advantage functions, losses, KL and entropy terms and sample strategies: their names, arguments and defaults."""

import math
from typing import Any

Args = dict[str, Any]

_GRPO: Args = {
    "epsilon": 1e-6,
    "std_threshold": None,
    "duplicate_experiences": False,
    "rank_penalty": None,
    "std_cal_level": "group",
}
_OPMD: Args = {"opmd_baseline": "mean", "tau": 1.0}
_ASYMRE: Args = {"baseline_shift": -0.1}
# The `_verl` names are former ones for the same.
ADVANTAGES: dict[str, Args] = {
    "grpo": _GRPO,
    "grpo_verl": _GRPO,
    "grpo_reweight_adv": {"epsilon": 1e-6, "std_cal_level": "group", "alpha": 3.0, "best": 1.0},
    "step_wise_grpo": {"epsilon": 1e-6, "enable_step_norm": False, "std_threshold": None, "std_cal_level": "group"},
    "gigpo": {
        "omega": 1.0,
        "gamma": 1.0,
        "fnorm": "none",
        "epsilon": 1e-6,
        "step_reward_key": "step_reward",
        "env_state_hash_key": "env_state_hash",
        "state_scope": "task",
    },
    "ppo": {"gamma": 1.0, "lam": 1.0},
    "reinforceplusplus": {"gamma": 1.0},
    "reinforce": {},
    "remax": {},
    "rloo": {},
    "opmd": _OPMD,
    "opmd_verl": _OPMD,
    "opmd_reweight_adv": {**_OPMD, "alpha": 3.0, "best": 1.0},
    "asymre": _ASYMRE,
    "asymre_verl": _ASYMRE,
    "rec": {"epsilon": 1e-6, "std_normalize": False, "drop": None},
    "on_policy_distill": {"kl_coef": 1.0},
    "jsd": {"kl_coef": 1.0, "lambda_coef": 0.5, "temperature": 1.0},
}

_CLIP: Args = {"clip_range": 0.2, "clip_range_low": None, "clip_range_high": None}
# `loss_agg_mode` of a loss is its own aggregation, where algorithm.loss_agg_mode is null.
_AGGREGATED: Args = {"loss_agg_mode": None}
_SFT: Args = {"use_token_level_loss": True, **_AGGREGATED}
_PARTS_OF_MIX: Args = {"sft_loss_agg_mode": None, "grpo_loss_agg_mode": None, **_AGGREGATED}
POLICY_LOSSES: dict[str, Args] = {
    "ppo": {
        **_CLIP,
        "clip_ratio_c": 3.0,
        "enable_sequence_masking": False,
        "delta_sequence_masking": 0.1,
        "fallback_to_policy_gradient": False,
        **_AGGREGATED,
    },
    "gspo": {
        "clip_range": None,
        "clip_range_low": 3e-4,
        "clip_range_high": 4e-4,
        "loss_agg_mode": "seq-mean-token-mean",
    },
    "cispo": {
        "clip_range_low": 1.0,
        "clip_range_high": 0.28,
        "enable_mask_clip": False,
        "mask_clip_range_low": 1.0,
        "mask_clip_range_high": 0.28,
        **_AGGREGATED,
    },
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05, "loss_agg_mode": "seq-mean-token-mean"},
    "gmpo": {"clip_range_low": 0.4, "clip_range_high": 0.4, "loss_agg_mode": "seq-mean-token-sum"},
    "clip_cov": {**_CLIP, "clip_cov_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0, **_AGGREGATED},
    "kl_cov": {"kl_cov_ratio": 0.0002, "ppo_kl_coef": 1.0, **_AGGREGATED},
    "topr": {"advantage_threshold": 0.0, "ratio_level": "token", **_AGGREGATED},
    "sppo": {"epsilon": 0.3, **_AGGREGATED},
    "rec": {
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "epsilon_low_prime": 0.6,
        "epsilon_high_prime": 2.0,
        "clip_mode": "none",
        "weight": "none",
        "regularizer": "none",
        "regularizer_coef": 0.0,
        "temp": 1.0,
        "fix_opd_advantage": False,
        **_AGGREGATED,
    },
    "opmd": {"tau": 1.0, **_AGGREGATED},
    "opmd_kimi": {"tau": 1.0, "loss_agg_mode": "seq-mean-token-sum"},
    "opmd_pairwise": {"tau": 1.0, "loss_agg_mode": "seq-mean-token-sum"},
    "importance_sampling": _AGGREGATED,
    "m2po": {"m2_threshold": 0.04, "log_ratio_clip": 20.0, **_AGGREGATED},
    "dpo": {"beta": 0.1, "label_smoothing": 0.0},
    "sft": _SFT,
    "sft_is": _SFT,
    "sft_phi": {**_SFT, "cutoff_prob": 1.0},
    "mix": {"mu": 0.1, **_CLIP, "use_token_level_loss_in_sft": True, **_PARTS_OF_MIX},
    "mix_chord": {
        "mu_warmup_steps": 0,
        "mu_decay_steps": 0,
        "mu_peak": 0.1,
        "mu_valley": 0.1,
        "enable_phi_function": True,
        **_CLIP,
        "use_token_level_loss_in_sft": True,
        **_PARTS_OF_MIX,
    },
}
# Losses with a ratio to the policy that sampled; losses with one value for a sequence.
RATIO_LOSSES = (
    "ppo", "gspo", "cispo", "sapo", "gmpo", "clip_cov", "kl_cov", "topr", "importance_sampling", "m2po", "mix",
    "mix_chord",
)  # fmt: skip
SEQUENCE_LOSSES = ("gmpo", "opmd_kimi", "opmd_pairwise", "dpo")
# Losses that train the expert rows of a batch (sample_strategy mix).
EXPERT_LOSSES = ("mix", "mix_chord", "sft", "sft_is", "sft_phi")

_KL: Args = {"kl_coef": 0.001, "adaptive": False, "target_kl": None, "horizon": None}
KL_LOSSES: dict[str, Args] = {
    "none": {},
    "k1": _KL,
    "k2": _KL,
    "k3": _KL,
    "low_var_kl": _KL,
    "abs": _KL,
    "corrected_k3": _KL,
}
# `basic` is a former name of the default.
ENTROPY_LOSSES: dict[str, Args] = {
    "none": {},
    "default": {"entropy_coef": 0.0},
    "basic": {"entropy_coef": 0.0},
    "mix": {"entropy_coef": 0.0},
}
# `warmup` and `dpo` are names of former times for the default.
SAMPLE_STRATEGIES: dict[str, Args] = {
    "default": {},
    "staleness_control": {"staleness_limit": None},
    "mix": {"expert_data_ratio": 0.5, "sft_dataset_name": "sft_dataset"},
    "warmup": {},
    "dpo": {},
}

_AGGREGATIONS = (None, "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "std_cal_level": ("group", "batch", "none"),
    "fnorm": ("none", "std"),
    "state_scope": ("task", "batch"),
    "opmd_baseline": ("mean", "logavgexp"),
    "drop": (None, "balance"),
    "ratio_level": ("token", "sequence"),
    "clip_mode": ("none", "one-side", "gspo-one-side", "two-side", "ring"),
    "weight": (
        "none",
        "importance_sampling",
        "truncated_importance_sampling",
        "gspo_importance_sampling",
        "advantage",
    ),
    "regularizer": ("none", "k2", "forward-kl"),
    **dict.fromkeys(("loss_agg_mode", "sft_loss_agg_mode", "grpo_loss_agg_mode"), _AGGREGATIONS),
}
# Least and greatest value of numbers, both possible; others may be anything finite. Checked elsewhere: of strategies.
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("gamma", "lam", "lambda_coef", "mu", "mu_peak", "mu_valley", "rank_penalty"), (0, 1)),
    **dict.fromkeys(("epsilon", "clip_range", "clip_range_low", "clip_range_high", "tau"), (0, math.inf)),
    **dict.fromkeys(("delta_sequence_masking", "mask_clip_range_low", "mask_clip_range_high"), (0, math.inf)),
    **dict.fromkeys(("epsilon_low", "epsilon_low_prime"), (0, 1)),
    **dict.fromkeys(("epsilon_high", "epsilon_high_prime", "regularizer_coef", "kl_coef", "alpha"), (0, math.inf)),
    **dict.fromkeys(("m2_threshold", "target_kl", "horizon", "mu_warmup_steps", "mu_decay_steps"), (0, math.inf)),
    **dict.fromkeys(("temp", "temperature", "beta", "tau_pos", "tau_neg", "log_ratio_clip"), (1e-9, math.inf)),
    **dict.fromkeys(("clip_cov_ratio", "kl_cov_ratio"), (1e-9, 1)),
    "ppo_kl_coef": (0, math.inf),
    "clip_ratio_c": (1, math.inf),
    "cutoff_prob": (1e-9, 1),
    "label_smoothing": (0, 0.5),
}
_ELSEWHERE = ("staleness_limit", "expert_data_ratio", "sft_dataset_name")


def argument_problem(argument: str, value: Any, default: Any) -> str | None:
    """The problem of an argument's value, if any. null is valid where it is the default."""
    if argument in _ELSEWHERE or (value is None and default is None):
        return None
    if argument in _CHOICES:
        choices = ", ".join("null" if choice is None else choice for choice in _CHOICES[argument])
        return None if value in _CHOICES[argument] else f"is {value!r}, must be one of {choices}"
    if isinstance(default, bool):
        return None if isinstance(value, bool) else f"is {value!r}, must be true or false"
    if isinstance(default, str):
        return None if isinstance(value, str) else f"is {value!r}, must be text"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return f"is {value!r}, must be a number"
    low, high = _RANGES.get(argument, (-math.inf, math.inf))
    if low <= value <= high:
        return None
    return f"is {value!r}, must be " + (f"in [{low}, {high}]" if high < math.inf else f"at least {low}")
