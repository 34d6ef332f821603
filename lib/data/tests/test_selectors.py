"""Which row comes at which position, of one taskset and of several."""

from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trinity.config.schema.buffer import SelectorConfig
from trinity.data.datasets import DatasetError
from trinity.data.selectors import DifficultyBased, Selector, make_selector
from trinity.data.task_source import TaskMixture

pytestmark = pytest.mark.core


def selector(kind: str, rows: int, seed: int = 0) -> Selector:
    return make_selector(SelectorConfig(selector_type=kind, seed=seed), [{} for _ in range(rows)])  # type: ignore[arg-type]


@given(rows=st.integers(1, 40), seed=st.integers(0, 5), epochs=st.integers(1, 4))
def test_shuffle_takes_every_row_once_an_epoch(rows: int, seed: int, epochs: int) -> None:
    shuffle = selector("shuffle", rows, seed)
    for epoch in range(epochs):
        assert sorted(shuffle.select(epoch * rows + index) for index in range(rows)) == list(range(rows))


def test_orders_differ_between_epochs_and_seeds() -> None:
    shuffle = selector("shuffle", 50)
    first = [shuffle.select(i) for i in range(50)]
    assert first != [shuffle.select(50 + i) for i in range(50)]
    other = selector("shuffle", 50, seed=1)
    assert first != [other.select(i) for i in range(50)]


@pytest.mark.parametrize("kind", ["sequential", "random", "shuffle"])
def test_a_restart_goes_on_with_the_same_rows(kind: str) -> None:
    first, second = selector(kind, 7, 3), selector(kind, 7, 3)
    assert [first.select(i) for i in range(30)] == [second.select(i) for i in reversed(range(30))][::-1]


def test_easy_rows_come_first_by_several_features() -> None:
    rows = [{"a": 0.1, "b": 9}, {"a": 0.9, "b": 1}, {"a": 0.9, "b": 2}, {"a": 0.5, "b": 0}]
    config = SelectorConfig(selector_type="offline_easy2hard", feature_keys=["a", "b"])
    order = make_selector(config, rows)
    assert [order.select(i) for i in range(8)] == [2, 1, 3, 0, 2, 1, 3, 0]
    with pytest.raises(DatasetError, match=r"row 1: 'a' is 'x', must be a number"):
        make_selector(config, [rows[0], {"a": "x", "b": 1}])
    with pytest.raises(DatasetError, match=r"row 1: 'a' is 10+, must be a number"):
        make_selector(config, [rows[0], {"a": 10**400, "b": 1}])


def test_rows_of_medium_difficulty_come_first_and_what_was_seen_counts() -> None:
    rows = [{"rate": 0.0}, {"rate": 0.5}, {"rate": 1.0}, {"rate": 0.6}]
    config = SelectorConfig(selector_type="diff_based", feature_keys=["rate"], kwargs={"m": 4})
    chosen = make_selector(config, rows)
    assert isinstance(chosen, DifficultyBased)
    assert [chosen.select(i) for i in range(4)][:2] == [1, 3]
    for _ in range(8):
        chosen.observe(1, 1.0)  # solved always: not medium any more
        chosen.observe(0, 0.5)
    second = [chosen.select(i) for i in range(4, 8)]
    assert sorted(second) == [0, 1, 2, 3]
    assert second.index(1) > second.index(0), "what is solved always comes after what is solved half the time"


def test_difficulty_takes_every_row_once_an_epoch_and_remembers_after_a_restart() -> None:
    config = SelectorConfig(selector_type="diff_based", kwargs={"do_sample": True})
    first = make_selector(config, [{} for _ in range(20)])
    taken = [first.select(i) for i in range(20)]
    assert sorted(taken) == list(range(20))
    again = make_selector(config, [{} for _ in range(20)])
    for position, row in enumerate(taken[:12]):
        again.taken(position, row)
    assert sorted([*taken[:12], *(again.select(i) for i in range(12, 20))]) == list(range(20))


class FakeSource:
    def __init__(self, name: str, rows: int, weight: float) -> None:
        self.rows = range(rows)
        self.taskset = SimpleNamespace(name=name, weight=weight)

    def train_task_later(self, position: int, ordinal: int, gate: int) -> tuple[str, int]:
        return self.taskset.name, position


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4), cycles=st.integers(1, 3))
@example(sizes=[1, 2, 16, 30], cycles=1)
def test_several_tasksets_give_every_row_once_a_cycle_evenly(sizes: list[int], cycles: int) -> None:
    mixture = TaskMixture([FakeSource(str(i), size, 1.0) for i, size in enumerate(sizes)])  # type: ignore[arg-type]
    total = sum(sizes)
    assert mixture.rows == total
    for cycle in range(cycles):
        taken = [mixture.train_task_later(cycle * total + index, 1, 0) for index in range(total)]
        for i, size in enumerate(sizes):
            positions = [p for name, p in taken if name == str(i)]  # type: ignore[misc]
            assert positions == list(range(cycle * size, (cycle + 1) * size))
    half = Counter(name for name, _ in (mixture.train_task_later(i, 1, 0) for i in range(total // 2)))  # type: ignore[misc]
    assert all(abs(half[str(i)] - size / 2) <= len(sizes) for i, size in enumerate(sizes))


def test_a_weight_gives_a_taskset_more_turns() -> None:
    mixture = TaskMixture([FakeSource("a", 30, 3.0), FakeSource("b", 30, 1.0)])  # type: ignore[list-item]
    turns = Counter(mixture.train_task_later(i, 1, 0)[0] for i in range(mixture.rows))  # type: ignore[index]
    assert turns == {"a": 45, "b": 15}
