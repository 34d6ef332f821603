"""Writes the metrics of a run to <job>/monitor/<role>.jsonl, and to TensorBoard or, by trinity-trackers, to others.

A monitor never hurts the run: what fails is logged as `runtime.monitor.failed` and counted, and the lines are written
all the same. Services behind a network are called from a thread of their own, so `log` does not wait for them.

    monitor = open_monitor(options, first_step=step)    # a restart: the steps after `step` come again
    monitor.log({"actor/loss": 0.3}, step + 1)
    monitor.close()                                     # at most 10 seconds
"""

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol

from trinity.runtime.errors import InvalidInput
from trinity.runtime.monitor.guard import Background, Complaints, Guarded
from trinity.runtime.monitor.local import Lines, TensorboardFiles
from trinity.runtime.monitor.options import Backend, MonitorOptions

__all__ = ["Backend", "Monitor", "MonitorOptions", "open_monitor", "why_not"]

_GROUP = "trinity.monitors"  # entry points of trinity-trackers: what opens a kind
_HOSTED = ("wandb", "mlflow", "swanlab", "trackio")


class Monitor(Protocol):
    """Takes metrics; neither method raises."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class _Sinks:
    """Everything goes to every sink."""

    def __init__(self, sinks: Sequence[Monitor]) -> None:
        self._sinks = sinks

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        numbers = {name: _number(value) for name, value in metrics.items()}
        for sink in self._sinks:
            sink.log(numbers, step)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def open_monitor(options: MonitorOptions, first_step: int = 0) -> Monitor:
    """Open every sink of `options.kind`. `first_step`: the newest step whose metrics stay; later ones will come again.

    Returns at once: a hosted service is reached later, from its own thread, and tried again until it answers.
    Raises InvalidInput for an unknown kind and for a package that is missing, OSError if the folder cannot be written.
    """
    kind = options.kind
    if kind not in ("none", "tensorboard", *_HOSTED):
        raise InvalidInput("monitor.monitor_type", f"is {kind!r}, must be none, tensorboard, {', '.join(_HOSTED)}")
    if kind in _HOSTED and (problem := why_not(kind)):
        raise InvalidInput("monitor.monitor_type", problem)
    options.folder.mkdir(parents=True, exist_ok=True)
    lines = Lines(options.folder / f"{options.role}.jsonl", options.most_bytes)
    sinks: list[Monitor] = [Guarded(lines, Complaints("jsonl", options.hide))]
    if kind == "tensorboard":
        sinks.append(Guarded(TensorboardFiles(options, first_step), Complaints(kind, options.hide)))
    elif kind in _HOSTED:
        sinks.append(Background(lambda: _opener(kind)(options), Complaints(kind, options.hide)))
    return _Sinks(sinks)


def why_not(kind: str) -> str:
    """Says why metrics cannot go to a hosted kind from here; empty if they can."""
    if kind not in entry_points(group=_GROUP).names:
        return f"is {kind!r}, which is in trinity-trackers, which is not installed: pip install trinity-trackers"
    return "" if _installed(kind) else f"is {kind!r}, and this package is not installed: pip install {kind}"


def _opener(kind: str) -> Callable[[MonitorOptions], Backend]:
    opener: Callable[[MonitorOptions], Backend] = entry_points(group=_GROUP)[kind].load()
    return opener


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # loaded already, by other means than a file
        return True


def _number(value: Any) -> float:
    """NaN for a value that is no number, so that one bad metric does not lose the others."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
