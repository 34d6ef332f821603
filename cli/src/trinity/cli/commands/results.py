"""`trinity results`: evaluation curves of many runs, and their peaks, as one table.

Read from <job>/[<stage>/]monitor/explorer.jsonl, so runs that crashed, or were stopped once they had converged, count
like finished ones. A step evaluated again after a crash counts once, with its last value.
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from trinity.cli.commands.find import jobs_root
from trinity.cli.errors import RunError
from trinity.cli.options import command, group
from trinity.cli.render import visible
from trinity.runtime import files

app = group()

METRICS = ("success", "accuracy", "steps", "attempts", "reward")
# Of rollouts, not of evaluations: R3L's ratio of second attempts that were better.
_ROLLOUT_METRICS = ("second_improve", "second_success")
_LOWER_IS_BETTER = ("steps", "attempts")
_EVALUATION = re.compile(r"eval/(?P<taskset>.+)/(?P<metric>[^/]+)/mean@(?P<n>\d+)")
_ROLLOUT = re.compile(r"rollout/(?P<metric>[^/]+)/mean")


@dataclass(frozen=True)
class Curve:
    """Values of one metric over the optimizer steps of one run. `taskset` "rollout": of training rollouts."""

    run: str
    taskset: str
    metric: str
    points: tuple[tuple[int, float], ...]

    @property
    def peak(self) -> tuple[int, float]:
        """The best point, the earliest of equal ones; best is lowest for steps and attempts."""
        sign = -1 if self.metric.partition("@")[0] in _LOWER_IS_BETTER else 1
        return max(self.points, key=lambda point: (sign * point[1], -point[0]))


def collect(folders: Sequence[Path], metrics: Sequence[str]) -> list[Curve]:
    """Every curve below the folders, ordered by run. RunError if there are none."""
    found: list[Curve] = []
    seen: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            raise RunError(f"no folder {folder}; give a job folder, or one that holds several", code=2)
        for file in sorted(folder.resolve().glob("**/monitor/explorer.jsonl")):
            if file not in seen:
                seen.add(file)
                found += _curves(_run_of(file, folder.resolve()), file, metrics)
    if not found:
        known = ", ".join(metrics)
        raise RunError(f"no evaluation of {known} below {', '.join(map(str, folders))}; --metric chooses others")
    return found


def _run_of(file: Path, root: Path) -> str:
    job = file.parent.parent
    return str(job.relative_to(root)) if job != root else job.name


def _curves(run: str, file: Path, metrics: Sequence[str]) -> Iterator[Curve]:
    points: dict[tuple[str, str], dict[int, float]] = {}
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in files.json_lines(lines):
            for step, name, value in _values(line):
                key = _key(name, metrics)
                if key is not None:
                    points.setdefault(key, {})[step] = value
    for (taskset, metric), values in sorted(points.items()):
        yield Curve(run, taskset, metric, tuple(sorted(values.items())))


def _values(line: dict[str, Any]) -> Iterator[tuple[int, str, float]]:
    """(step, name, value) of a line that names its step."""
    if type(line.get("step")) is not int:
        return
    for name, value in line.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield line["step"], name, float(value)


def _key(name: str, metrics: Sequence[str]) -> tuple[str, str] | None:
    """(taskset, metric); the metric with its number of rollouts, where there is more than one."""
    if (match := _EVALUATION.fullmatch(name)) and match["metric"] in metrics:
        times = "" if match["n"] == "1" else f"@{match['n']}"
        return match["taskset"], match["metric"] + times
    if (match := _ROLLOUT.fullmatch(name)) and match["metric"] in _ROLLOUT_METRICS:
        return "rollout", match["metric"]
    return None


_COLUMNS = ("run", "taskset", "metric", "first", "peak", "at step", "last", "last step", "evaluations")


def rows(curves: Iterable[Curve]) -> list[tuple[str, ...]]:
    """A row of each curve. `first` is the base model's where step 0 was evaluated."""
    made: list[tuple[str, ...]] = []
    for curve in curves:
        (_, first), (last_step, last), (best_step, best) = curve.points[0], curve.points[-1], curve.peak
        numbers = (_number(first), _number(best), str(best_step), _number(last), str(last_step), str(len(curve.points)))
        made.append((visible(curve.run), visible(curve.taskset), visible(curve.metric), *numbers))
    return made


def _number(value: float) -> str:
    return f"{value:.4g}"


def markdown(curves: Sequence[Curve]) -> str:
    """The table with aligned columns."""
    table = [_COLUMNS, *((*(cell.replace("|", "\\|") for cell in row),) for row in rows(curves))]
    widths = [max(len(row[index]) for row in table) for index in range(len(_COLUMNS))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in table]
    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def as_csv(curves: Sequence[Curve]) -> str:
    return _csv([_COLUMNS, *rows(curves)])


def points_csv(curves: Sequence[Curve]) -> str:
    """One line for each point of each curve."""
    points = [(c.run, c.taskset, c.metric, str(step), repr(value)) for c in curves for step, value in c.points]
    return _csv([("run", "taskset", "metric", "step", "value"), *points])


def _csv(lines: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


@command(app, "results")
def results(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FOLDER]...",
            help="Job folders, or ones that hold them; else TRINITY_CHECKPOINT_ROOT_DIR, else ./checkpoints",
        ),
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", "-m", help="Evaluation metric; may be given several times")
    ] = None,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="Write the table here, too")] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write it here as CSV")] = None,
    curves_file: Annotated[
        Path | None, typer.Option("--curves", help="Write every point of every curve here as CSV")
    ] = None,
) -> str:
    """Collect the evaluations of many runs: first, best and last value of each metric, in one table."""
    curves = collect(folders or [jobs_root()], metric or METRICS)
    table = markdown(curves)
    texts = ((markdown_file, table + "\n"), (csv_file, as_csv(curves)), (curves_file, points_csv(curves)))
    for file, text in texts:
        if file is not None:
            try:
                file.write_text(text, encoding="utf-8")
            except OSError as error:
                raise RunError(f"{file} cannot be written: {error}", code=2) from None
    return table
