"""Experience operators against cases worked out by hand, and what a run is told of them."""

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.experience import make_task
from trinity import plugins
from trinity.buffer.operators import OPERATORS, Draft, known_args
from trinity.buffer.operators.pipeline import Pipeline, Processed
from trinity.buffer.operators.shaping import OPERATIONS
from trinity.config import names
from trinity.config.schema.pipeline import OperatorConfig
from trinity.runtime.errors import InvalidInput
from trinity.runtime.experience import Experience, Group, SamplingParams, Truncation, VersionSpan

PLACE = "data_processor.experience_pipeline.operators"
KEY = "experience_pipeline"


def experience(reward: float = 0.0, rollout: int = 0, step: int = 0, response: int = 4, **more: Any) -> Experience:
    prompt = more.pop("prompt", 3)
    return Experience(
        rollout=rollout,
        step=step,
        token_ids=np.arange(prompt + response, dtype=np.int32),
        prompt_length=prompt,
        logprobs=np.zeros(response, dtype=np.float32),
        action_mask=np.ones(response, dtype=bool),
        reward=reward,
        version_spans=(VersionSpan(0, 0, response),),
        **more,
    )


def group_of(*experiences: Experience, **task: Any) -> Group:
    return Group(make_task(**task), 1, "tester", experiences, 0.0, 1.0)


def rewarded(*rewards: float, **more: Any) -> Group:
    """A group with one experience for each rollout."""
    return group_of(*(experience(reward, rollout, **more) for rollout, reward in enumerate(rewards)))


def stepwise(*rollouts: Sequence[float]) -> Group:
    """A group with the rewards of each rollout's steps."""
    return group_of(*(experience(r, i, step) for i, rewards in enumerate(rollouts) for step, r in enumerate(rewards)))


def pipeline(*operators: str | tuple[str, dict[str, Any]]) -> Pipeline:
    pairs = [(one, {}) if isinstance(one, str) else one for one in operators]
    return Pipeline([OperatorConfig(name=name, args=args) for name, args in pairs])


def run(group: Group, name: str, **args: Any) -> Processed:
    return pipeline((name, args)).run(group)


def kept(done: Processed) -> list[int]:
    return [draft.index for draft in done.drafts]


# Filters by reward


@pytest.mark.parametrize(
    ("threshold", "left"), [(0, [1, 2, 3]), (0.5, [2, 3]), (1.0, [3]), (-0.5, [0, 1, 2, 3]), (1.01, [])]
)
def test_reward_filter_keeps_what_is_at_the_threshold(threshold: float, left: list[int]) -> None:
    done = run(rewarded(-0.5, 0.0, 0.5, 1.0), "reward_filter", threshold=threshold)
    assert kept(done) == left
    assert [draft.index for draft in done.dropped] == [index for index in range(4) if index not in left]
    assert {draft.dropped_by for draft in done.dropped} <= {"reward_filter"}
    assert done.dropped_by == ("" if left else "reward_filter")


@pytest.mark.parametrize(
    ("rewards", "threshold", "stays"),
    [
        ([0.1] * 7, 0, False),  # equal numbers deviate by exactly 0, also those that no float has
        ([0, 1], 0, True),
        ([0, 1], 0.5, False),
        ([0, 1], 0.49, True),
        ([1, 2, 3, 4], math.sqrt(1.25) + 1e-9, False),
        ([1, 2, 3, 4], math.sqrt(1.25) - 1e-9, True),
        ([5], 0, False),
    ],
)
def test_reward_std_filter_drops_groups_by_population_deviation(
    rewards: list[float], threshold: float, stays: bool
) -> None:
    done = run(rewarded(*rewards), "reward_std_filter", threshold=threshold)
    assert kept(done) == (list(range(len(rewards))) if stays else [])
    assert done.metrics[f"{KEY}/reward_std_filter/reward_std"] == pytest.approx(statistics.pstdev(rewards))


def test_deviation_is_between_rollouts_and_not_between_steps() -> None:
    assert not kept(run(stepwise([0, 1], [0.5, 0.2, 1]), "reward_std_filter"))  # both end with 1
    assert kept(run(stepwise([1, 1], [1, 0]), "reward_std_filter")) == [0, 1, 2, 3]


def test_invalid_reward_filter_drops_what_is_not_a_number_before_anybody_stumbles() -> None:
    given_group = rewarded(1.0, math.nan, math.inf, -math.inf, 0.0)
    assert kept(run(given_group, "invalid_reward_filter")) == [0, 4]
    group = group_of(
        experience(metrics={"accuracy": 1.0}), experience(metrics={"accuracy": math.nan}), experience(metrics={})
    )
    assert kept(run(group, "invalid_reward_filter")) == [0, 1, 2]
    assert kept(run(group, "invalid_reward_filter", required_metrics=["accuracy"])) == [0]


