"""From dataset rows to tasks, of one taskset or several. The task at a position never changes."""

import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from trinity.config import Plan
from trinity.config.names import DEFAULT_REWARD_FUNCTION, DEFAULT_WORKFLOW
from trinity.config.schema.buffer import GenerationConfig, TasksetConfig
from trinity.data.datasets import Row, read
from trinity.data.experience import SamplingParams, Task, TaskKind
from trinity.data.selectors import Selector, make_selector


@dataclass(frozen=True)
class TaskSource:
    """One taskset of a run, for training or for evaluation."""

    run: str
    plan: Plan
    taskset: TasksetConfig
    rows: Sequence[Row]
    kind: TaskKind
    selector: Selector

    @classmethod
    def open(cls, run: str, plan: Plan, taskset: TasksetConfig, kind: TaskKind) -> "TaskSource":
        """Reads the dataset. Raises DatasetError."""
        rows = read(taskset.path, taskset.split, taskset.subset_name)
        selector = make_selector(taskset.data_selector, rows)
        return cls(run, plan, taskset, rows, kind, selector)

    def train_task(self, position: int, ordinal: int, gate_step: int) -> Task:
        """The task at a position of the run (from 0, over all epochs)."""
        epoch, row = position // len(self.rows), self.selector.select(position)
        return self._task(f"{self.taskset.name}/{epoch}/{position}/{row}", ordinal, epoch, row, gate_step, 0)

    def observe(self, task_id: str, reward: float | None) -> bool:
        """Tell the selector what a group was worth, None: not known yet. Whether the task is of this taskset."""
        name, *numbers = task_id.rsplit("/", 3)
        if name != self.taskset.name or len(numbers) != 3 or not all(number.isdigit() for number in numbers):
            return False
        _, position, row = map(int, numbers)
        if row < len(self.rows):
            self.selector.taken(position, row)
            if reward is not None:
                self.selector.observe(row, reward)
        return True

    def evaluation_task(self, row: int, ordinal: int, step: int) -> Task:
        """The task of a row (from 0) in the evaluation of a step."""
        return self._task(f"{self.taskset.name}/eval/{step}/{row}", ordinal, 0, row, step, step)

    def _task(self, task_id: str, ordinal: int, epoch: int, row: int, gate_step: int, evaluation_step: int) -> Task:
        config, taskset, values = self.plan.config, self.taskset, self.rows[row]
        source = config.buffer.explorer_input
        training = self.kind is TaskKind.TRAIN
        default_workflow = source.default_workflow_type if training else source.default_eval_workflow_type
        workflow = (
            _from_row(values, taskset.format.workflow_key)
            or taskset.default_workflow_type
            or default_workflow
            or source.default_workflow_type
            or DEFAULT_WORKFLOW
        )
        reward = (
            _from_row(values, taskset.format.reward_fn_key)
            or taskset.default_reward_fn_type
            or source.default_reward_fn_type
            or DEFAULT_REWARD_FUNCTION
        )
        repeat_times = config.algorithm.repeat_times if training else taskset.repeat_times
        return Task(
            run=self.run,
            task_id=task_id,
            ordinal=ordinal,
            kind=self.kind,
            taskset=taskset.name,
            epoch=epoch,
            row=row,
            row_json=json.dumps(values, default=str),
            format_json=taskset.format.model_dump_json(),
            workflow=workflow,
            workflow_args_json=json.dumps(taskset.workflow_args),
            reward_function=reward,
            reward_args_json=json.dumps(taskset.reward_fn_args),
            repeat_times=repeat_times,
            sampling=sampling_of(self.plan, taskset.rollout_args, repeat_times),
            gate_step=gate_step,
            evaluation_step=evaluation_step,
            timeout_seconds=config.explorer.max_timeout,
            max_attempts=config.explorer.max_retry_times + 1,
            greedy_baseline=training and self.plan.algorithm.needs_greedy_baseline,
        )


def sampling_of(plan: Plan, args: GenerationConfig, n: int) -> SamplingParams:
    """A taskset's rollout_args over the model's defaults."""
    model = plan.config.model
    max_tokens = min(args.max_tokens or plan.lengths.response, plan.lengths.response)
    return SamplingParams(
        temperature=_first(args.temperature, model.temperature),
        top_p=_first(args.top_p, model.top_p),
        top_k=_first(args.top_k, model.top_k),
        max_tokens=max_tokens,
        min_tokens=min(model.min_response_tokens, max_tokens),
        n=n,
        repetition_penalty=model.repetition_penalty,
        stop=tuple(args.stop),
    )


def _first(value: Any, default: Any) -> Any:
    return default if value is None else value


def _from_row(row: Row, key: str) -> str:
    value = row.get(key) if key else None
    return value if isinstance(value, str) else ""


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
    def rows(self) -> int:
        """Positions of one epoch."""
        return len(self._turns)

    def train_task(self, position: int, ordinal: int, gate_step: int) -> Task:
        """The task at a position of the run (from 0, over all epochs)."""
        source, local = self._at(position)
        return source.train_task(local, ordinal, gate_step)

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
    """How many turns of the same taskset come before each, within the cycle."""
    seen: dict[int, int] = {}
    ranks = []
    for turn in turns:
        ranks.append(seen.get(turn, 0))
        seen[turn] = ranks[-1] + 1
    return ranks
