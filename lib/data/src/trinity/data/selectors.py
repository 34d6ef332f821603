"""The order in which rows of a taskset are fed.

Selectors are pure functions of the position, so a restart needs no other state. Only diff_based learns from rewards; a
restart repeats them from the ledger.
"""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence

from trinity.config.schema.buffer import SelectorConfig
from trinity.data.datasets import Row, features
from trinity.plugins import Fraction, NonNegative, Positive, selector
from trinity.plugins.declarations import SELECTORS


class Selector(ABC):
    """select(position), with positions counted from 0 over all epochs.

    rows: number of rows. features: the columns in feature_keys of each row, for selectors with the trait.
    """

    def __init__(self, rows: int, seed: int = 0, features: Sequence[Sequence[float]] = ()) -> None:
        self.rows = rows
        self.seed = seed

    @abstractmethod
    def select(self, position: int) -> int:
        """The row at a position."""

    def observe(self, row: int, reward: float) -> None:
        """A group of this row was stored with this mean reward."""
        return

    def taken(self, position: int, row: int) -> None:
        """Called after a restart: this row was taken at this position."""
        return


@selector("sequential")
class Sequential(Selector):
    """In the dataset's order, every epoch."""

    def select(self, position: int) -> int:
        return position % self.rows


@selector("random")
class Random(Selector):
    """With replacement."""

    def select(self, position: int) -> int:
        return random.Random(f"{self.seed}/{position}").randrange(self.rows)


@selector("shuffle")
class Shuffle(Selector):
    """Every row once an epoch, in a new random order each epoch."""

    def __init__(self, rows: int, seed: int = 0, features: Sequence[Sequence[float]] = ()) -> None:
        super().__init__(rows, seed)
        self._epoch = -1
        self._order: list[int] = []

    def select(self, position: int) -> int:
        epoch, index = divmod(position, self.rows)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(self.rows))
            random.Random(f"{self.seed}/{epoch}").shuffle(self._order)
        return self._order[index]


@selector("offline_easy2hard", traits=["features"])
class EasyToHard(Selector):
    """Sorted by the columns in feature_keys, highest (easiest) first. Equal rows keep their order."""

    def __init__(self, rows: int, seed: int, features: Sequence[Sequence[float]]) -> None:
        super().__init__(rows, seed)
        self._order = sorted(range(rows), key=lambda row: ([-value for value in features[row]], row))

    def select(self, position: int) -> int:
        return self._order[position % self.rows]


@selector("diff_based", traits=["features", "rewards"])
class DifficultyBased(Selector):
    """Every row once an epoch, in the order of the distance between expected pass rate and `target_reward`.

    Each row has a Beta posterior: `m` pseudo-counts at the mean of its features (0.5 without features), and one count
    for each reward, clipped to [0, 1]. Each reward scales older counts by 1 - `rho`. Since the policy improves on all
    rows, every expectation is shifted by `lamb` times the running mean of reward minus expectation. With `do_sample`,
    rows are drawn with weights exp(-distance / `tau`); otherwise the nearest row is taken.
    """

    def __init__(
        self,
        rows: int,
        seed: int,
        features: Sequence[Sequence[float]],
        *,
        m: Positive = 16.0,
        rho: Fraction = 0.2,
        lamb: float = 0.2,
        target_reward: float = 0.5,
        tau: NonNegative = 0.05,
        do_sample: bool = False,
    ) -> None:
        super().__init__(rows, seed)
        self._rho, self._lamb, self._target, self._tau, self._draws = rho, lamb, target_reward, tau, do_sample
        priors = [min(1.0, max(0.0, sum(row) / len(row))) if row else 0.5 for row in features]
        self._passed = [m * prior for prior in priors]
        self._failed = [m * (1 - prior) for prior in priors]
        self._drift = 0.0
        self._epoch = -1
        self._left: set[int] = set()

    def expected(self, row: int) -> float:
        """Expected reward of a row, in [0, 1]."""
        mean = self._passed[row] / (self._passed[row] + self._failed[row])
        return min(1.0, max(0.0, mean + self._lamb * self._drift))

    def observe(self, row: int, reward: float) -> None:
        seen, rho = min(1.0, max(0.0, reward)), self._rho
        self._drift += rho * (seen - self.expected(row))
        self._passed[row] = (1 - rho) * self._passed[row] + seen
        self._failed[row] = (1 - rho) * self._failed[row] + 1 - seen

    def taken(self, position: int, row: int) -> None:
        self._enter(position // self.rows)
        if position // self.rows == self._epoch:
            self._left.discard(row)

    def select(self, position: int) -> int:
        self._enter(position // self.rows)
        if not self._left:  # groups that were fed again took more rows than positions passed
            self._left = set(range(self.rows))
        rows = sorted(self._left)
        distances = [abs(self.expected(row) - self._target) for row in rows]
        if self._draws:
            weights = [math.exp(-distance / max(1e-6, self._tau)) for distance in distances]
            chosen = random.Random(f"{self.seed}/{position}").choices(rows, [w + 1e-12 for w in weights])[0]
        else:
            chosen = rows[distances.index(min(distances))]
        self._left.discard(chosen)
        return chosen

    def _enter(self, epoch: int) -> None:
        if epoch > self._epoch:
            self._epoch, self._left = epoch, set(range(self.rows))


def make_selector(config: SelectorConfig, rows: Sequence[Row]) -> Selector:
    """The selector of a taskset. Raises DatasetError for a feature that is no number."""
    declared = SELECTORS[config.selector_type]
    columns = features(rows, config.feature_keys) if "features" in declared.traits else []
    made: Selector = declared(len(rows), config.seed, columns, **config.kwargs)
    return made