@pytest.mark.parametrize(
    ("rewards", "threshold", "rate"),
    [([0, 0.1, 1, -1], None, 0.5), ([0, 0.1, 1, -1], 0, 0.75), ([0, 0.1, 1, -1], 1, 0.25), ([0.5], 0.6, 0)],
)
def test_pass_rate_counts_what_is_above_zero_or_at_the_threshold(
    rewards: list[float], threshold: float | None, rate: float
) -> None:
    done = run(rewarded(*rewards), "pass_rate_calculator", threshold=threshold)
    assert done.metrics == {f"{KEY}/pass_rate_calculator/{name}": rate for name in ("pass_rate", "sums/pass_rate")}
    assert done.is_unchanged


def test_pass_rates_are_means_over_groups_by_taskset() -> None:
    calculator = pipeline("pass_rate_calculator")
    for taskset, reward in (("easy", 1.0), ("easy", 0.0), ("hard", 0.0)):
        calculator.run(group_of(experience(reward), taskset=taskset))
    found = calculator.metrics()
    assert found[f"{KEY}/pass_rate_calculator/pass_rate/mean"] == pytest.approx(1 / 3)
    assert found[f"{KEY}/pass_rate_calculator/easy/pass_rate/mean"] == 0.5
    assert found[f"{KEY}/pass_rate_calculator/hard/pass_rate/mean"] == 0


# Shaping


@pytest.mark.parametrize(("operation", "reward"), [("ADD", 5.0), ("SUB", -1.0), ("MUL", 6.0), ("DIV", 2 / 3)])
def test_reward_is_shaped_by_a_weighted_metric(operation: str, reward: float) -> None:
    config = {"stats_key": "quality", "op_type": operation, "weight": 0.5}
    done = run(rewarded(2.0, metrics={"quality": 6.0}), "reward_shaping_mapper", reward_shaping_configs=[config])
    assert done.drafts[0].reward == pytest.approx(reward)
    assert done.drafts[0].experience.reward == 2.0
    assert not done.is_unchanged


def test_shaping_goes_in_the_order_of_its_configs() -> None:
    configs = [{"stats_key": "a"}, {"stats_key": "b", "op_type": "MUL", "weight": 2}]
    done = run(rewarded(1.0, metrics={"a": 3.0, "b": 5.0}), "reward_shaping_mapper", reward_shaping_configs=configs)
    assert done.drafts[0].reward == (1 + 3) * 10


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"accuracy": 1.0}, "metrics.quality: is missing in experience 0, which has: accuracy"),
        ({}, "metrics.quality: is missing in experience 0, which has: none"),
        ({"quality": 0.0}, "metrics.quality: is 0 in experience 0; the reward cannot be divided"),
        ({"quality": math.nan}, "draft 0: the reward becomes nan, must be finite"),
        ({"quality": 1e-308}, "draft 0: the reward becomes inf, must be finite"),
    ],
)
def test_a_metric_that_cannot_shape_is_named(metrics: dict[str, float], said: str) -> None:
    config = {"stats_key": "quality", "op_type": "DIV"}
    with pytest.raises(InvalidInput) as refused:
        run(rewarded(9.0, metrics=metrics), "reward_shaping_mapper", reward_shaping_configs=[config])
    assert str(refused.value) == f"{PLACE}.0: reward_shaping_mapper fails for sums/0/1: {said}"


# DAPO


@pytest.mark.parametrize(
    ("accuracy", "stays"),
    [([0, 1], True), ([1, 1], False), ([0, 0, 0], False), ([0, 0, 1], True), ([1], False), ([0], False)],
)
def test_dynamic_sampling_keeps_groups_that_are_neither_all_right_nor_all_wrong(
    accuracy: list[float], stays: bool
) -> None:
    shaped = [experience(-0.3 * i, i, metrics={"accuracy": value}) for i, value in enumerate(accuracy)]
    done = run(group_of(*shaped), "dapo_dynamic_sampling_filter")
    assert bool(done.drafts) is stays
    assert done.dropped_by == ("" if stays else "dapo_dynamic_sampling_filter")


