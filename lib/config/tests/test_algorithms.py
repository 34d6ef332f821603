"""Every algorithm by its name: its parts, and the problems of a choice of parts and arguments."""

from typing import Any

import pytest

from trinity.config import Config, ConfigError, make_plan
from trinity.config.advice import algorithm_advice
from trinity.config.algorithms import PARTS, AlgorithmPlan, resolve
from trinity.config.load import parse
from trinity.config.schema.algorithm import AlgorithmConfig
from trinity.plugins.declarations import ALGORITHMS

pytestmark = pytest.mark.core

# algorithm_type of Trinity-RFT -> advantage, policy loss, KL term, entropy term
TABLE = {
    "sft": (None, "sft", "none", "none"),
    "ppo": ("ppo", "ppo", "k2", "default"),
    "grpo": ("grpo", "ppo", "k2", "default"),
    "grpo_verl": ("grpo", "ppo", "k2", "default"),
    "dapo": ("grpo", "ppo", "none", "default"),
    "reinforceplusplus": ("reinforceplusplus", "ppo", "k2", "default"),
    "rloo": ("rloo", "ppo", "k2", "default"),
    "opmd": ("opmd", "opmd", "k2", "default"),
    "asymre": ("asymre", "opmd", "none", "none"),
    "dpo": (None, "dpo", "k2", "default"),
    "topr": ("reinforce", "topr", "k2", "default"),
    "cispo": ("grpo", "cispo", "k2", "default"),
    "gspo": ("grpo", "gspo", "k2", "default"),
    "sapo": ("grpo", "sapo", "k2", "default"),
    "mix": ("grpo", "mix", "k2", "mix"),
    "mix_chord": ("grpo", "mix_chord", "k2", "mix"),
    "raft": (None, "sft", "none", "none"),
    "sppo": ("opmd", "sppo", "none", "none"),
    "rec": ("rec", "rec", "k2", "default"),
    "multi_step_grpo": ("step_wise_grpo", "ppo", "k2", "default"),
    "gigpo": ("gigpo", "ppo", "k2", "default"),
    "tree": ("tree", "ppo", "k2", "default"),
    "on_policy_distill": ("on_policy_distill", "ppo", "none", "none"),
    "jsd": ("jsd", "ppo", "none", "none"),
    "top_k_distill": (None, "top_k_distill", "none", "none"),
    "opmd_reweight_adv": ("opmd_reweight_adv", "opmd", "k2", "default"),
}


def plan_of(**algorithm: Any) -> AlgorithmPlan:
    return resolve(AlgorithmConfig.model_validate({"repeat_times": 4, **algorithm}))


@pytest.mark.parametrize("name", TABLE)
def test_the_parts_of_an_algorithm(name: str) -> None:
    plan = plan_of(algorithm_type=name)
    found = (plan.advantage.name if plan.advantage else None, plan.policy_loss.name, plan.kl_loss.name)
    assert (*found, plan.entropy_loss.name) == TABLE[name]
    assert plan.kl_penalty.name == "none"
    assert plan.needs_reference == (plan.kl_loss.name != "none")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_made_of_registered_parts(name: str) -> None:
    chosen = ALGORITHMS[name]
    for key, registry, attribute in PARTS:
        part = getattr(chosen, attribute)
        assert part is None or part in registry
        given = chosen.args.get(key, {})
        for argument, value in {**(registry[part].defaults if part else {}), **given}.items():
            assert not registry[part].args[argument].problem(value)


