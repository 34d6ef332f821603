"""Experience operators against cases worked out by hand, and what a run is told of them."""

import math
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.fakes.data.operators import KEY, PLACE, experience, group_of, kept, pipeline, rewarded, run, stepwise
from trinity.buffer.operators import base
from trinity.data.experience import SamplingParams, Truncation
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core

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


def test_an_operator_leaves_a_bounded_number_of_experiences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MOST_DRAFTS", 6)
    assert len(run(stepwise([0, 0, 1], [0.5]), "multi_step_padding").drafts) == 6
    with pytest.raises(InvalidInput, match=r"multi_step_padding fails for .* would be 8, may be 6 in a group"):
        run(stepwise([0, 0, 1], [0.5]), "multi_step_padding", max_steps=4)
    with pytest.raises(InvalidInput, match=r"reward_filter fails for .* would be 7, may be 6 in a group"):
        run(rewarded(*[1.0] * 7), "reward_filter")


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