def test_dynamic_sampling_looks_at_the_metric_and_its_threshold() -> None:
    group = group_of(*(experience(1.0, i, metrics={"score": score}) for i, score in enumerate([0.2, 0.6])))
    assert run(group, "dapo_dynamic_sampling_filter", metric_key="score", correct_threshold=0.5).drafts
    assert not run(group, "dapo_dynamic_sampling_filter", metric_key="score", correct_threshold=0.1).drafts
    assert not run(group, "dapo_dynamic_sampling_filter").drafts  # without the metric: both rewards are > 0


def test_dynamic_sampling_takes_the_stored_reward_where_no_rollout_has_the_metric() -> None:
    group = rewarded(0.0, 1.0, metrics={"shape": 5.0})
    done = pipeline(
        ("reward_shaping_mapper", {"reward_shaping_configs": [{"stats_key": "shape"}]}), "dapo_dynamic_sampling_filter"
    ).run(group)
    assert [draft.reward for draft in done.drafts] == [5.0, 6.0]
    mixed = group_of(experience(0.0, 0), experience(1.0, 1, metrics={"accuracy": 1.0}))
    with pytest.raises(InvalidInput, match=r"metrics\.accuracy: is in 1 of the group's 2 rollouts only"):
        run(mixed, "dapo_dynamic_sampling_filter")


def test_dynamic_sampling_says_which_share_was_too_easy_and_too_hard() -> None:
    sampler = pipeline("DAPODynamicSamplingFilter")
    for rewards in ([1, 1], [1, 1], [0, 0], [0, 1]):
        sampler.run(rewarded(*rewards))
    found = sampler.metrics()
    assert found[f"{KEY}/DAPODynamicSamplingFilter/all_right/mean"] == 0.5
    assert found[f"{KEY}/DAPODynamicSamplingFilter/all_wrong/mean"] == 0.25
    assert found[f"{KEY}/DAPODynamicSamplingFilter/dropped_groups"] == 3


def test_a_truncated_response_is_masked_and_its_reward_stays() -> None:
    cuts = (Truncation.NONE, Truncation.RESPONSE, Truncation.PROMPT)
    group = group_of(*(experience(1.0, i, truncation=cut) for i, cut in enumerate(cuts)))
    done = run(group, "mask_response_truncated")
    assert [(draft.masked, draft.reward) for draft in done.drafts] == [(False, 1.0), (True, 1.0), (False, 1.0)]


@pytest.mark.parametrize(
    ("length", "penalty"), [(60, 0.0), (80, 0.0), (81, 0.05), (90, 0.5), (100, 1.0), (101, 1.0), (250, 1.0)]
)
def test_overlong_responses_are_punished_softly_up_to_the_limit(length: int, penalty: float) -> None:
    args = {"max_response_length": 100, "cache_length": 20, "penalty_factor": 2.0}
    done = run(rewarded(1.0, response=length), "overlong_reward_shaping", **args)
    assert done.drafts[0].reward == pytest.approx(1 - 2 * penalty)
    task_limit = SamplingParams(max_tokens=100)  # and a fifth of it
    done = run(group_of(experience(1.0, response=length), sampling=task_limit), "overlong_reward_shaping")
    assert done.drafts[0].reward == pytest.approx(1 - penalty)


# Several steps


def test_padding_gives_every_rollout_as_many_experiences_as_the_longest() -> None:
    done = run(stepwise([0, 0, 1], [0.5], [0, 0.2]), "multi_step_padding")
    found = [(d.index, d.experience.rollout, d.experience.step, d.reward, d.masked) for d in done.drafts]
    assert found == [
        (0, 0, 0, 0, False), (1, 0, 1, 0, False), (2, 0, 2, 1, False),
        (3, 1, 0, 0.5, False), (3, 1, 0, 0.5, True), (3, 1, 0, 0.5, True),
        (4, 2, 0, 0, False), (5, 2, 1, 0.2, False), (5, 2, 1, 0.2, True),
    ]  # fmt: skip
    assert not done.dropped


def test_padding_up_to_a_given_number_leaves_longer_rollouts() -> None:
    done = run(stepwise([0, 0, 1], [0.5]), "multi_step_padding", max_steps=2)
    assert kept(done) == [0, 1, 2, 3, 3]
    assert run(stepwise([1], [2]), "multi_step_padding").is_unchanged


def test_what_padding_repeats_counts_as_repeated_alone() -> None:
    padded = pipeline("multi_step_padding", ("reward_filter", {"threshold": 0.6}))
    done = padded.run(stepwise([1, 1, 1], [0.5]))
    assert kept(done) == [0, 1, 2]
    assert [draft.index for draft in done.dropped] == [3, 3, 3]
    found = padded.metrics()
    assert found[f"{KEY}/multi_step_padding/repeated_experiences"] == 2
    assert found[f"{KEY}/multi_step_padding/masked_experiences"] == 0
    assert found[f"{KEY}/reward_filter/repeated_experiences"] == 0
    assert found[f"{KEY}/reward_filter/dropped_experiences"] == 1
    assert found[f"{KEY}/reward_filter/response_tokens_kept/mean"] == 4


