"""In which order a taskset's rows are taken: a pure function of the position, so a restart needs no other state."""

import random
from collections.abc import Callable

# (position counted from 0 over all epochs) -> (epoch, row)
Selector = Callable[[int], tuple[int, int]]


def make_selector(kind: str, rows: int, seed: int) -> Selector:
    """sequential; shuffle: a fresh order each epoch; random: with replacement."""
    if kind == "sequential":
        return lambda position: divmod(position, rows)
    if kind == "random":
        return lambda position: (position // rows, random.Random(f"{seed}/{position}").randrange(rows))
    if kind != "shuffle":
        raise ValueError(f"unknown selector {kind!r}")
    orders: dict[int, list[int]] = {}

    def shuffled(position: int) -> tuple[int, int]:
        epoch, index = divmod(position, rows)
        if epoch not in orders:
            order = list(range(rows))
            random.Random(f"{seed}/{epoch}").shuffle(order)
            orders.clear()
            orders[epoch] = order
        return epoch, orders[epoch][index]

    return shuffled
