"""A sequential test that finds a weight version whose rewards are worse than those of the versions before it.

Each reward x of the tested version is compared with y, the mean of four rewards of earlier versions, used once in the
test. With all scaled into [0, 1] and d = y - x - margin, the wealth of a gambler who bets the part b on "worse" is

    K_t(b) = prod_{s <= t} (1 + b d_s),    0 < b < 1 / (1 + margin),

and the e-value is its mean over a fixed grid of b. Null hypothesis: given the past, E[d] <= 0 for each reward, so the
tested version is at most `margin` worse than each version it is compared with. Then every K(b), and their mean, is a
nonnegative supermartingale that begins at 1, and by Ville's inequality it ever reaches 1 / alpha with probability at
most alpha, however often one looks. Sources: Ville, Etude critique de la notion de collectif, 1939; Waudby-Smith and
Ramdas, Estimating means of bounded random variables by betting, arXiv:2010.09686, section 4.

Assumptions, which no test can check:
- Whether and when a client sends a reward does not depend on the reward, nor on the version.
- Clients ask the same kind of questions of the tested version as of the versions before it. Without a trial these were
  served earlier: a change of the traffic of more than `margin` looks like a worse version. In a trial both are served
  at once, and rewards of earlier versions that come during the test are compared with (`together`).
- Rewards are independent of each other, given their versions. Each is clipped into [low, high]. That the tested version
  was trained on some of the rewards it is compared with is neglected.

`alpha` holds for each version; over V versions at most alpha V alarms are false on average.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

_BETS = np.linspace(0.1, 0.9, 9)  # parts of the largest bet
_COMPARED = 4
_POOL = 1024  # newest rewards of earlier versions: a test takes a fourth of it, and ends
_TESTS = 64  # newest versions under test


@dataclass(frozen=True)
class Alarm:
    """`version` is worse than the versions up to `good`, by the e-value of so many rewards."""

    version: int
    good: int
    e_value: float
    rewards: int


@dataclass
class _Test:
    """`pool`: scaled rewards of earlier versions, the newest last, whose newest version is `good`."""

    pool: deque[float]
    good: int
    wealth: np.ndarray = field(default_factory=lambda: np.ones(len(_BETS)))
    rewards: int = 0


class Guard:
    """The tests of a run. `alpha`: probability of a false alarm for a version; `margin`: of the scaled reward.

    together: explorers serve a new version and the one before it at the same time.
    """

    def __init__(self, alpha: float, margin: float, low: float, high: float, *, together: bool = False) -> None:
        self._together = together
        self._threshold, self._margin, self._low, self._high = 1 / alpha, margin, low, high
        self._bets = _BETS / (1 + margin)
        self._pool: deque[tuple[int, float]] = deque(maxlen=_POOL)
        self._tests: dict[int, _Test] = {}

    def add(self, version: int, reward: float) -> Alarm | None:
        """Take the reward of a call that one version sampled. Returns an alarm while its e-value is large enough."""
        scaled = (min(max(reward, self._low), self._high) - self._low) / (self._high - self._low)
        if version not in self._tests and (not self._tests or version > min(self._tests)):
            earlier = [(of, value) for of, value in self._pool if of < version]
            pool = deque((value for _, value in earlier), _POOL)
            self._tests[version] = _Test(pool, max((of for of, _ in earlier), default=-1))
            for oldest in sorted(self._tests)[:-_TESTS]:
                del self._tests[oldest]
        self._pool.append((version, scaled))
        for newer in (newer for newer in self._tests if newer > version and self._together):
            self._tests[newer].pool.append(scaled)
            self._tests[newer].good = max(self._tests[newer].good, version)
        test = self._tests.get(version)
        if test is None:
            return None
        if len(test.pool) >= _COMPARED:
            before = sum(test.pool.pop() for _ in range(_COMPARED)) / _COMPARED
            test.wealth *= 1 + self._bets * (before - scaled - self._margin)
            test.rewards += 1
        e_value = float(test.wealth.mean())
        return Alarm(version, test.good, e_value, test.rewards) if e_value >= self._threshold else None

    def forget(self, withdrawn: Callable[[int], bool]) -> None:
        """Leave out versions that a rollback withdrew."""
        self._pool = deque((one for one in self._pool if not withdrawn(one[0])), _POOL)
        for version in [version for version in self._tests if withdrawn(version)]:
            del self._tests[version]
