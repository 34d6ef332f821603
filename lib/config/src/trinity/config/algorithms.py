"""The parts of each algorithm by name, with their default arguments. The trainer implements them; a test compares.

docs/algorithms.md has the formulas; tables of the parts are in `algorithm_parts`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trinity.config.algorithm_parts import (
    ADVANTAGES,
    ENTROPY_LOSSES,
    KL_LOSSES,
    POLICY_LOSSES,
    RATIO_LOSSES,
    SAMPLE_STRATEGIES,
    SEQUENCE_LOSSES,
    Args,
    argument_problem,
)
from trinity.config.schema.algorithm import AlgorithmConfig, RolloutCorrectionConfig


@dataclass(frozen=True)
class Algorithm:
    """The parts an algorithm_type chooses. `offline`: learns from a dataset, without explorers.

    `args`: what it gives a part beside the part's own defaults, by the key of the YAML. `repeat_times`: rollouts per
    task it is usually run with; the YAML's own number counts. `critic`: it learns a value model beside the policy.
    """

    policy_loss: str
    advantage: str | None = None
    kl_loss: str = "none"
    kl_penalty: str = "none"
    entropy_loss: str = "none"
    offline: bool = False
    critic: bool = False
    sample_strategy: str = "default"
    repeat_times: int = 1
    loss_aggregation: str = "token-mean"
    args: dict[str, Args] = field(default_factory=dict)


def _group(policy_loss: str, advantage: str, repeat_times: int = 2, **parts: Any) -> Algorithm:
    """With a KL term to the base model and the entropy's, as most are."""
    chosen = {"kl_loss": "k2", "entropy_loss": "default", **parts}
    return Algorithm(policy_loss, advantage, repeat_times=repeat_times, **chosen)


def _plain(policy_loss: str, advantage: str | None, repeat_times: int = 2, **parts: Any) -> Algorithm:
    """Without KL and entropy terms."""
    return Algorithm(policy_loss, advantage, repeat_times=repeat_times, **parts)


_CLIP_HIGHER: dict[str, Args] = {"policy_loss_fn": {"clip_range_low": 0.2, "clip_range_high": 0.28}}
_NO_STD: dict[str, Args] = {"advantage_fn": {"std_cal_level": "none"}}

ALGORITHMS: dict[str, Algorithm] = {
    "grpo": _group("ppo", "grpo"),
    "grpo_verl": _group("ppo", "grpo_verl"),
    "dr_grpo": _plain("ppo", "grpo", 8, loss_aggregation="seq-mean-token-sum-norm", args=_NO_STD),
    "dapo": _plain("ppo", "grpo", 16, entropy_loss="default", args=_CLIP_HIGHER),
    "multi_step_grpo": _group("ppo", "step_wise_grpo", 8),
    "gigpo": _group("ppo", "gigpo", 8),
    "ppo": _group("ppo", "ppo", 1, critic=True),
    "reinforceplusplus": _group("ppo", "reinforceplusplus"),
    "rloo": _group("ppo", "rloo"),
    "remax": _group("ppo", "remax"),
    "opmd": _group("opmd", "opmd"),
    "opmd_kimi": _plain("opmd_kimi", "opmd"),
    "opmd_pairwise": _plain("opmd_pairwise", "reinforce"),
    "opmd_reweight_adv": _group("opmd", "opmd_reweight_adv"),
    "grpo_reweight_adv": _group("ppo", "grpo_reweight_adv"),
    "asymre": _plain("opmd", "asymre"),
    "topr": _group("topr", "reinforce"),
    "cispo": _group("cispo", "grpo"),
    "gspo": _group("gspo", "grpo"),
    "sapo": _group("sapo", "grpo"),
    "sppo": _plain("sppo", "opmd"),
    "rec": _group("rec", "rec"),
    "m2po": _plain("m2po", "grpo", 8),
    "mix": _group("mix", "grpo", 8, entropy_loss="mix", sample_strategy="mix"),
    "mix_chord": _group("mix_chord", "grpo", 8, entropy_loss="mix", sample_strategy="mix"),
    "raft": _plain("sft", None, 2),
    "dpo": Algorithm("dpo", kl_loss="k2", entropy_loss="default", repeat_times=2),
    "on_policy_distill": _plain("ppo", "on_policy_distill", 8),
    "jsd": _plain("ppo", "jsd", 8),
    "sft": Algorithm(policy_loss="sft", offline=True),
    "cpt": Algorithm(policy_loss="sft", offline=True),
}

