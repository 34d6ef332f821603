"""`trinity results`: evaluation curves of many runs, and their peaks, as one table."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trinity.commands import AsJson, command, group
from trinity.reading.errors import RunError
from trinity.reading.find import jobs_root
from trinity.reading.render import to_json, visible
from trinity.study.results import METRICS, Curve, collect

app = group()

_COLUMNS = ("run", "taskset", "metric", "first", "peak", "at step", "last", "last step", "evaluations")


def rows(curves: Iterable[Curve]) -> list[tuple[str, ...]]:
    """Returns a row of each curve. `first` is the value of the base model if step 0 was evaluated."""
    made: list[tuple[str, ...]] = []
    for curve in curves:
        (_, first), (last_step, last), (best_step, best) = curve.points[0], curve.points[-1], curve.peak
        numbers = (_number(first), _number(best), str(best_step), _number(last), str(last_step), str(len(curve.points)))
        made.append((visible(curve.run), visible(curve.taskset), visible(curve.metric), *numbers))
    return made


def _number(value: float) -> str:
    return f"{value:.4g}"


def markdown(curves: Sequence[Curve]) -> str:
    """Returns the table with aligned columns."""
    table = [_COLUMNS, *((*(cell.replace("|", "\\|") for cell in row),) for row in rows(curves))]
    widths = [max(len(row[index]) for row in table) for index in range(len(_COLUMNS))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in table]
    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def as_csv(curves: Sequence[Curve]) -> str:
    return _csv([_COLUMNS, *rows(curves)])


def points_csv(curves: Sequence[Curve]) -> str:
    """Returns one line for each point of each curve."""
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
            help="Job folders, or folders of them; else TRINITY_CHECKPOINT_ROOT_DIR, else ./checkpoints",
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
    as_json: AsJson = False,
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
    return to_json([{**asdict(curve), "peak": curve.peak} for curve in curves]) if as_json else table