def test_padding_makes_a_mean_over_experiences_one_over_rollouts() -> None:
    done = run(stepwise([1, 1, 1], [0]), "multi_step_padding")
    assert statistics.fmean(draft.reward for draft in done.drafts) == 0.5


# What RAFT and OPMD learn from


@pytest.mark.parametrize(
    ("args", "left"),
    [
        ({}, [1]),
        ({"k": 2}, [1, 3]),
        ({"k": 9}, [0, 1, 3]),
        ({"k": 9, "threshold": 0.5}, [1, 3]),
        ({"threshold": 1}, []),
    ],
)
def test_raft_keeps_the_best_rollouts_above_the_threshold(args: dict[str, Any], left: list[int]) -> None:
    assert kept(run(rewarded(0.5, 1.0, 0.0, 1.0), "raft_filter", **args)) == left


def test_raft_keeps_whole_rollouts() -> None:
    assert kept(run(stepwise([1, 0], [0, 0, 0.5], [0.1]), "RAFT_filter")) == [2, 3, 4]


def test_opmd_drops_placeholders_and_learns_from_equal_rewards() -> None:
    infos = ["", '{"valid": true}', '{"valid": false}', "[]"]
    group = group_of(
        *(experience(0.0, i, info_json=info) for i, info in enumerate(infos)),
        experience(0.0, 4, prompt=2),
        experience(math.nan, 5),
    )
    assert kept(run(group, "opmd_filter")) == [0, 1, 3]
    assert kept(run(group, "OPMD_filter", min_prompt_length=2)) == [0, 1, 3, 4]


# Properties

REWARDS = st.lists(st.floats(-10, 10, allow_nan=False), min_size=1, max_size=8)


@given(rewards=REWARDS, threshold=st.floats(-10, 10))
def test_filters_partition_the_group_and_change_nothing_else(rewards: list[float], threshold: float) -> None:
    group = rewarded(*rewards)
    for name in ("reward_filter", "reward_std_filter", "raft_filter"):
        done = run(group, name, threshold=threshold)
        assert sorted([*kept(done), *(draft.index for draft in done.dropped)]) == list(range(len(rewards)))
        assert all(d.reward == rewards[d.index] and not d.masked for d in (*done.drafts, *done.dropped))
        assert bool(done.dropped_by) is not bool(done.drafts)


@given(
    rewards=REWARDS, weight=st.floats(0.5, 2), metric=st.floats(0.5, 2), pair=st.sampled_from(["ADD SUB", "MUL DIV"])
)
def test_opposite_operations_undo_each_other(rewards: list[float], weight: float, metric: float, pair: str) -> None:
    configs = [{"stats_key": "m", "op_type": operation, "weight": weight} for operation in pair.split()]
    done = run(rewarded(*rewards, metrics={"m": metric}), "reward_shaping_mapper", reward_shaping_configs=configs)
    assert [draft.reward for draft in done.drafts] == pytest.approx(rewards)


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6), steps=st.integers(0, 8))
def test_padded_rollouts_are_equally_long_and_train_what_they_did(lengths: list[int], steps: int) -> None:
    group = stepwise(*([float(i)] * length for i, length in enumerate(lengths)))
    done = run(group, "multi_step_padding", max_steps=steps)
    wanted = steps or max(lengths)
    counts = [sum(draft.experience.rollout == i for draft in done.drafts) for i in range(len(lengths))]
    assert counts == [max(wanted, length) for length in lengths]
    assert [draft.index for draft in done.drafts if not draft.masked] == list(range(sum(lengths)))


@given(length=st.integers(0, 300), limit=st.integers(1, 200), factor=st.floats(0, 3), data=st.data())
def test_overlong_penalty_is_between_nothing_and_its_factor(length: int, limit: int, factor: float, data: Any) -> None:
    cache = data.draw(st.integers(1, limit))
    args = {"max_response_length": limit, "cache_length": cache, "penalty_factor": factor}
    reward = run(rewarded(0.0, response=length), "overlong_reward_shaping", **args).drafts[0].reward
    shape = min(1.0, max(0.0, (length - limit + cache) / cache))
    assert reward == pytest.approx(-factor * shape)
    assert -factor - 1e-9 <= reward <= 0


# The pipeline


