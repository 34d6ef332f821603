"""veRL's rollout_correction, as Trinity-RFT's YAMLs have it, reaches the keys that mean the same."""

import json
from typing import Any

import pytest

from trinity.config import Config, ConfigError
from trinity.config.algorithms import resolve
from trinity.config.load import parse

pytestmark = pytest.mark.core


def run_with(**algorithm: Any) -> Config:
    return parse(
        json.dumps(
            {
                "model": {"model_path": "m", "max_model_len": 64},
                "algorithm": {"algorithm_type": "grpo", "repeat_times": 4, **algorithm},
                "buffer": {"batch_size": 8, "explorer_input": {"taskset": {"path": "d.jsonl"}}},
            }
        )
    )


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"bypass_mode": True}, {"decoupled": False}),
    ({"bypass_mode": False}, {"decoupled": True}),
    ({"rollout_is": None, "rollout_is_threshold": 3.0}, {}),
    ({"rollout_is": "token", "rollout_is_threshold": 3.0}, {"decoupled": True, "token_cap": 3.0}),
    ({"rollout_is": "sequence", "loss_type": "ppo_clip"}, {"decoupled": True, "sequence_cap": 2.0}),
    ({"bypass_mode": True, "rollout_is": "token"}, {"decoupled": False}),
    ({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.2_4"}, {"decoupled": True, "token_range": (0.25, 5.0)}),
    ({"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 2}, {"decoupled": True, "geometric_range": (0.5, 2.0)}),
    (
        {"rollout_rs": "token_k1, seq_mean_k1", "rollout_rs_threshold": "0.5_4,0.8_1.25", "rollout_is": "token"},
        {"decoupled": True, "token_range": (0.25, 2.0), "geometric_range": (0.8, 1.25), "token_cap": 2.0},
    ),
]


@pytest.mark.parametrize(("theirs", "ours"), CASES)
def test_it_means_what_it_means_there(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    config = run_with(rollout_correction=theirs)
    assert config.algorithm.rollout_correction.model_dump(exclude_none=True) == ours
    assert {notice.partition(":")[0] for notice in config.notices} >= {
        f"algorithm.rollout_correction.{key}" for key in theirs
    }


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"bypass_mode": "x"}, "rollout_correction.bypass_mode: is 'x': must be true or false"),
        ({"rollout_is": "geometric"}, "rollout_is: is 'geometric': must be one of token, sequence, or null"),
        ({"rollout_is": "token", "rollout_is_threshold": 0}, "rollout_is_threshold: is 0: must be a number above 0"),
        ({"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": 2}, "seq_sum_k1 is not there"),
        ({"rollout_rs": "token_k1"}, "rollout_rs_threshold: is None: must be lower_upper"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "4_2"}, "is '4_2': must be lower_upper"),
        ({"rollout_is_batch_normalize": True}, "weights are not normalized"),
        ({"rollout_token_veto_threshold": 1e-4}, "leaves out tokens, and not their sequences"),
        ({"loss_type": "reinforce"}, "policy_loss_fn: opmd with tau: 0, and a cap"),
        (
            {"bypass_mode": True, "decoupled": True},
            "decoupled: is True, but keys of veRL in this section",
        ),
    ],
)
def test_what_is_not_there_is_refused_with_its_reason(theirs: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        run_with(rollout_correction=theirs)
    assert said in str(refused.value)


def test_bypass_old_logprobs_says_the_same() -> None:
    assert run_with(bypass_old_logprobs=True).algorithm.rollout_correction.decoupled is False
    config = run_with(bypass_old_logprobs=False, rollout_correction={"rollout_is": "token"})
    assert config.algorithm.rollout_correction.model_dump(exclude_none=True) == {"decoupled": True, "token_cap": 2.0}
    with pytest.raises(ConfigError, match=r"bypass_old_logprobs: is True, but .*bypass_mode is False"):
        run_with(bypass_old_logprobs=True, rollout_correction={"bypass_mode": False})


@pytest.mark.parametrize(
    "args",
    [
        {"policy_loss_fn_args": {"delta": 0.2, "enable_sequence_masking": True}},
        {"policy_loss_fn_args": {"delta_sequence_masking": 0.2, "fallback_to_policy_gradient": True}},
        {"algorithm_type": "cispo", "policy_loss_fn_args": {"enable_mask_clip": True, "mask_clip_range_high": 0.3}},
        {"algorithm_type": "gspo", "policy_loss_fn_args": {"clip_range": 0.1}},
        {"policy_loss_fn_args": {"clip_range": None, "clip_range_low": 0.2, "clip_range_high": 0.28}},
        {"policy_loss_fn": "sft", "advantage_fn": "grpo", "policy_loss_fn_args": {"loss_agg_mode": "token-mean"}},
        {"enable_router_replay": False},
        {"enable_router_replay": True},
    ],
)
def test_arguments_of_trinity_rft_are_taken(args: dict[str, Any]) -> None:
    run_with(**args)


def test_arguments_of_its_jsd_are_taken() -> None:
    with pytest.raises(ConfigError, match="asks no teacher") as refused:
        run_with(algorithm_type="jsd", advantage_fn_args={"temperature": 2.0, "chunk_size": 512})
    assert len(refused.value.problems) == 1


def test_what_stands_for_both_bounds_does_so_in_gspo_too() -> None:
    plan = resolve(run_with(algorithm_type="gspo", policy_loss_fn_args={"clip_range": 0.1}).algorithm)
    assert plan.policy_loss.args == {"clip_range": 0.1, "clip_range_low": None, "clip_range_high": None}


def test_verls_key_of_replayed_routes_names_trinitys() -> None:
    wrong = {"trainer": {"trainer_config": {"actor_rollout_ref": {"actor": {"router_replay": {"mode": "R3"}}}}}}
    with pytest.raises(ConfigError, match=r"algorithm\.enable_router_replay replays the engine's routes"):
        parse(json.dumps({"model": {"model_path": "m", "max_model_len": 64}, **wrong}))