# Advantages that read a teacher's log-probabilities and no reward.
TEACHER_ADVANTAGES = ("on_policy_distill", "jsd")

# (config key, registry, what the algorithm chooses)
PARTS = (
    ("advantage_fn", ADVANTAGES, "advantage"),
    ("policy_loss_fn", POLICY_LOSSES, "policy_loss"),
    ("kl_penalty_fn", KL_LOSSES, "kl_penalty"),
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
    """The algorithm with every null filled in. `kl_penalty` is taken from the reward, `kl_loss` added to the loss.

    `critic`: a value model learns beside the policy, for the advantage. `max_response_tokens`: of the run's lengths,
    what seq-mean-token-sum-norm divides by.
    """

    algorithm_type: str
    offline: bool
    critic: bool
    policy_loss: Part
    advantage: Part | None
    kl_penalty: Part
    kl_loss: Part
    entropy_loss: Part
    sample_strategy: Part
    loss_aggregation: str
    correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    max_response_tokens: int = 1

    @property
    def rows(self) -> str:
        """What a dataset's rows are: messages, pairs (of replies, the preferred and the other) or text."""
        return "pairs" if self.of_pairs else "text" if self.algorithm_type == "cpt" else "messages"

    @property
    def of_pairs(self) -> bool:
        """Whether the loss compares two responses to a prompt; of a dataset, each row has both."""
        return self.policy_loss.name == "dpo"

    @property
    def kl_in_loss(self) -> bool:
        return _counts(self.kl_loss)

    @property
    def kl_in_reward(self) -> bool:
        return _counts(self.kl_penalty)

    @property
    def needs_models(self) -> bool:
        """Whether advantages can be computed only when reference or critic have seen the batch."""
        return self.kl_in_reward or self.critic

    @property
    def needs_greedy_baseline(self) -> bool:
        """Whether one rollout of each task is sampled at temperature 0, as the others' baseline."""
        return self.advantage is not None and self.advantage.name == "remax"

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities of the frozen base model enter the loss or the reward."""
        return self.kl_in_loss or self.kl_in_reward or self.of_pairs


def _counts(kl: Part) -> bool:
    return kl.name != "none" and kl.args["kl_coef"] != 0


def resolvable(config: AlgorithmConfig) -> bool:
    """Whether every name is registered."""
    return config.algorithm_type in ALGORITHMS and all(
        getattr(config, key) is None or getattr(config, key) in registry for key, registry, _ in PARTS
    )


def resolve(config: AlgorithmConfig) -> AlgorithmPlan:
    """Fill in what the YAML left null; partial arguments are merged over the defaults. The config was checked."""
    chosen = ALGORITHMS[config.algorithm_type]
    parts = {attribute: _part(config, key, registry, attribute) for key, registry, attribute in PARTS}
    policy_loss = parts["policy_loss"]
    others = {name: part for name, part in parts.items() if name not in ("policy_loss", "advantage")}
    assert policy_loss is not None
    args = dict(policy_loss.args)
    own = args.pop("loss_agg_mode", None)  # of the loss; the algorithm's key wins
    return AlgorithmPlan(
        algorithm_type=config.algorithm_type,
        offline=chosen.offline,
        critic=chosen.critic and parts["advantage"] is not None and parts["advantage"].name == "ppo",
        policy_loss=Part(policy_loss.name, args),
        advantage=parts["advantage"],
        **{name: part for name, part in others.items() if part is not None},
        loss_aggregation=config.loss_agg_mode or own or chosen.loss_aggregation,
        correction=config.rollout_correction,
        max_response_tokens=1,  # the lengths of the run are not of this section: see plan.make_plan
    )


def _part(config: AlgorithmConfig, key: str, registry: dict[str, Args], attribute: str) -> Part | None:
    """A part's name and arguments: the registry's, over them the algorithm's if it is its own part, then the YAML's."""
    chosen = ALGORITHMS[config.algorithm_type]
    own = getattr(chosen, attribute)
    name = getattr(config, key) or own
    if name is None:
        return None
    given = getattr(config, f"{key}_args") or {}
    special = chosen.args.get(key, {}) if name == own else {}
    if given.get("clip_range") is not None:  # replaces both bounds of algorithm and loss
        special = {**special, "clip_range_low": None, "clip_range_high": None}
    return Part(name, {**registry[name], **special, **given})


def argument_problems(config: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    """(key below `algorithm`, what is wrong) of values of arguments and of parts that do not go together.

    Every name is registered and every argument known.
    """
    for key, registry, attribute in PARTS:
        part = _part(config, key, registry, attribute)
        for argument, value in (getattr(config, f"{key}_args") or {}).items():
            assert part is not None
            problem = argument_problem(argument, value, registry[part.name][argument])
            if problem:
                yield f"{key}_args.{argument}", problem
    plan = resolve(config)
    name, correction = plan.policy_loss.name, config.rollout_correction
    for key, kl in (("kl_penalty_fn", plan.kl_penalty), ("kl_loss_fn", plan.kl_loss)):
        if kl.args.get("adaptive") and not (kl.args["target_kl"] and kl.args["horizon"]):
            yield f"{key}_args.adaptive", "is true, which needs target_kl and horizon above 0"
    if name == "m2po" and plan.loss_aggregation != "token-mean":
        yield "loss_agg_mode", f"is {plan.loss_aggregation!r}; m2po is a mean over tokens"
    if name == "opmd_pairwise":
        yield from _problems_of_pairwise(plan)
    if plan.kl_in_reward and (plan.advantage is None or plan.advantage.name in TEACHER_ADVANTAGES):
        learner = plan.advantage.name if plan.advantage else name
        yield (
            "kl_penalty_fn",
            f"is {plan.kl_penalty.name!r}, but {learner} reads no reward; remove it, or use kl_loss_fn",
        )
    if name in ("dpo", "opmd_pairwise") and config.repeat_times < 2:
        yield "repeat_times", f"is {config.repeat_times}; {name} compares the rollouts of a task, it needs 2 at least"
    if plan.needs_greedy_baseline and config.repeat_times < 2:
        yield "repeat_times", f"is {config.repeat_times}; the last rollout is the baseline of remax, so 2 are needed"
    if correction.token_cap is not None and correction.sequence_cap is not None:
        yield "rollout_correction.sequence_cap", "is given beside token_cap; use one of them"
    for key in ("token_range", "geometric_range"):
        limits = getattr(correction, key)
        if limits is not None and not 0 <= limits[0] < limits[1]:
            yield f"rollout_correction.{key}", f"is {list(limits)}, must be [low, high] with 0 <= low < high"
    capped = next((key for key in ("token_cap", "sequence_cap") if getattr(correction, key) is not None), None)
    if capped and name in RATIO_LOSSES and not correction.decoupled:
        yield f"rollout_correction.{capped}", f"weighs by a ratio that {name} has already; set decoupled: true"
    if (plan.offline or plan.of_pairs) and correction != RolloutCorrectionConfig():
        what = "which dpo does not compare with" if plan.of_pairs else "and nothing sampled a dataset; remove it"
        yield "rollout_correction", f"corrects for the policy that sampled, {what}"
    elif name in SEQUENCE_LOSSES and (correction.token_cap is not None or correction.token_range is not None):
        yield "rollout_correction", f"is of tokens, and {name} has one loss for a sequence; use those of sequences"


def _problems_of_pairwise(plan: AlgorithmPlan) -> Iterator[tuple[str, str]]:
    """Its gradient rests on deviations from the mean of a group adding up to 0: all sequences have to weigh alike."""
    if plan.policy_loss.args["tau"] == 0:
        yield "policy_loss_fn_args.tau", "is 0, must be above 0: opmd_pairwise compares rewards with tau * log-ratios"
    alike = "opmd_pairwise compares sequences of the same weight"
    if plan.loss_aggregation == "seq-mean-token-mean":
        yield "loss_agg_mode", f"is {plan.loss_aggregation!r}, by length; {alike}: use seq-mean-token-sum"
    for key in ("sequence_cap", "geometric_range"):
        if getattr(plan.correction, key) is not None:
            yield f"rollout_correction.{key}", f"weighs sequences; {alike}: remove it, or use opmd_kimi"
