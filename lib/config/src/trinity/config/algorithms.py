"""Resolves the algorithm of a YAML: its parts, with every null filled in. docs/algorithms.md has the formulas."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trinity.config.errors import did_you_mean
from trinity.config.schema.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from trinity.plugins.arguments import Argument
from trinity.plugins.declarations import (
    ADVANTAGES,
    ALGORITHMS,
    ENTROPY_LOSSES,
    KL_FUNCTIONS,
    POLICY_LOSSES,
    SAMPLE_STRATEGIES,
    Algorithm,
    Declaration,
    Registry,
)

# (config key, registry, the algorithm's choice)
PARTS = (
    ("advantage_fn", ADVANTAGES, "advantage"),
    ("policy_loss_fn", POLICY_LOSSES, "policy_loss"),
    ("kl_penalty_fn", KL_FUNCTIONS, "kl_penalty"),
    ("kl_loss_fn", KL_FUNCTIONS, "kl_loss"),
    ("entropy_loss_fn", ENTROPY_LOSSES, "entropy_loss"),
    ("sample_strategy", SAMPLE_STRATEGIES, "sample_strategy"),
)


# Of truncated importance sampling (Yao et al., 2025), which is made for engines in other numbers than the trainer.
QUANTIZED_CAP = 2.0


@dataclass(frozen=True)
class Part:
    """A registered function and its full arguments."""

    name: str
    args: dict[str, Any]

    def args_beside(self, others: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in self.args.items() if name not in others}


@dataclass(frozen=True)
class AlgorithmPlan:
    """The algorithm with every null filled in. `kl_penalty` is taken from the reward, `kl_loss` added to the loss.

    `critic`: a value model learns too, for the advantage. `max_response_tokens`: the run's
    length by which seq-mean-token-sum-norm divides.
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
    def loss_traits(self) -> tuple[str, ...]:
        return _traits(POLICY_LOSSES, self.policy_loss)

    @property
    def advantage_traits(self) -> tuple[str, ...]:
        return _traits(ADVANTAGES, self.advantage)

    @property
    def teacher_top(self) -> int:
        """Number of a teacher's likeliest tokens that the loss reads in each place; 0 if it reads none."""
        return int(self.policy_loss.args["top_k"]) if "teacher_top" in self.loss_traits else 0

    @property
    def rows(self) -> str:
        """The kind of a dataset's rows: messages, pairs (a preferred reply and another) or text."""
        return "pairs" if self.of_pairs else "text" if self.algorithm_type == "cpt" else "messages"

    @property
    def of_pairs(self) -> bool:
        """Tells if the loss compares two responses to a prompt; each row of a dataset then has both."""
        return "pairs" in self.loss_traits

    @property
    def trains_experts(self) -> bool:
        """Tells if the loss trains expert rows together with rolled-out sequences (sample_strategy mix)."""
        return "experts" in self.loss_traits

    @property
    def by_arrival(self) -> bool:
        """Tells if groups are trained in the order they are stored, instead of the order of tasks."""
        return "arrival" in _traits(SAMPLE_STRATEGIES, self.sample_strategy)

    @property
    def kl_in_loss(self) -> bool:
        return _counts(self.kl_loss)

    @property
    def kl_in_reward(self) -> bool:
        return _counts(self.kl_penalty)

    @property
    def needs_models(self) -> bool:
        """Tells if advantages need values of the reference or the critic first."""
        return self.kl_in_reward or self.critic

    @property
    def needs_greedy_baseline(self) -> bool:
        """Tells if one rollout of each task is sampled at temperature 0, as the others' baseline."""
        return "greedy" in self.advantage_traits

    @property
    def needs_reference(self) -> bool:
        """Tells if log-probabilities of the frozen base model enter the loss or the reward."""
        return self.kl_in_loss or self.kl_in_reward or "reference" in self.loss_traits


def _counts(kl: Part) -> bool:
    return kl.name != "none" and kl.args["kl_coef"] != 0


def resolvable(config: AlgorithmConfig) -> bool:
    """Tells if every name is registered."""
    return config.algorithm_type in ALGORITHMS and all(
        name is None or name in registry for name, registry in _names(config)
    )


def _names(config: AlgorithmConfig) -> Iterator[tuple[str | None, Registry[Declaration]]]:
    chosen = ALGORITHMS[config.algorithm_type]
    for key, registry, attribute in PARTS:
        yield getattr(config, key) or getattr(chosen, attribute), registry


def resolve(config: AlgorithmConfig) -> AlgorithmPlan:
    """Fill in what the YAML left null; partial arguments are merged over the defaults. The config was checked.

    A name of a plugin that is not loaded here, as in the sync service, has no traits and only the YAML's arguments.
    """
    chosen = ALGORITHMS.get(config.algorithm_type) or Algorithm(config.algorithm_type, policy_loss="ppo")
    parts = {attribute: _part(config, chosen, key, registry, attribute) for key, registry, attribute in PARTS}
    policy_loss, advantage = parts["policy_loss"], parts["advantage"]
    others = {name: part for name, part in parts.items() if name not in ("policy_loss", "advantage")}
    assert policy_loss is not None
    args = dict(policy_loss.args)
    own = args.pop("loss_agg_mode", None)  # of the loss; the algorithm's key wins
    return AlgorithmPlan(
        algorithm_type=config.algorithm_type,
        offline=chosen.offline,
        critic=chosen.critic and "critic" in _traits(ADVANTAGES, advantage),
        policy_loss=Part(policy_loss.name, args),
        advantage=advantage,
        **{name: part for name, part in others.items() if part is not None},
        loss_aggregation=config.loss_agg_mode or own or chosen.loss_aggregation,
        correction=config.rollout_correction,
        max_response_tokens=1,  # the lengths of the run are not of this section: see plan.make_plan
    )