def test_operators_see_what_the_ones_before_left_in() -> None:
    both = pipeline(("reward_filter", {"threshold": 0.5}), "reward_std_filter")
    done = both.run(rewarded(0.0, 1.0, 1.0))
    assert done.dropped_by == "reward_std_filter"
    assert [(draft.index, draft.dropped_by) for draft in done.dropped] == [
        (0, "reward_filter"), (1, "reward_std_filter"), (2, "reward_std_filter")
    ]  # fmt: skip
    done = pipeline("reward_std_filter", ("reward_filter", {"threshold": 0.5})).run(rewarded(0.0, 1.0, 1.0))
    assert kept(done) == [1, 2]


def test_none_at_all_leaves_everything() -> None:
    done = pipeline().run(rewarded(0.0, 1.0))
    assert (kept(done), done.metrics, done.is_unchanged) == ([0, 1], {}, True)
    assert pipeline().metrics() == {}


def test_a_bias_by_length_shows() -> None:
    chain = pipeline("mask_response_truncated", ("reward_filter", {"threshold": 0.5}))
    chain.run(
        group_of(
            experience(1.0, 0, response=10),
            experience(0.0, 1, response=100),
            experience(1.0, 2, response=64, truncation=Truncation.RESPONSE),
        )
    )
    chain.run(group_of(experience(0.0, response=300)))
    chain.run(group_of(experience(1.0, response=20)))
    assert chain.metrics() == {
        f"{KEY}/mask_response_truncated/dropped_groups": 0,
        f"{KEY}/mask_response_truncated/dropped_experiences": 0,
        f"{KEY}/mask_response_truncated/masked_experiences": 1,
        f"{KEY}/mask_response_truncated/changed_experiences": 0,
        f"{KEY}/mask_response_truncated/repeated_experiences": 0,
        f"{KEY}/mask_response_truncated/response_tokens_kept/mean": (10 + 100 + 300 + 20) / 4,
        f"{KEY}/mask_response_truncated/response_tokens_masked/mean": 64,
        f"{KEY}/reward_filter/dropped_groups": 1,
        f"{KEY}/reward_filter/dropped_experiences": 2,
        f"{KEY}/reward_filter/masked_experiences": 0,
        f"{KEY}/reward_filter/changed_experiences": 0,
        f"{KEY}/reward_filter/repeated_experiences": 0,
        f"{KEY}/reward_filter/response_tokens_kept/mean": (10 + 20) / 2,
        f"{KEY}/reward_filter/response_tokens_dropped/mean": (100 + 300) / 2,
    }


def test_metrics_are_of_the_interval_and_totals_go_on() -> None:
    chain = pipeline("reward_filter")
    for _ in range(2):
        chain.run(rewarded(-1.0, 1.0))
        assert chain.metrics()[f"{KEY}/reward_filter/dropped_experiences"] == 1
    assert chain.metrics() == {}
    assert chain.totals["reward_filter"].experiences == {"dropped": 2, "kept": 2}


def test_the_second_operator_of_a_name_is_counted_apart() -> None:
    twice = pipeline("reward_filter", ("reward_filter", {"threshold": 2}))
    assert twice.names == ("reward_filter", "reward_filter_2")
    assert twice.run(rewarded(1.0)).dropped_by == "reward_filter_2"


def test_changed_rewards_are_counted() -> None:
    chain = pipeline(("overlong_reward_shaping", {"max_response_length": 10}))
    chain.run(group_of(experience(1.0, 0, response=3), experience(1.0, 1, response=10)))
    found = chain.metrics()
    assert found[f"{KEY}/overlong_reward_shaping/changed_experiences"] == 1
    assert found[f"{KEY}/overlong_reward_shaping/penalty/mean"] == 0.5


# What the YAML may say


def test_lib_config_knows_every_operator_with_its_arguments() -> None:
    assert {name: known_args(name) for name in OPERATORS} == names.EXPERIENCE_OPERATORS
    assert set(OPERATIONS) == set(names.SHAPING_OPERATIONS)


CHECKED = "import sys, trinity.config.names\nassert not {'torch', 'numpy', 'trinity.buffer'} & {*sys.modules}"


def test_lib_config_stays_light() -> None:
    assert subprocess.run([sys.executable, "-c", CHECKED], timeout=60, check=False).returncode == 0


SHAPE = {"stats_key": "a"}
MISSHAPEN: list[Any] = [
    SHAPE,
    ["a"],
    [{}],
    [SHAPE, {**SHAPE, "op_type": "add"}],
    [{**SHAPE, "wieght": 1}],
    [{**SHAPE, "weight": "1"}],
    [{**SHAPE, "op_type": "DIV", "weight": 0}],
]


