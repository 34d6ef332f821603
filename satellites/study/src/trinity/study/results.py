"""Evaluation curves of many runs, and their peaks, for `trinity results` and the pages.

They are read from <job>/[<stage>/]monitor/explorer.jsonl, so crashed and stopped runs count like finished ones. A step
that was evaluated again after a crash counts once, with its last value.
"""

import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trinity.reading.errors import RunError
from trinity.runtime import files
from trinity.study.ratings import ratings

RATING = "rating"  # of versions that played against older ones
METRICS = ("success", "accuracy", "answered", "steps", "attempts", "reward", RATING)
# Of rollouts, not of evaluations: R3L's ratio of second attempts that were better.
_ROLLOUT_METRICS = ("second_improve", "second_success")
_LOWER_IS_BETTER = ("steps", "attempts")
_EVALUATION = re.compile(r"eval/(?P<taskset>.+)/(?P<metric>[^/]+)/mean@(?P<n>\d+)")
_SCORE = re.compile(r"eval/(?P<taskset>.+)/score_against_(?P<version>\d+)/mean@\d+")
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
        """The best point, and the earliest of equal ones. Lower is better for steps and attempts."""
        sign = -1 if self.metric.partition("@")[0] in _LOWER_IS_BETTER else 1
        return max(self.points, key=lambda point: (sign * point[1], -point[0]))


def collect(folders: Sequence[Path], metrics: Sequence[str]) -> list[Curve]:
    """Returns all curves below the folders, ordered by run. Raises RunError if there are none.

    With several folders the name of a run begins with its folder, and folders without curves are named on stderr.
    """
    curves: dict[Path, list[Curve]] = {}
    without: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise RunError(f"no folder {folder}; give a job folder, or a folder of several", code=2)
        below = sorted(folder.resolve().glob("**/monitor/explorer.jsonl"))
        for file in below:
            if file not in curves:
                curves[file] = [*_curves(_run_of(file, folder, len(folders) > 1), file, metrics)]
        if not any(curves[file] for file in below):
            without.append(folder)
    found = [curve for of_file in curves.values() for curve in of_file]
    problem = f"no evaluation of {', '.join(metrics)} below {', '.join(map(str, without))}; --metric chooses others"
    if not found:
        raise RunError(problem)
    if without:
        print(f"trinity: {problem}", file=sys.stderr)
    return found


def _run_of(file: Path, folder: Path, one_of_several: bool) -> str:
    job, root = file.parent.parent, folder.resolve()
    if one_of_several:
        return str(folder / job.relative_to(root))
    return str(job.relative_to(root)) if job != root else job.name


def _curves(run: str, file: Path, metrics: Sequence[str]) -> Iterator[Curve]:
    points: dict[tuple[str, str], dict[int, float]] = {}
    scores: dict[str, dict[tuple[int, int], float]] = {}
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in files.json_lines(lines):
            for step, name, value in _values(line):
                key = _key(name, metrics)
                if key is not None:
                    points.setdefault(key, {})[step] = value
                if match := _SCORE.fullmatch(name):
                    scores.setdefault(match["taskset"], {})[step, int(match["version"])] = value
    for taskset, played in scores.items() if RATING in metrics else ():
        rated = ratings(played)
        if steps := {step for step, _ in played if step in rated}:
            points[taskset, RATING] = {step: rated[step] for step in steps}
    for (taskset, metric), values in sorted(points.items()):
        yield Curve(run, taskset, metric, tuple(sorted(values.items())))


def _values(line: dict[str, Any]) -> Iterator[tuple[int, str, float]]:
    """Yields (step, name, value) of a line that names its step, without values that are not finite."""
    if type(line.get("step")) is not int:
        return
    for name, value in line.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield line["step"], name, float(value)


def _key(name: str, metrics: Sequence[str]) -> tuple[str, str] | None:
    """Returns (taskset, metric). The metric has its number of rollouts if there is more than one."""
    if (match := _EVALUATION.fullmatch(name)) and match["metric"] in metrics:
        times = "" if match["n"] == "1" else f"@{match['n']}"
        return match["taskset"], match["metric"] + times
    if (match := _ROLLOUT.fullmatch(name)) and match["metric"] in _ROLLOUT_METRICS:
        return "rollout", match["metric"]
    return None
