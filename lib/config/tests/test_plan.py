"""Derived sizes: steps, batches, and the staleness bound against a simulation of the worst explorer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity.config import expand, make_plan
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
