"""The comparison of a replay: the metrics of each step, and the weights at the end."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trinity.reading.errors import RunError
from trinity.reading.render import table
from trinity.runtime import files
from trinity.study.bisect import Metrics, lines_of_steps

_SHOWN = ("actor/grad_norm", "sample/reward_mean")
_CIRCUMSTANCES = {"ranks": int, "device": str, "threads": int, "micro_batch_tokens": int}


def circumstances(stage_folder: Path) -> dict[int, dict[str, Any]]:
    """Returns ranks, device and threads of each step of the run, as far as noted.

    The last attempt counts, as for metrics.
    """
    return {
        int(line["step"]): {name: line[name] for name, kind in _CIRCUMSTANCES.items() if type(line.get(name)) is kind}
        for line in lines_of_steps(stage_folder / "monitor" / "batches.jsonl")
    }


@dataclass(frozen=True)
class Step:
    """Metrics of one step in the run and in the replay. None: not noted."""

    step: int
    groups: int
    original: Metrics | None
    replayed: Metrics | None

    @property
    def compared(self) -> bool:
        return bool(self.original) and self.replayed is not None

    @property
    def different(self) -> list[str]:
        """Metrics with different values."""
        before, after = self.original or {}, self.replayed or {}
        if not self.compared:
            return []
        return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


@dataclass(frozen=True)
class Weights:
    """The comparison after the last step.

    `different`: tensor and greatest absolute difference; `compared`: the run kept the step.
    """

    step: int
    compared: bool
    tensors: int = 0
    different: dict[str, float | None] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Weights":
        """Reads the file that the trainer of a replay writes at its end.

        Raises RunError if it is missing or damaged.
        """
        try:
            return TypeAdapter(cls).validate_python(files.read_json(path))
        except ValidationError:
            raise RunError(f"{path} does not say how the weights compare; replay the steps again") from None


@dataclass(frozen=True)
class Report:
    """A replay and the run that it is compared with."""

    run: str
    folder: str
    begin: int
    ranks: int
    device: str
    steps: list[Step]
    weights: Weights

    @property
    def identical(self) -> bool:
        """True if at least one value was compared, and all compared values are equal."""
        compared = any(step.compared for step in self.steps) or self.weights.compared
        return compared and not self.weights.different and not any(step.different for step in self.steps)

    def as_json(self) -> dict[str, Any]:
        steps = [{**vars(step), "different": step.different, "compared": step.compared} for step in self.steps]
        return {**vars(self), "steps": steps, "weights": vars(self.weights), "identical": self.identical}


def render(report: Report) -> str:
    """Returns a table, a sentence on the weights, and the verdict."""
    return "\n".join([_table(report.steps), _about_weights(report.weights), _verdict(report)])


def _table(steps: list[Step]) -> str:
    known = {name for step in steps for name in (step.original or step.replayed or {})}
    columns = [*sorted(n for n in known if n.startswith("actor/") and n.endswith("loss")), *_SHOWN]
    columns = [name for name in columns if name in known]
    shown: dict[str, Callable[[Step], Any]] = {"step": lambda step: step.step, "groups": lambda step: step.groups}
    shown |= {name.partition("/")[2]: partial(_cell, name) for name in columns}
    return table(steps, shown | {"equal": _equal})


def _cell(name: str, step: Step) -> str:
    """Returns one number if both are equal, else the numbers of run and replay."""
    before, after = ((metrics or {}).get(name) for metrics in (step.original, step.replayed))
    shown = ["-" if value is None else f"{value:.6g}" for value in (before, after)]
    if before == after:
        return shown[0]
    if shown[0] == shown[1]:  # they differ further behind
        shown = [repr(value) for value in (before, after)]
    return " / ".join(shown)


def _equal(step: Step) -> str:
    if not step.compared:
        return "the run noted nothing" if step.replayed is not None else "not trained"
    different = [name.partition("/")[2] for name in step.different]
    return f"no: {', '.join(different)}" if different else "yes"


def _about_weights(weights: Weights) -> str:
    if not weights.compared:
        return f"weights: the run keeps no checkpoint of step {weights.step} to hold them against"
    if not weights.different:
        return f"weights: all {weights.tensors} tensors equal those of the run's checkpoint of step {weights.step}"
    known = {name: value for name, value in weights.different.items() if value is not None}
    most = max(known, key=lambda name: known[name], default="")
    by = f"; most in {most}, by {known[most]:.3g}" if most else ""
    return (
        f"weights: {len(weights.different)} of {weights.tensors} tensors differ from the run's checkpoint of step "
        f"{weights.step}{by}"
    )


def _verdict(report: Report) -> str:
    if report.identical:
        missing = [str(step.step) for step in report.steps if not step.compared]
        return "identical, bit for bit" + (f", as far as it was noted (not {', '.join(missing)})" if missing else "")
    first = next((step.step for step in report.steps if step.different), None)
    if first is not None:
        return f"NOT identical: step {first} is the first that differs"
    return "NOT identical: the weights differ" if report.weights.different else "nothing could be compared"