@pytest.mark.parametrize(
    ("name", "args", "key", "said"),
    [
        ("reward_fliter", {}, "name", "is 'reward_fliter', which is not registered; known: DAPODynamic"),
        ("reward_filter", {"treshold": 1}, "args.treshold", "is 1, but reward_filter has no such argument; known: thr"),
        ("mask_response_truncated", {"x": 1}, "args.x", "no such argument; known: none"),
        ("reward_filter", {"threshold": "1e-3"}, "args.threshold", "is '1e-3', must be a number"),
        ("reward_filter", {"threshold": True}, "args.threshold", "is True, must be a number"),
        ("reward_filter", {"threshold": math.nan}, "args.threshold", "is nan, must be a number"),
        ("reward_filter", {"threshold": None}, "args.threshold", "is None, must be a number"),
        ("pass_rate_calculator", {"threshold": "x"}, "args.threshold", "is 'x', must be a number or null"),
        ("raft_filter", {"k": 0}, "args.k", "is 0, must be a whole number >= 1"),
        ("RAFT_filter", {"k": 1.5}, "args.k", "is 1.5, must be a whole number >= 1"),
        ("multi_step_padding", {"max_steps": -1}, "args.max_steps", "is -1, must be a whole number >= 0"),
        ("overlong_reward_shaping", {"penalty_factor": -1}, "args.penalty_factor", "is -1, must be a number >= 0"),
        (
            "overlong_reward_shaping",
            {"cache_length": 0},
            "args.cache_length",
            "is 0, must be a whole number >= 1 or null",
        ),
        (
            "overlong_reward_shaping",
            {"max_response_length": 5, "cache_length": 6},
            "args.cache_length",
            "is 6, more than max_response_length = 5",
        ),
        ("dapo_dynamic_sampling", {"metric_key": 1}, "args.metric_key", "is 1, must be text"),
        ("invalid_reward_filter", {"required_metrics": "a"}, "args.required_metrics", "must be a list of names of"),
        (
            "invalid_reward_filter",
            {"required_metrics": [1]},
            "args.required_metrics",
            "is [1], must be a list of names",
        ),
        *(
            (
                "reward_shaping_mapper",
                {"reward_shaping_configs": one},
                "args.reward_shaping_configs",
                "a list of {stats_key",
            )
            for one in MISSHAPEN
        ),
        ("data_juicer", {}, "args.operators", "is missing; give Data-Juicer's operators here, or config_path"),
        ("data_juicer", {"operators": ["text_length_filter"]}, "args.operators", "each one name with its arguments"),
    ],
)
def test_what_cannot_be_is_said_with_its_place(name: str, args: dict[str, Any], key: str, said: str) -> None:
    configs = [OperatorConfig(name="reward_filter"), OperatorConfig(name=name, args=args)]
    with pytest.raises(InvalidInput) as refused:
        Pipeline(configs)
    assert refused.value.field == f"{PLACE}.1.{key}"
    assert said in str(refused.value)
    (problem,) = names.experience_operator_problems(configs)
    assert str(refused.value) == str(problem)


@pytest.mark.parametrize("name", [name for name in OPERATORS if name != "data_juicer"])
def test_every_operator_runs_as_it_is_and_with_its_defaults_written_out(name: str) -> None:
    group = group_of(*(experience(i % 2, i, metrics={"accuracy": float(i % 2)}) for i in range(4)))
    plain, written = run(group, name), run(group, name, **names.EXPERIENCE_OPERATORS[name])
    assert [(d.index, d.reward, d.masked) for d in plain.drafts] == [
        (d.index, d.reward, d.masked) for d in written.drafts
    ]


# Operators of plugins


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], str]:
    monkeypatch.setattr(plugins, "EXPERIENCE_OPERATORS", {})

    def _register(operator: Any) -> str:
        plugins.experience_operator("mine")(operator)
        return "mine"

    return _register


def test_a_function_gets_drafts_task_and_the_yamls_args(register: Callable[[Any], str]) -> None:
    def mine(drafts: list[Draft], task: Any, args: dict[str, Any]) -> dict[str, float]:
        drafts[0].drop()
        drafts[1].reward *= args["factor"]
        drafts[2].masked = True
        return {"answers": len(task.raw["answer"])}

    done = run(rewarded(1.0, 2.0, 3.0), register(mine), factor=2)
    assert [(draft.index, draft.reward, draft.masked) for draft in done.drafts] == [(1, 4.0, False), (2, 3.0, True)]
    assert [draft.dropped_by for draft in done.dropped] == ["mine"]
    assert done.metrics == {f"{KEY}/mine/answers": 6.0}
    assert "mine" in names.experience_operators()


