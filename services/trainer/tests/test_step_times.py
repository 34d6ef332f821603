"""The parts of a step's wall time."""

import pytest

from trinity.trainer.process.times import StepTimes

pytestmark = pytest.mark.core


def test_a_wait_is_the_explorers_until_the_last_group_is_whole_and_then_the_buffers() -> None:
    times = StepTimes()
    times.waited(100.0, 110.0)
    found = times.metrics(made_at_seconds=109.75)
    assert found == pytest.approx({"time/wait": 9.75, "time/buffer": 0.25, "time/publish": 0.0, "time/save": 0.0})


def test_a_batch_that_was_whole_before_the_wait_is_waited_for_because_of_the_buffer_alone() -> None:
    times = StepTimes()
    times.waited(100.0, 100.5)
    found = times.metrics(made_at_seconds=90.0)
    assert (found["time/wait"], found["time/buffer"]) == pytest.approx((0.0, 0.5))


def test_rows_of_a_dataset_are_never_waited_for() -> None:
    times = StepTimes()
    times.waited(100.0, 100.5)
    assert times.metrics(made_at_seconds=0.0)["time/buffer"] == pytest.approx(0.5)


def test_an_explorer_whose_clock_is_ahead_adds_no_time() -> None:
    times = StepTimes()
    times.waited(100.0, 102.0)
    found = times.metrics(made_at_seconds=500.0)
    assert (found["time/wait"], found["time/buffer"]) == pytest.approx((2.0, 0.0))


def test_a_wait_that_a_checkpoint_interrupted_counts_whole() -> None:
    times = StepTimes()
    times.waited(100.0, 103.0)
    times.waited(105.0, 106.0)
    found = times.metrics(made_at_seconds=105.5)
    assert (found["time/wait"], found["time/buffer"]) == pytest.approx((3.5, 0.5))


def test_what_follows_a_step_is_reported_once_with_the_next_one() -> None:
    times = StepTimes()
    times.spent("publish", 2.0)
    times.spent("save", 3.0)
    times.spent("buffer", 0.25)
    times.waited(100.0, 101.0)
    first = times.metrics(made_at_seconds=0.0)
    assert (first["time/publish"], first["time/save"], first["time/buffer"]) == pytest.approx((2.0, 3.0, 1.25))
    times.waited(110.0, 110.0)
    assert set(times.metrics(made_at_seconds=0.0).values()) == {0.0}