def test_arguments_are_merged_over_those_of_the_algorithm_and_of_the_part() -> None:
    assert plan_of(algorithm_type="dapo").policy_loss.args["clip_range_high"] == 0.28
    dapo = plan_of(algorithm_type="dapo", policy_loss_fn_args={"clip_ratio_c": 10})
    assert (dapo.policy_loss.args["clip_range_high"], dapo.policy_loss.args["clip_ratio_c"]) == (0.28, 10)
    both = plan_of(algorithm_type="dapo", policy_loss_fn_args={"clip_range": 0.3}).policy_loss.args
    assert (both["clip_range"], both["clip_range_low"], both["clip_range_high"]) == (0.3, None, None)
    assert plan_of(algorithm_type="dr_grpo").advantage.args["std_cal_level"] == "none"  # type: ignore[union-attr]
    other = plan_of(algorithm_type="dr_grpo", advantage_fn="step_wise_grpo").advantage
    assert other is not None
    assert other.args["std_cal_level"] == "group", "not the algorithm's own part"


@pytest.mark.parametrize(
    ("algorithm", "mode"),
    [
        ({"algorithm_type": "grpo"}, "token-mean"),
        ({"algorithm_type": "gspo"}, "seq-mean-token-mean"),
        ({"algorithm_type": "gspo", "loss_agg_mode": "token-mean"}, "token-mean"),
        ({"algorithm_type": "dr_grpo"}, "seq-mean-token-sum-norm"),
        ({"policy_loss_fn_args": {"loss_agg_mode": "seq-mean-token-sum"}}, "seq-mean-token-sum"),
        ({"algorithm_type": "opmd_kimi"}, "seq-mean-token-sum"),
    ],
)
def test_the_aggregation_is_the_algorithms_key_or_the_losses_own(algorithm: dict[str, Any], mode: str) -> None:
    plan = plan_of(**algorithm)
    assert plan.loss_aggregation == mode
    assert "loss_agg_mode" not in plan.policy_loss.args