def test_a_class_is_made_once_with_the_args(register: Callable[[Any], str]) -> None:
    class Mine:
        def __init__(self, limit: int = 3) -> None:
            self.limit, self.calls = limit, 0

        def __call__(self, drafts: list[Draft], task: Any) -> dict[str, float]:
            self.calls += 1
            return {"calls": self.calls, "limit": self.limit}

    chain = pipeline((register(Mine), {"limit": 5}))
    chain.run(rewarded(1.0))
    assert chain.run(rewarded(1.0)).metrics == {f"{KEY}/mine/calls": 2.0, f"{KEY}/mine/limit": 5.0}
    with pytest.raises(
        InvalidInput, match=r"operators\.0\.args: mine: TypeError: .*unexpected keyword argument 'limt'"
    ):
        pipeline(("mine", {"limt": 5}))


def test_what_is_taken_out_of_the_list_is_dropped_too(register: Callable[[Any], str]) -> None:
    def mine(drafts: list[Draft], task: Any, args: dict[str, Any]) -> None:
        drafts.remove(drafts[1])
        drafts.reverse()

    done = run(rewarded(1.0, 2.0, 3.0), register(mine))
    assert kept(done) == [0, 2]
    assert [(draft.index, draft.dropped_by) for draft in done.dropped] == [(1, "mine")]


def test_metrics_that_one_operator_adds_are_there_for_the_next(register: Callable[[Any], str]) -> None:
    def mine(drafts: list[Draft], task: Any, args: dict[str, Any]) -> None:
        for draft in drafts:
            draft.metrics["tokens"] = draft.experience.response_length

    shaping = ("reward_shaping_mapper", {"reward_shaping_configs": [{"stats_key": "tokens"}]})
    group = rewarded(1.0, metrics={"accuracy": 1.0})
    assert pipeline(register(mine), shaping).run(group).drafts[0].reward == 5.0
    assert group.experiences[0].metrics == {"accuracy": 1.0}


def _stop(*_: Any) -> None:
    raise SystemExit(3)


def _set(field: str, value: Any) -> Callable[..., None]:
    return lambda drafts, task, args: setattr(drafts[0], field, value)


@pytest.mark.parametrize(
    ("operator", "said"),
    [
        (lambda drafts, task, args: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda drafts, task, args: args["limit"], "KeyError: 'limit'"),
        (_stop, "SystemExit: 3"),
        (lambda drafts, task, args: [1], "AttributeError: 'list' object has no attribute 'items'"),
        (lambda drafts, task, args: {"a": "x"}, "ValueError: could not convert string to float: 'x'"),
        (_set("reward", math.nan), "draft 0: the reward becomes nan, must be finite"),
        (_set("reward", math.inf), "draft 0: the reward becomes inf, must be finite"),
        (_set("reward", None), "TypeError"),
        (_set("experience", experience()), "draft 0: has another experience than the group; they stay as stored"),
        (_set("index", 7), "draft 7: has another experience"),
        (lambda drafts, task, args: drafts.append(drafts[0]), "drafts: one is in the list twice"),
        (lambda drafts, task, args: drafts.append(3), "AttributeError"),
    ],
)
def test_an_operator_that_fails_is_named_and_the_next_group_goes_on(
    register: Callable[[Any], str], operator: Callable[..., Any], said: str
) -> None:
    def mine(drafts: list[Draft], task: Any, args: dict[str, Any]) -> Any:
        return operator(drafts, task, args) if task.ordinal == 1 else None

    chain = pipeline("reward_filter", register(mine))
    with pytest.raises(InvalidInput) as refused:
        chain.run(rewarded(1.0, 2.0))
    assert refused.value.field == f"{PLACE}.1"
    assert f"mine fails for sums/0/1: {said}" in str(refused.value)
    assert chain.metrics() == {}
    assert kept(chain.run(replace(rewarded(1.0, 2.0), task=make_task(2)))) == [0, 1]


def test_a_built_in_name_keeps_its_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "EXPERIENCE_OPERATORS", {"reward_filter": _stop})
    assert kept(run(rewarded(-1.0, 1.0), "reward_filter")) == [1]