def for_quantized(plan: AlgorithmPlan) -> RolloutCorrectionConfig:
    """Returns the correction for engines that quantize, where the YAML has none: truncated importance sampling."""
    of_sequences = "sequences" in plan.loss_traits and "geometric" not in plan.loss_traits
    if plan.offline or plan.of_pairs or of_sequences or "mean" in plan.loss_traits:
        return plan.correction
    return RolloutCorrectionConfig(decoupled="ratio" in plan.loss_traits or None, token_cap=QUANTIZED_CAP)


def _traits(registry: Registry[Declaration], part: Part | None) -> tuple[str, ...]:
    return registry[part.name].traits if part is not None and part.name in registry else ()


def _part(
    config: AlgorithmConfig, chosen: Algorithm, key: str, registry: Registry[Declaration], attribute: str
) -> Part | None:
    """A part's name and arguments: the registry's, over them the algorithm's if it is its own part, then the YAML's."""
    own = getattr(chosen, attribute)
    name = getattr(config, key) or own
    if name is None:
        return None
    given = getattr(config, f"{key}_args") or {}
    special = chosen.args.get(key, {}) if name == own else {}
    if given.get("clip_range") is not None:  # replaces both bounds of algorithm and loss
        special = {**special, "clip_range_low": None, "clip_range_high": None}
    defaults = registry[name].defaults if name in registry else {}
    return Part(name, {**defaults, **special, **given})


def problems_of_arguments(
    name: str | None, known: Mapping[str, Argument], given: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yields (argument, problem) for unknown arguments, and for values that they do not take."""
    for argument, value in given.items():
        if argument not in known:
            yield argument, f"{name} has no such argument; {did_you_mean(argument, known)}"
        elif problem := known[argument].problem(value):
            yield argument, problem


def part_problems(config: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    """Yields (key below `algorithm`, problem) for parts that do not go together. Every name is registered."""
    plan = resolve(config)
    name, correction = plan.policy_loss.name, config.rollout_correction
    for key, kl in (("kl_penalty_fn", plan.kl_penalty), ("kl_loss_fn", plan.kl_loss)):
        if kl.args.get("adaptive") and not (kl.args["target_kl"] and kl.args["horizon"]):
            yield f"{key}_args.adaptive", "is true, which needs target_kl and horizon above 0"
    clip = plan.policy_loss.args
    for bound in ("clip_range_low", "clip_range_high"):
        if clip.get("clip_range", 0) is None and clip.get(bound, 0) is None:
            yield f"policy_loss_fn_args.{bound}", "is null, and so is clip_range; give one of them"
    mode = POLICY_LOSSES[name].args.get("loss_agg_mode")
    own = "loss_agg_mode" in (config.policy_loss_fn_args or {}) and not config.loss_agg_mode  # said above
    if mode is not None and plan.loss_aggregation not in mode.choices and not own:
        yield "loss_agg_mode", f"is {plan.loss_aggregation!r}; {name} takes {' or '.join(map(str, mode.choices))}"
    for key in ("sequence_cap", "geometric_range"):
        if name == "opmd_pairwise" and getattr(correction, key) is not None:
            yield f"rollout_correction.{key}", "weighs sequences, and opmd_pairwise compares those of the same weight"
    if plan.kl_in_reward and (plan.advantage is None or "teacher" in plan.advantage_traits):
        learner = plan.advantage.name if plan.advantage else name
        yield (
            "kl_penalty_fn",
            f"is {plan.kl_penalty.name!r}, but {learner} reads no reward; remove it, or use kl_loss_fn",
        )
    if {"pairs", "peers"} & {*plan.loss_traits} and config.repeat_times < 2:
        yield "repeat_times", f"is {config.repeat_times}; {name} compares the rollouts of a task, it needs 2 at least"
    if plan.needs_greedy_baseline and config.repeat_times < 2:
        yield (
            "repeat_times",
            f"is {config.repeat_times}; the last rollout is the baseline of the others, so 2 are needed",
        )
    if correction.token_cap is not None and correction.sequence_cap is not None:
        yield "rollout_correction.sequence_cap", "is given together with token_cap; use one of them"
    for key in ("token_range", "geometric_range"):
        limits = getattr(correction, key)
        if limits is not None and not 0 <= limits[0] < limits[1]:
            yield f"rollout_correction.{key}", f"is {list(limits)}, must be [low, high] with 0 <= low < high"
    capped = next((key for key in ("token_cap", "sequence_cap") if getattr(correction, key) is not None), None)
    if capped and "ratio" in plan.loss_traits and not correction.decoupled:
        yield f"rollout_correction.{capped}", f"weighs by a ratio that {name} has already; set decoupled: true"
    if "mean" in plan.loss_traits and correction != RolloutCorrectionConfig():
        yield "rollout_correction", f"weighs tokens, and {name} is one number for all; use a loss of trinity.plugins"
    if (plan.offline or plan.of_pairs) and correction != RolloutCorrectionConfig():
        what = f"which {name} does not compare with" if plan.of_pairs else "and nothing sampled a dataset; remove it"
        yield "rollout_correction", f"corrects for the policy that sampled, {what}"
    elif "sequences" in plan.loss_traits and (
        correction.token_range is not None or (correction.token_cap is not None and "geometric" not in plan.loss_traits)
    ):
        yield "rollout_correction", f"is of tokens, and {name} has one loss for a sequence; use those of sequences"
