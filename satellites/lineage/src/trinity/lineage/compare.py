"""`trinity compare`: differences of two runs by step, with paired intervals."""

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from trinity.commands import AsJson, command, group
from trinity.reading.errors import RunError
from trinity.reading.render import table, to_json, visible
from trinity.study.paired import Comparison, Difference, compare_runs

app = group()

Folders = Annotated[list[Path], typer.Argument(metavar="A B [A B]...", help="Job or stage folders, two of each pair")]


@command(app, "compare")
def compare(
    folders: Folders,
    metric: Annotated[str, typer.Option("--metric", help="reward, response_tokens, or a trainer's metric")] = "reward",
    as_json: AsJson = False,
) -> str:
    """Differences of two runs by step, with paired intervals; several pairs of runs together."""
    if len(folders) < 2 or len(folders) % 2:
        raise RunError(f"{len(folders)} folders are no pairs: give A B, or A B A B ... of several pairs", 2)
    stages = [stage_folder(one) for one in folders]
    if twice := next((one for one in stages if len(stages) > 2 and stages.count(one) > 1), None):
        raise RunError(f"{twice} is given twice: pairs that share a run are not independent", 2)
    found = compare_runs(list(zip(stages[::2], stages[1::2], strict=True)), metric)
    return to_json(asdict(found)) if as_json else render(found)


def render(found: Comparison) -> str:
    rows = [*found.ranges, found.whole]
    shown: dict[str, Callable[[Difference], Any]] = {
        "steps": lambda one: str(one.first) if one.first == one.last else f"{one.first}-{one.last}",
        "values" if found.over == "steps" else found.over: lambda one: one.pairs,
        "A": lambda one: f"{one.a:.4g}",
        "B": lambda one: f"{one.b:.4g}",
        "B - A": lambda one: f"{one.difference:+.4g}",
        "95 %": lambda one: "-" if one.half is None else f"± {one.half:.2g}",
        "unpaired seeds": lambda one: "-" if one.seeds is None else f"{max(1.0, one.seeds):.1f}",
    }
    lines = [table(rows, shown), verdict(found)]
    if found.alone:
        lines.append(f"{found.alone} tasks of these steps were trained by one of the runs only, and are left out")
    return visible("\n".join(lines), layout=True)


def verdict(found: Comparison) -> str:
    """Returns the sentence on the whole."""
    one = found.whole
    if one.half is None:
        return f"{found.metric}: one pair has no interval; give further pairs"
    sure = abs(one.difference) > one.half
    text = f"{found.metric}: B - A is {one.difference:+.4g} ± {one.half:.2g} over {one.pairs} pairs of {found.over}"
    text += "" if sure else ", which may be 0"
    if one.seeds is None:
        return f"{text}; all pairs differ alike" if not one.half else text
    return f"{text}; as precise as {math.ceil(max(1.0, one.seeds))} unpaired seeds of each run for one pair"


def stage_folder(given: Path) -> Path:
    """Returns the given folder of a stage, or the stage of a job that trained last. Raises RunError."""
    if (given / "monitor" / "trainer.jsonl").exists():
        return given
    below = sorted(given.glob("*/monitor/trainer.jsonl"), key=lambda path: path.stat().st_mtime)
    if not given.is_dir():
        raise RunError(f"no folder {given}; give the folder of a job or of a stage", 2)
    if not below:
        raise RunError(f"{given}: no step was trained in it", 2)
    return below[-1].parent.parent
