"""Replays of a stage by `trinity replay`: <stage>/replay/<name>/replay.json."""

from dataclasses import dataclass
from pathlib import Path

from trinity.runtime import files

_MOST = 20


@dataclass(frozen=True)
class Step:
    """A replayed step. `different`: metrics with another value; `compared`: both runs noted some."""

    step: int
    different: list[str]
    compared: bool


@dataclass(frozen=True)
class Replay:
    """`identical`: all compared values are equal, bit for bit. `weights`: tensors that differ at the end."""

    name: str
    identical: bool
    steps: list[Step]
    weights: list[str]

    @property
    def first_different(self) -> int | None:
        """The first step with another metric; None without one."""
        return next((one.step for one in self.steps if one.different), None)

    def of_step(self, number: int) -> Step | None:
        """Returns the result for one step; None if the replay has not trained it."""
        return next((one for one in self.steps if one.step == number), None)


def read(folder: Path | None) -> list[Replay]:
    """Returns the newest replays of a stage, newest first by their end, without damaged ones."""
    if folder is None:
        return []
    found = [(_seconds(path), path) for path in folder.glob("replay/*/replay.json")]
    read = [_replay(path) for _, path in sorted(found, reverse=True)[:_MOST]]
    return [one for one in read if one is not None]


def _seconds(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _replay(path: Path) -> Replay | None:
    try:
        report = files.read_json(path)
        if not isinstance(report, dict):
            return None
        steps = [
            Step(int(one["step"]), [str(metric) for metric in one["different"]], bool(one["compared"]))
            for one in report["steps"]
        ]
        weights = [str(tensor) for tensor in report["weights"]["different"]]
        return Replay(path.parent.name, bool(report["identical"]), steps, weights)
    except (OSError, KeyError, TypeError, ValueError, OverflowError):
        return None
