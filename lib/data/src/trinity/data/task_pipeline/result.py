"""The result of a pipeline."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Step:
    """One operator, or `min_score` or `top_k`, and the rows before and after it."""

    name: str
    rows_in: int
    rows_out: int
    seconds: float


@dataclass(frozen=True)
class ProcessedTaskset:
    """One training taskset. `key` is its place in the YAML, `reused`: the file was there from before."""

    key: str
    name: str
    output: Path
    rows_in: int
    rows_out: int
    steps: tuple[Step, ...]
    seconds: float
    reused: bool


@dataclass(frozen=True)
class TaskPipelineResult:
    """All training tasksets of a stage, in the YAML's order; none if it has no task pipeline."""

    tasksets: tuple[ProcessedTaskset, ...] = ()

    @property
    def rows_in(self) -> int:
        return sum(taskset.rows_in for taskset in self.tasksets)

    @property
    def rows_out(self) -> int:
        return sum(taskset.rows_out for taskset in self.tasksets)

    @property
    def seconds(self) -> float:
        return sum(taskset.seconds for taskset in self.tasksets)


def describe(result: TaskPipelineResult, with_paths: bool = True) -> Iterator[str]:
    """A line for each taskset. Those of a preview have no paths: its files are temporary."""
    for taskset in result.tasksets:
        counts = "".join(f", {step.name} {step.rows_out}" for step in taskset.steps)
        how = "made before" if taskset.reused else f"{taskset.seconds:.1f} s"
        place = f": {taskset.output}" if with_paths else ""
        rows = f"{taskset.rows_in} rows{counts}; {taskset.rows_out} rows remain"
        yield f"task pipeline of {taskset.name}: {rows} ({how}){place}"
