"""Numbers and places that follow from the configuration. State the bound, derive the size."""

from dataclasses import dataclass
from pathlib import Path

from trinity.config.algorithms import AlgorithmPlan, resolve
from trinity.config.schema import Config
from trinity.config.schema.buffer import TasksetConfig


@dataclass(frozen=True)
class Lengths:
    """In tokens. prompt + response <= model."""

    model: int
    prompt: int
    response: int


@dataclass(frozen=True)
class Staleness:
    """When weights travel, and how old the weights that made a batch may be.

    Batch b (from 0, trained by optimizer step b + 1) may be started by weights of step `gate(b)` or newer. Weights are
    published at multiples of `interval`. The step that trains batch b updates weights of step b, hence staleness
    b - gate(b) <= interval - 1 + offset = `bound`. With S = bound at most (S + 1) batches of tasks are outstanding.
    """

    interval: int
    offset: int

    @property
    def bound(self) -> int:
        """S, in optimizer steps. 0 is the synchronous mode."""
        return self.interval - 1 + self.offset

    def gate(self, batch: int) -> int:
        """Lowest optimizer step whose weights may start the tasks of a batch."""
        return max(0, (batch - self.offset) // self.interval * self.interval)

    def publishes(self, step: int, last_step: int | None) -> bool:
        """Whether the weights of a step become a version."""
        return step % self.interval == 0 or step == last_step


@dataclass(frozen=True)
class Plan:
    """Everything derived from one stage's Config."""

    config: Config
    algorithm: AlgorithmPlan
    lengths: Lengths
    staleness: Staleness

    @property
    def groups_per_step(self) -> int:
        """P: groups (or, offline, rows) of one optimizer step."""
        buffer = self.config.buffer
        if self.algorithm.offline:
            return buffer.train_batch_size
        return (buffer.train_batch_size // self.config.algorithm.repeat_times) or buffer.batch_size

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps if the YAML says; otherwise they follow from the length of the taskset."""
        return self.config.buffer.total_steps or self.config.trainer.total_steps

    def steps_for(self, rows: int) -> int:
        """Optimizer steps for a taskset of so many rows; a last batch that would not be full is not trained."""
        return self.total_steps or rows * self.config.buffer.total_epochs // self.groups_per_step

    @property
    def job_dir(self) -> Path:
        """<root>/<project>/[group/]<name>, absolute."""
        config = self.config
        parts = [config.project, *([config.group] if config.group else []), *config.name.split("/")]
        return Path(config.checkpoint_root_dir).expanduser().absolute().joinpath(*parts)

    @property
    def micro_batch_tokens(self) -> int:
        """Most tokens of one micro-batch of the trainer."""
        return max(self.config.trainer.max_token_len_per_gpu or 2 * self.lengths.model, self.lengths.model)

    @property
    def taskset(self) -> TasksetConfig | None:
        source = self.config.buffer.explorer_input
        taskset = source.taskset or next(iter(source.tasksets), None)
        return _named(taskset, "taskset_0") if taskset else None

    @property
    def eval_tasksets(self) -> list[TasksetConfig]:
        source = self.config.buffer.explorer_input
        return [_named(taskset, f"eval_taskset_{index}") for index, taskset in enumerate(source.eval_tasksets)]


def make_plan(config: Config) -> Plan:
    """The plan of a checked Config without stages."""
    return Plan(
        config=config,
        algorithm=resolve(config.algorithm),
        lengths=_lengths(config),
        staleness=Staleness(config.synchronizer.sync_interval, config.synchronizer.sync_offset),
    )


def _lengths(config: Config) -> Lengths:
    model = config.model
    total, prompt, response = model.max_model_len, model.max_prompt_tokens, model.max_response_tokens
    if total is None:
        if prompt is None or response is None:
            return Lengths(0, 0, 0)  # mode explore: the run it joins knows
        return Lengths(prompt + response, prompt, response)
    if prompt is None and response is None:
        return Lengths(total, total - total // 2, total // 2)
    if response is None:
        assert prompt is not None
        return Lengths(total, prompt, total - prompt)
    return Lengths(total, prompt if prompt is not None else total - response, response)


def _named(taskset: TasksetConfig, name: str) -> TasksetConfig:
    return taskset if taskset.name else taskset.model_copy(update={"name": name})
