"""The row at a position is a pure function of the position."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity.buffer.selectors import make_selector


@given(rows=st.integers(1, 40), seed=st.integers(0, 5), epochs=st.integers(1, 4))
def test_shuffle_takes_every_row_once_an_epoch_and_another_order_each(rows: int, seed: int, epochs: int) -> None:
    select = make_selector("shuffle", rows, seed)
    for epoch in range(epochs):
        taken = [select(epoch * rows + index) for index in range(rows)]
        assert {e for e, _ in taken} == {epoch}
        assert sorted(row for _, row in taken) == list(range(rows))
    again = make_selector("shuffle", rows, seed)
    assert again(epochs * rows - 1) == select(epochs * rows - 1)


def test_orders_differ_between_epochs() -> None:
    select = make_selector("shuffle", 50, 0)
    assert [select(i)[1] for i in range(50)] != [select(50 + i)[1] for i in range(50)]


@pytest.mark.parametrize("kind", ["sequential", "random", "shuffle"])
def test_a_restart_goes_on_with_the_same_rows(kind: str) -> None:
    first, second = make_selector(kind, 7, 3), make_selector(kind, 7, 3)
    assert [first(i) for i in range(30)] == [second(i) for i in reversed(range(30))][::-1]
