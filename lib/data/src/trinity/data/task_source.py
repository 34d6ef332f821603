"""Makes tasks from the rows of one taskset, or of several. The task at a position never changes."""

import heapq
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from trinity.config import Plan
from trinity.config.names import reward_named
from trinity.config.schema.buffer import GenerationConfig, TasksetConfig
from trinity.data import images
from trinity.data.datasets import Row, read_taskset
from trinity.data.experience import SamplingParams, Task, TaskKind
from trinity.data.selectors import Selector, make_selector
from trinity.data.tables import DatasetError


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
        rows = read_taskset(taskset)
        selector = make_selector(taskset.data_selector, rows)
        return cls(run, plan, taskset, rows, kind, selector)

    def train_task(self, position: int, ordinal: int, gate_step: int) -> Task:
        """The task at a position of the run (from 0, over all epochs)."""
        return self.train_task_later(position, ordinal, gate_step)()

    def train_task_later(self, position: int, ordinal: int, gate_step: int) -> Callable[[], Task]:
        """Chooses the row. The returned call reads its images, which may be remote, in any thread."""
        epoch, row = position // len(self.rows), self.selector.select(position)
        return partial(self._task, f"{self._place(position)}{row}", ordinal, epoch, row, gate_step, 0)

    def is_at(self, position: int, task_id: str) -> bool:
        """Returns True for the id of the `train_task` at a position, whichever row the selector chose."""
        return task_id.startswith(self._place(position))

    def _place(self, position: int) -> str:
        return f"{self.taskset.name}/{position // len(self.rows)}/{position}/"

    def observe(self, task_id: str, reward: float | None) -> bool:
        """Tell the selector the reward of a group, None if still unknown. Returns False for another taskset's task."""
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
        """The task of a row (from 0) in the evaluation of a step. May be called in any thread."""
        return self._task(self.evaluation_id(row, step), ordinal, 0, row, step, step)

    def evaluation_id(self, row: int, step: int) -> str:
        """task_id of the `evaluation_task`."""
        return f"{self.taskset.name}/eval/{step}/{row}"

    def _task(self, task_id: str, ordinal: int, epoch: int, row: int, gate_step: int, evaluation_step: int) -> Task:
        config, taskset, values = self.plan.config, self.taskset, self.rows[row]
        source = config.buffer.explorer_input
        training = self.kind is TaskKind.TRAIN
        workflow = _from_row(values, taskset.format.workflow_key) or source.workflow_of(taskset, not training)
        reward = reward_named(_from_row(values, taskset.format.reward_fn_key)) or source.reward_of(taskset)
        values, files = _with_images(values, taskset)
        repeat_times = config.algorithm.repeat_times if training else taskset.repeat_times
        return Task(
            run=self.run,
            task_id=task_id,
            ordinal=ordinal,
            kind=self.kind,
            taskset=taskset.name,
            epoch=epoch,
            row=row,
            row_json=json.dumps(values, default=_as_text),
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
            images=files,
        )


class TaskMixture:
    """Training tasks of a run: several tasksets as one. The task at a position never changes.

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


def _as_text(value: Any) -> str:
    """Text for values that JSON lacks. Bytes, which may be a picture, become their number."""
    return f"{len(value)} bytes" if isinstance(value, bytes) else str(value)


def folder_of(path: str) -> Path:
    """The dataset's folder, to which the image paths of its rows are relative."""
    place = Path(path).expanduser()
    return place if place.is_dir() else place.parent


def _with_images(row: Row, taskset: TasksetConfig) -> tuple[Row, tuple[bytes, ...]]:
    """(row with digests in place of its images, images). An unreadable image is replaced by its problem.

    Messages with images become messages of text, with a marker for each image.
    """
    key = taskset.format.image_key
    if key is None:
        return row, ()
    try:
        files = images.of_row(row, key, folder_of(taskset.path), taskset.format.image_urls)
        if key == taskset.format.prompt_key:
            return {**row, key: images.as_text(row[key], key)}, files
    except DatasetError as error:
        return {**row, key: {"problem": str(error)}}, ()
    return {**row, key: [images.digest(file).hex() for file in files]}, files


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
