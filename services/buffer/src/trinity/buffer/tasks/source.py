"""Several tasksets as one. The task at a position never changes."""

import heapq
from collections.abc import Callable, Sequence
from fractions import Fraction

from trinity.data.experience import Task
from trinity.data.task_source import TaskSource


class Mixture:
    """Training tasks of a run: several tasksets as one.

    A cycle has as many positions as all tasksets have rows. Each taskset gets its share of them, rows times weight,
    spread evenly; without weights every row of every taskset comes once a cycle. A pure function of the position.
    """

    def __init__(self, sources: Sequence[TaskSource]) -> None:
        self.sources = list(sources)
        rows = [len(source.rows) for source in sources]
        weights = [source.taskset.weight * count for source, count in zip(sources, rows, strict=True)]
        self._turns = _spread(_shares(weights, sum(rows)))
        self._counts = [self._turns.count(index) for index in range(len(sources))]
        self._ranks = _ranks(self._turns)

    @property
    def weight(self) -> float:
        """Rows times weight, of all tasksets."""
        return sum(source.taskset.weight * len(source.rows) for source in self.sources)

    @property
    def rows(self) -> int:
        """Positions of one epoch."""
        return len(self._turns)

    def train_task_later(self, position: int, ordinal: int, gate_step: int) -> Callable[[], Task]:
        """The task at a position of the run (from 0, over all epochs), as TaskSource.train_task_later."""
        source, local = self._at(position)
        return source.train_task_later(local, ordinal, gate_step)

    def is_at(self, position: int, task_id: str) -> bool:
        """Returns True for the id of the task at a position of the run."""
        source, local = self._at(position)
        return source.is_at(local, task_id)

    def has_made(self, task_id: str) -> bool:
        """Returns True for the id of a task of these tasksets; callers bring other tasks."""
        return task_id.startswith(tuple(f"{source.taskset.name}/" for source in self.sources))

    def observe(self, task_id: str, reward: float | None) -> None:
        """Tell the selector of a task's taskset what its group was worth, None if that is not known yet.

        Tasks of others are passed over.
        """
        for source in self.sources:
            if source.observe(task_id, reward):
                return

    def _at(self, position: int) -> tuple[TaskSource, int]:
        cycle, index = divmod(position, len(self._turns))
        turn = self._turns[index]
        return self.sources[turn], cycle * self._counts[turn] + self._ranks[index]


def _shares(weights: Sequence[float], total: int) -> list[int]:
    """`total` shared out by weight, by largest remainders; everybody gets one at least."""
    exact = [Fraction(weight) / sum(map(Fraction, weights)) * total for weight in weights]  # 1/49 * 49 is 1
    shares = [max(1, int(part)) for part in exact]
    order = sorted(range(len(weights)), key=lambda i: (int(exact[i]) - exact[i], i))
    for index in order[: max(0, total - sum(shares))]:
        shares[index] += 1
    return shares


def _spread(shares: Sequence[int]) -> list[int]:
    """Every index as often as its share says, evenly over the whole."""
    due = [(0.5 / share, index, 0) for index, share in enumerate(shares)]
    heapq.heapify(due)
    turns = []
    while due:
        _, index, taken = heapq.heappop(due)
        turns.append(index)
        if taken + 1 < shares[index]:
            heapq.heappush(due, ((taken + 1.5) / shares[index], index, taken + 1))
    return turns


def _ranks(turns: Sequence[int]) -> list[int]:
    """For each turn, the number of earlier turns of the same taskset within the cycle."""
    seen: dict[int, int] = {}
    ranks = []
    for turn in turns:
        ranks.append(seen.get(turn, 0))
        seen[turn] = ranks[-1] + 1
    return ranks