def parsed(algorithm: str, repeat_times: int = 4, more: str = "") -> Config:
    text = "model: {model_path: m, max_prompt_tokens: 16, max_response_tokens: 16}\n"
    text += f"algorithm: {{repeat_times: {repeat_times}, {algorithm}}}\n"
    text += "buffer: {batch_size: 8, total_steps: 2, explorer_input: {taskset: {path: d.jsonl}}}\n"
    return parse(text + more)


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ("algorithm_type: GRPO", "algorithm_type: is 'GRPO', which is not registered; did you mean 'grpo'"),
        ("algorithm_type: gppo", "algorithm_type: is 'gppo', which is not registered; did you mean 'ppo'"),
        ("advantage_fn: rlo", "algorithm.advantage_fn: is 'rlo', which is not registered; did you mean 'rloo'"),
        (
            "policy_loss_fn: cipso",
            "algorithm.policy_loss_fn: is 'cipso', which is not registered; did you mean 'cispo'",
        ),
        ("kl_penalty_fn: kl3", "algorithm.kl_penalty_fn: is 'kl3', which is not registered; did you mean 'k3'"),
        ("policy_loss_fn_args: {clip_rang: 0.1}", "ppo has no such argument; did you mean 'clip_range'"),
        ("algorithm_type: cispo, policy_loss_fn_args: {clip_range: 0.1}", "cispo has no such argument"),
        ("algorithm_type: rloo, advantage_fn_args: {epsilon: 0.1}", "rloo has no such argument"),
        ("advantage_fn_args: {epsilon: small}", "advantage_fn_args.epsilon: is 'small', must be a number"),
        ("advantage_fn_args: {std_cal_level: task}", "is 'task', must be one of group, batch, none"),
        ("advantage_fn_args: {duplicate_experiences: 1}", "is 1, must be true or false"),
        ("advantage_fn: rec, advantage_fn_args: {drop: all}", "is 'all', must be one of null, balance"),
        ("advantage_fn: gigpo, advantage_fn_args: {step_reward_key: 3}", "is 3, must be text"),
        ("policy_loss_fn_args: {clip_ratio_c: 0.5}", "is 0.5, must be at least 1"),
        ("policy_loss_fn_args: {clip_range: null}", "clip_range_low: is null, and so is clip_range; give one of them"),
        ("algorithm_type: gspo, policy_loss_fn_args: {clip_range_high: null}", "clip_range_high: is null, and so is"),
        ("kl_loss_fn_args: {kl_coef: -1}", "is -1, must be at least 0"),
        ("advantage_fn: ppo, advantage_fn_args: {lam: 1.5}", "is 1.5, must be in [0, 1]"),
        ("kl_loss_fn_args: {adaptive: true}", "kl_loss_fn_args.adaptive: is true, which needs target_kl and horizon"),
        ("algorithm_type: m2po, loss_agg_mode: seq-mean-token-mean", "m2po takes token-mean"),
        ("algorithm_type: opmd_pairwise, policy_loss_fn_args: {tau: 0}", "is 0, must be above 0"),
        ("algorithm_type: opmd, rollout_correction: {token_cap: 2, sequence_cap: 2}", "given together with token_cap"),
        ("rollout_correction: {token_cap: 2}", "weighs by a ratio that ppo has already; set decoupled: true"),
        ("algorithm_type: opmd_kimi, rollout_correction: {token_range: [0.5, 2]}", "one loss for a sequence"),
        ("algorithm_type: dpo, rollout_correction: {decoupled: true}", "which dpo does not compare with"),
        (
            "algorithm_type: opmd_pairwise, loss_agg_mode: seq-mean-token-mean",
            "loss_agg_mode: is 'seq-mean-token-mean'; opmd_pairwise takes token-mean or seq-mean-token-sum or seq-",
        ),
        ("algorithm_type: opmd_pairwise, policy_loss_fn_args: {loss_agg_mode: seq-mean-token-mean}", "must be one of"),
        (
            "algorithm_type: opmd_pairwise, rollout_correction: {sequence_cap: 2}",
            "rollout_correction.sequence_cap: weighs sequences, and opmd_pairwise compares those of the same weight",
        ),
        ("algorithm_type: opmd_pairwise, rollout_correction: {geometric_range: [0.5, 2]}", "geometric_range: weighs"),
        ("algorithm_type: raft, kl_penalty_fn: k2", "kl_penalty_fn: is 'k2', but sft reads no reward; remove it, or"),
        ("algorithm_type: dpo, kl_penalty_fn: k1", "kl_penalty_fn: is 'k1', but dpo reads no reward"),
        ("algorithm_type: grpo, advantage_fn: jsd, kl_penalty_fn: k3", "is 'k3', but jsd reads no reward"),
        ("algorithm_type: sft, rollout_correction: {token_cap: 2}", "and nothing sampled a dataset; remove it"),
        ("rollout_correction: {token_caps: 2}", "did you mean 'token_cap'"),
        ("rollout_correction: {token_range: [2, 0.5]}", "must be [low, high] with 0 <= low < high"),
    ],
)
def test_a_wrong_choice_is_said(algorithm: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parsed(algorithm)
    assert said in str(refused.value)


@pytest.mark.parametrize("name", ["dpo", "opmd_pairwise", "remax"])
def test_what_compares_the_rollouts_of_a_task_needs_two(name: str) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.repeat_times: is 1; .* 2"):
        parsed(f"algorithm_type: {name}", repeat_times=1)


@pytest.mark.parametrize(
    "algorithm",
    [
        "advantage_fn_args: {epsilon: 1e-6, std_threshold: null}",
        "kl_penalty_fn: low_var_kl, kl_penalty_fn_args: {adaptive: true, target_kl: 0.1, horizon: 1000}",
        "algorithm_type: opmd, rollout_correction: {token_cap: 2}",
        "algorithm_type: grpo, policy_loss_fn: gmpo, rollout_correction: {decoupled: true, token_cap: 2}",
        "rollout_correction: {decoupled: true, token_cap: 5, token_range: [0.5, 5]}",
        "rollout_correction: {geometric_range: [0.99, 1.01]}",
        "entropy_loss_fn: basic, entropy_loss_fn_args: {entropy_coef: 0.01}",
        "algorithm_type: opmd_pairwise, loss_agg_mode: seq-mean-token-sum-norm",
        "algorithm_type: opmd_kimi, rollout_correction: {sequence_cap: 2}",
        "algorithm_type: dpo, loss_agg_mode: token-mean",
        "algorithm_type: raft, kl_penalty_fn: none",
        "algorithm_type: raft, kl_penalty_fn: k2, kl_penalty_fn_args: {kl_coef: 0}",
    ],
)
def test_a_good_choice_is_taken(algorithm: str) -> None:
    assert parsed(algorithm).algorithm


SEVERAL, STALE = "trainer: {mini_batch_size: 8}\n", "synchronizer: {sync_offset: 1}\n"


@pytest.mark.parametrize(
    ("algorithm", "more", "said"),
    [
        ("algorithm_type: grpo", SEVERAL + STALE, True),
        ("algorithm_type: grpo", "trainer: {epochs_per_batch: 2}\nsynchronizer: {sync_interval: 2}\n", True),
        ("algorithm_type: grpo", SEVERAL, False),
        ("algorithm_type: grpo", STALE, False),
        ("algorithm_type: grpo", "trainer: {mini_batch_size: 32}\n" + STALE, False),
        ("algorithm_type: opmd", SEVERAL + STALE, False),
        ("rollout_correction: {decoupled: true, token_cap: 2}", SEVERAL + STALE, False),
        ("rollout_correction: {decoupled: false}", SEVERAL + STALE, False),
    ],
)
def test_tokens_of_older_weights_that_nothing_weighs_are_said(algorithm: str, more: str, said: bool) -> None:
    found = [sentence for sentence in algorithm_advice(parsed(algorithm, more=more)) if "token_cap" in sentence]
    assert len(found) == said
    assert all(
        sentence.startswith("algorithm.rollout_correction.token_cap: is null; with several") for sentence in found
    )


def test_the_size_of_a_teachers_tokens_in_the_log_is_said() -> None:
    algorithm = {"algorithm_type": "top_k_distill", "policy_loss_fn_args": {"top_k": 64}}
    (sentence,) = algorithm_advice(Config.model_validate({"algorithm": algorithm}))
    assert sentence == "algorithm.policy_loss_fn_args.top_k: is 64, which takes 512 bytes of the log a response token"


def test_what_an_aggregation_does_not_reach_is_said() -> None:
    (sentence,) = algorithm_advice(parsed("algorithm_type: dpo, loss_agg_mode: token-mean"))
    assert sentence == ("algorithm.loss_agg_mode: only affects the KL and entropy terms; dpo is a mean over pairs")
    assert not list(algorithm_advice(parsed("algorithm_type: grpo, loss_agg_mode: token-mean")))
    unchecked = Config.model_validate({"algorithm": {"algorithm_type": "gppo"}})
    assert not list(algorithm_advice(unchecked))


def test_what_dr_grpo_divides_by_is_the_longest_response_of_the_run() -> None:
    assert make_plan(parsed("algorithm_type: dr_grpo")).algorithm.max_response_tokens == 16


@pytest.mark.parametrize(
    ("algorithm", "arguments", "cap", "decoupled"),
    [
        ("algorithm_type: grpo", "{quantization: fp8}", 2.0, True),
        ("algorithm_type: grpo", "{kv_cache_dtype: fp8}", 2.0, True),
        ("algorithm_type: grpo", "{kv_cache_dtype: bfloat16}", None, None),
        ("algorithm_type: grpo, rollout_correction: {decoupled: false}", "{quantization: fp8}", None, False),
        ("algorithm_type: opmd", "{quantization: fp8}", 2.0, None),
        ("algorithm_type: opmd_kimi", "{quantization: fp8}", None, None),
    ],
)
def test_engines_that_quantize_are_corrected_for_unless_the_yaml_says_how(
    algorithm: str, arguments: str, cap: float | None, decoupled: bool | None
) -> None:
    config = parsed(algorithm, more=f"explorer: {{rollout_model: {{engine_args: {arguments}}}}}")
    correction = make_plan(config).algorithm.correction
    assert (correction.token_cap, correction.decoupled) == (cap, decoupled)
