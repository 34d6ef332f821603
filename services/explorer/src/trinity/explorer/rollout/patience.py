"""How long an attempt may take: explorer.max_timeout, or with explorer.dynamic_timeout less, once it is known."""

from collections import defaultdict

from trinity.config.schema.explorer import DynamicTimeoutConfig
from trinity.data.experience import Task, TaskKind


class Patience:
    """Limits the attempts at tasks of a taskset to a multiple of the mean that this explorer's took.

    An attempt that was cut counts with its limit, so limits that became too short grow again. Evaluations are never
    cut, because their accuracy would be that of short answers.
    """

    def __init__(self, config: DynamicTimeoutConfig, tasks_per_step: int) -> None:
        self._ratio = config.ratio if config.enable else None
        self._first = max(1, config.warmup_min_steps * tasks_per_step)
        self._attempts: dict[str, int] = defaultdict(int)
        self._seconds: dict[str, float] = defaultdict(float)

    def limit_seconds(self, task: Task) -> float:
        """The longest attempt at this task from now on."""
        attempts = self._attempts[task.taskset]
        if self._ratio is None or task.kind is TaskKind.EVALUATION or attempts < self._first:
            return task.timeout_seconds
        return min(task.timeout_seconds, self._ratio * self._seconds[task.taskset] / attempts)

    def count(self, task: Task, seconds: float) -> None:
        """An attempt has ended with a group, or at its limit, after `seconds`."""
        if task.kind is not TaskKind.EVALUATION:
            self._attempts[task.taskset] += 1
            self._seconds[task.taskset] += seconds
