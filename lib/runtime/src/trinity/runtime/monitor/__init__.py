"""Writes the metrics of a run to <job>/monitor/<role>.jsonl, and to TensorBoard, wandb, MLflow, SwanLab or Trackio.

A monitor never hurts the run: what fails is logged as `runtime.monitor.failed` and counted, and the lines are written
all the same. Services behind a network are called from a thread of their own, so `log` does not wait for them.

    monitor = open_monitor(options, first_step=step)    # a restart: the steps after `step` come again
    monitor.log({"actor/loss": 0.3}, step + 1)
    monitor.close()                                     # at most 10 seconds
"""

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from trinity.runtime.errors import InvalidInput
from trinity.runtime.monitor.guard import Background, Complaints, Guarded
from trinity.runtime.monitor.local import Lines, TensorboardFiles
from trinity.runtime.monitor.mlflow_run import MlflowRun
from trinity.runtime.monitor.options import Backend, MonitorOptions
from trinity.runtime.monitor.swanlab_run import SwanlabRun
from trinity.runtime.monitor.trackio_run import TrackioRun
from trinity.runtime.monitor.wandb_run import WandbRun

__all__ = ["Backend", "Monitor", "MonitorOptions", "open_monitor"]

HOSTED: dict[str, Callable[[MonitorOptions], Backend]] = {
    "wandb": WandbRun,
    "mlflow": MlflowRun,
    "swanlab": SwanlabRun,
    "trackio": TrackioRun,
}


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
    if kind not in ("none", "tensorboard", *HOSTED):
        raise InvalidInput("monitor.monitor_type", f"is {kind!r}, must be none, tensorboard, {', '.join(HOSTED)}")
    if kind in HOSTED and not _installed(kind):
        raise InvalidInput(
            "monitor.monitor_type", f"is {kind!r}, and this package is not installed: pip install {kind}"
        )
    options.folder.mkdir(parents=True, exist_ok=True)
    lines = Lines(options.folder / f"{options.role}.jsonl", options.most_bytes)
    sinks: list[Monitor] = [Guarded(lines, Complaints("jsonl", options.hide))]
    if kind == "tensorboard":
        sinks.append(Guarded(TensorboardFiles(options, first_step), Complaints(kind, options.hide)))
    elif kind in HOSTED:
        sinks.append(Background(lambda: HOSTED[kind](options), Complaints(kind, options.hide)))
    return _Sinks(sinks)


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