def test_the_example_of_the_docs_works(register: Callable[[Any], str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[3] / "docs/plugins.md").read_text()
    section = text[text.index("## An experience operator") :]
    exec(section.split("```python\n")[1].split("```")[0], {})
    group = group_of(experience(1.0, 0, response=4), experience(1.0, 1, response=8), experience(0.0, 2, response=40))
    done = run(group, "shortest_right", margin=1.5)
    assert [(draft.index, draft.reward) for draft in done.drafts] == [(0, 1.0), (1, 0.5), (2, 0.0)]


# Data-Juicer's filters, by a stand-in with the interface of its Filter


class LengthFilter:
    def __init__(self, min_len: int = 0, text_key: str = "text") -> None:
        self.min_len, self.text_key = min_len, text_key

    def compute_stats_batched(self, samples: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for text, stats in zip(samples[self.text_key], samples["__dj__stats__"], strict=True):
            stats["lang"] = "en"
            if "text_len" not in stats:  # as the real one
                stats["text_len"] = len(text)
        return samples

    def process_batched(self, samples: dict[str, list[Any]]) -> Iterator[bool]:
        return (stats["text_len"] >= self.min_len for stats in samples["__dj__stats__"])


@pytest.fixture
def juicer(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {"text_length_filter": LengthFilter, "clean_links_mapper": lambda: SimpleNamespace()}
    modules = {name: ModuleType(name) for name in ("data_juicer", "data_juicer.ops", "data_juicer.utils")}
    modules["data_juicer.utils.constant"] = ModuleType("constant")
    modules["data_juicer.ops"].load_ops = lambda ops: [known[n](**a) for op in ops for n, a in op.items()]  # type: ignore[attr-defined]
    modules["data_juicer.utils.constant"].Fields = SimpleNamespace(stats="__dj__stats__")  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


TEXTS = (("what?", "four"), ("why?", "because of it"), ("a longer question", "no"))


def spoken() -> Group:
    return group_of(*(experience(0.0, i, prompt_text=p, response_text=r) for i, (p, r) in enumerate(TEXTS)))


@pytest.mark.usefixtures("juicer")
@pytest.mark.parametrize(("args", "left"), [({"min_len": 4}, [0, 1]), ({"min_len": 5, "text_key": "prompt"}, [0, 2])])
def test_filters_of_data_juicer_drop_experiences_by_their_texts(args: dict[str, Any], left: list[int]) -> None:
    assert kept(run(spoken(), "data_juicer", operators=[{"text_length_filter": args}])) == left


@pytest.mark.usefixtures("juicer")
def test_two_filters_of_one_name_look_at_a_column_each() -> None:
    filters = [{"text_length_filter": {"min_len": 3}}, {"text_length_filter": {"min_len": 5, "text_key": "prompt"}}]
    assert kept(run(spoken(), "data_juicer", operators=filters)) == [0]


@pytest.mark.usefixtures("juicer")
def test_numbers_of_data_juicer_shape_rewards(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("project_name: x\nprocess:\n  - text_length_filter:\n")
    shaping = {"reward_shaping_configs": [{"stats_key": "text_len"}]}
    chain = pipeline(
        ("data_juicer", {"config_path": str(tmp_path / "recipe.yaml")}), ("reward_shaping_mapper", shaping)
    )
    done = chain.run(spoken())
    assert [draft.reward for draft in done.drafts] == [4, 13, 2]
    assert done.metrics[f"{KEY}/data_juicer/text_len"] == pytest.approx(19 / 3)


@pytest.mark.usefixtures("juicer")
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            {"operators": [{"clean_links_mapper": None}]},
            "clean_links_mapper is no filter; tokens are trained as sampled",
        ),
        ({"operators": [{"no_such_filter": {}}]}, "data_juicer: KeyError: 'no_such_filter'"),
        ({"operators": [{"text_length_filter": {"x": 1}}]}, "TypeError"),
        ({"config_path": "/no/such/recipe.yaml"}, "FileNotFoundError"),
    ],
)
def test_what_data_juicer_cannot_do_is_said_at_the_start(args: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        pipeline(("data_juicer", args))
    assert refused.value.field == f"{PLACE}.0.args"
    assert said in str(refused.value)


def test_without_data_juicer_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "data_juicer", None)
    with pytest.raises(InvalidInput, match=r"install it with: \.venv/bin/pip install py-data-juicer"):
        pipeline(("data_juicer", {"operators": [{"text_length_filter": {}}]}))


def test_the_table_of_the_docs_has_every_operator_with_its_defaults() -> None:
    text = (Path(__file__).parents[3] / "docs/operators.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| `")}
    for name, args in names.EXPERIENCE_OPERATORS.items():
        row = next(line for cell, line in rows.items() if f"`{name}`" in cell)
        for argument, default in args.items():
            assert f"`{argument}: {json.dumps(default)}`" in row, (name, argument)
