"""Derived sizes: steps, batches, and the staleness bound against a simulation of the worst explorer."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity.config import Config, ConfigError, expand, make_plan
from trinity.config.checks.over_rollout import check_over_rollout
from trinity.config.load import parse
from trinity.config.plan import Staleness

pytestmark = pytest.mark.core

BASE = """
project: p
name: n
checkpoint_root_dir: /tmp/none
model: {model_path: m, max_prompt_tokens: 16, max_response_tokens: 16}
algorithm: {algorithm_type: grpo, repeat_times: 4}
buffer:
  batch_size: 8
  total_epochs: 3
  explorer_input: {taskset: {name: t, path: d.jsonl}}
"""


@given(interval=st.integers(1, 6), offset=st.integers(0, 6), batches=st.integers(1, 60))
def test_the_bound_holds_for_the_slowest_explorer(interval: int, offset: int, batches: int) -> None:
    """Every task is sampled by the oldest weights its gate allows."""
    staleness = Staleness(interval, offset)
    worst = 0
    for batch in range(batches):
        gate = staleness.gate(batch)
        assert gate <= batch, "a batch would wait for weights made from it"
        assert gate % interval == 0, "no such version is published"
        worst = max(worst, batch - gate)
    assert worst <= staleness.bound
    if batches > interval + offset + interval:
        assert worst == staleness.bound, "the bound is not tight"


@given(interval=st.integers(1, 5), offset=st.integers(0, 5))
def test_no_deadlock_and_no_more_outstanding_than_the_bound(interval: int, offset: int) -> None:
    """Feed what the gate allows, train when fed, publish every interval: it must never stop, nor run ahead."""
    staleness = Staleness(interval, offset)
    live, fed, trained = 0, 0, 0
    while trained < 40:
        while staleness.gate(fed) <= live:
            fed += 1
        assert fed > trained, "stuck"
        assert fed - live // interval * interval <= staleness.bound + 1
        trained += 1
        if staleness.publishes(trained, None):
            live = trained


def test_synchronous_training_is_a_bound_of_zero() -> None:
    assert Staleness(1, 0).bound == 0
    assert [Staleness(1, 0).gate(batch) for batch in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("rows", "steps"), [(8, 3), (20, 7), (7, 2), (1, 0)])
def test_steps_follow_from_epochs_and_rows(rows: int, steps: int) -> None:
    assert make_plan(parse(BASE)).steps_for(rows) == steps


def test_total_steps_win_over_epochs() -> None:
    assert make_plan(parse(BASE, overrides=["buffer.total_steps=5"])).steps_for(1000) == 5


def test_a_stage_takes_what_it_names_and_the_rest_from_above() -> None:
    text = (
        BASE
        + "stages:\n  - stage_name: one\n    algorithm: {algorithm_type: grpo, repeat_times: 2}\n  - stage_name: two\n"
    )
    one, two = expand(parse(text))
    assert (one.algorithm.repeat_times, two.algorithm.repeat_times) == (2, 4)
    assert (one.name, two.name) == ("n/one", "n/two")
    assert make_plan(two).job_dir.as_posix() == "/tmp/none/p/n/two"


def over_rolled(over_rollout: dict[str, Any], batch_size: int = 8, **sections: Any) -> Config:
    run: dict[str, Any] = {
        "model": {"model_path": "m", "max_model_len": 64},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
        "buffer": {"batch_size": batch_size, "total_steps": 2, "explorer_input": {"taskset": {"path": "d.jsonl"}}},
        "explorer": {"over_rollout": over_rollout},
    }
    for name, changes in sections.items():
        run[name] = {**run.get(name, {}), **changes}
    return parse(json.dumps(run))


@pytest.mark.parametrize(
    ("ratio", "tasks", "fewest"),
    [(0.0, 8, 8), (0.25, 8, 6), (0.1, 8, 8), (0.29, 100, 71), (0.7, 10, 3), (0.9, 10, 1), (0.99, 8, 1)],
)
def test_the_fewest_groups_are_the_whole_without_the_ratio(ratio: float, tasks: int, fewest: int) -> None:
    assert make_plan(over_rolled({"ratio": ratio}, tasks)).fewest_groups == fewest


@pytest.mark.parametrize("style", ["fixed", "explorer_driven", "trainer_driven", "fully_async"])
def test_every_sync_style_goes_with_it(style: str) -> None:
    made = over_rolled({"ratio": 0.25, "wait_after_min": 5}, synchronizer={"sync_style": style})
    assert list(check_over_rollout(made)) == []
    assert not any("over_rollout" in notice for notice in made.notices)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"algorithm": {"sample_strategy": "staleness_control"}}, "staleness_control, whose steps take the groups"),
        (
            {"buffer": {"trainer_input": {"experience_buffer": {"replay_buffer": {"enable": True}}}}},
            "replay_buffer, whose steps take the groups that are there: use one of them",
        ),
    ],
)
def test_policies_that_wait_for_no_task_are_refused_beside_it(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"explorer.over_rollout.ratio: is 0.25 beside .*{said}"):
        over_rolled({"ratio": 0.25}, **sections)
    over_rolled({"ratio": 0.0}, **sections)


def test_a_ratio_of_less_than_one_task_has_no_effect() -> None:
    said = "explorer.over_rollout.ratio: has no effect: 0.1 of 8 tasks is less than one"
    assert said in over_rolled({"ratio": 0.1}).notices
    assert said not in over_rolled({"ratio": 0.2}).notices


def test_the_yaml_of_an_explorer_does_not_decide_what_is_cut() -> None:
    """Trinity-RFT's explorers cut their own tasks."""
    said = "explorer.over_rollout.ratio: has no effect in mode explore: the run's buffer decides it"
    explore = json.dumps({"mode": "explore", "explorer": {"over_rollout": {"ratio": 0.25}}})
    assert any(notice.startswith(said) for notice in parse(explore).notices)
    assert not any(said in notice for notice in over_rolled({"ratio": 0.25}).notices)


def test_of_trinity_rfts_keys_partial_groups_alone_are_refused() -> None:
    over_rolled({"ratio": 0.25, "wait_after_min": 30.0, "return_partial_tasks": False})
    with pytest.raises(ConfigError, match=r"return_partial_tasks: .*a group is stored whole") as found:
        over_rolled({"ratio": 0.25, "wait_after_min": 30.0, "return_partial_tasks": True})
    assert len(found.value.problems) == 1
