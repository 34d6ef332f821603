"""The order in which rows of a taskset are fed.

Selectors are pure functions of the position, so that a restart needs no other state; diff_based alone learns from the
rewards, which it is told again from the ledger after a restart.
"""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence

from trinity.config.names import SELECTOR_ARGS
from trinity.config.schema.buffer import SelectorConfig
from trinity.data.datasets import Row, features


class Selector(ABC):
    """select(position), with positions counted from 0 over all epochs."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    @abstractmethod
    def select(self, position: int) -> int:
        """The row at a position."""

    def observe(self, row: int, reward: float) -> None:
        """A group of this row was stored, with this mean reward."""
        return

    def taken(self, position: int, row: int) -> None:
        """After a restart: this row was taken at this position."""
        return


class Sequential(Selector):
    """In the dataset's order, every epoch."""

    def select(self, position: int) -> int:
        return position % self.rows


class Random(Selector):
    """With replacement."""

    def __init__(self, rows: int, seed: int) -> None:
        super().__init__(rows)
        self._seed = seed

    def select(self, position: int) -> int:
        return random.Random(f"{self._seed}/{position}").randrange(self.rows)


class Shuffle(Selector):
    """Every row once an epoch, in another order each."""

    def __init__(self, rows: int, seed: int) -> None:
        super().__init__(rows)
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def select(self, position: int) -> int:
        epoch, index = divmod(position, self.rows)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(self.rows))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        return self._order[index]


class EasyToHard(Selector):
    """By the columns in feature_keys, the higher the easier, the first column first; equal rows in their order."""

    def __init__(self, features: Sequence[Sequence[float]]) -> None:
        super().__init__(len(features))
        self._order = sorted(range(len(features)), key=lambda row: ([-value for value in features[row]], row))

    def select(self, position: int) -> int:
        return self._order[position % self.rows]


class DifficultyBased(Selector):
    """Every row once an epoch, those first whose pass rate is expected nearest to `target_reward`.

    A Beta posterior for each row: `m` pseudo-counts at the mean of its features (0.5 without), and one count for each
    reward seen, clipped to [0, 1]; older counts fade by 1 - `rho` at each. As the policy gets better everywhere, every
    expectation is moved by `lamb` times the running mean of how far rewards were above what was expected. With
    `do_sample` rows are drawn with weights exp(-distance / `tau`), else the nearest is taken.
    """

    def __init__(self, priors: Sequence[float], seed: int, **args: float) -> None:
        super().__init__(len(priors))
        self._seed = seed
        self._args = args
        self._passed = [args["m"] * prior for prior in priors]
        self._failed = [args["m"] * (1 - prior) for prior in priors]
        self._drift = 0.0
        self._epoch = -1
        self._left: set[int] = set()

    def expected(self, row: int) -> float:
        """Expected reward of a row, in [0, 1]."""
        mean = self._passed[row] / (self._passed[row] + self._failed[row])
        return min(1.0, max(0.0, mean + self._args["lamb"] * self._drift))

    def observe(self, row: int, reward: float) -> None:
        seen, rho = min(1.0, max(0.0, reward)), self._args["rho"]
        self._drift += rho * (seen - self.expected(row))
        self._passed[row] = (1 - rho) * self._passed[row] + seen
        self._failed[row] = (1 - rho) * self._failed[row] + 1 - seen

    def taken(self, position: int, row: int) -> None:
        self._enter(position // self.rows)
        if position // self.rows == self._epoch:
            self._left.discard(row)

    def select(self, position: int) -> int:
        self._enter(position // self.rows)
        if not self._left:  # more rows are known to be taken than positions passed: groups fed again
            self._left = set(range(self.rows))
        rows = sorted(self._left)
        distances = [abs(self.expected(row) - self._args["target_reward"]) for row in rows]
        if self._args["do_sample"]:
            weights = [math.exp(-distance / max(1e-6, self._args["tau"])) for distance in distances]
            chosen = random.Random(f"{self._seed}/{position}").choices(rows, [w + 1e-12 for w in weights])[0]
        else:
            chosen = rows[distances.index(min(distances))]
        self._left.discard(chosen)
        return chosen

    def _enter(self, epoch: int) -> None:
        if epoch > self._epoch:
            self._epoch, self._left = epoch, set(range(self.rows))


def make_selector(config: SelectorConfig, rows: Sequence[Row]) -> Selector:
    """The selector of a taskset. Raises DatasetError for a feature that is no number."""
    kind = config.selector_type
    if kind == "sequential":
        return Sequential(len(rows))
    if kind == "random":
        return Random(len(rows), config.seed)
    if kind == "shuffle":
        return Shuffle(len(rows), config.seed)
    columns = features(rows, config.feature_keys)
    if kind == "offline_easy2hard":
        return EasyToHard(columns)
    priors = [min(1.0, max(0.0, sum(row) / len(row))) if row else 0.5 for row in columns]
    return DifficultyBased(priors, config.seed, **{**SELECTOR_ARGS[kind], **config.kwargs})
