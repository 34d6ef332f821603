"""MLflow: the experiment is the project; the run's id is kept next to the metrics and used again after a restart."""

import importlib.util
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from trinity.runtime import files
from trinity.runtime.monitor.options import MonitorOptions

# MLflow's limits: per batch, and characters of a parameter's value and of any name.
_METRICS = 1000
_PARAMS = 100
_VALUE_CHARACTERS = 500
_NAME_CHARACTERS = 250

Item = TypeVar("Item")


class MlflowRun:
    """Tracked at `args.uri`, else MLFLOW_TRACKING_URI, else in <folder>/mlflow.

    A step trained again after a crash stands there twice: MLflow has no way to remove a point.
    """

    def __init__(self, options: MonitorOptions) -> None:
        for variable, argument in (("USERNAME", "username"), ("PASSWORD", "password")):
            if value := options.args.get(argument):
                os.environ[f"MLFLOW_TRACKING_{variable}"] = str(value)
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric: Any = Metric
        local = options.folder.absolute() / "mlflow"
        uri = options.args.get("uri") or os.environ.get("MLFLOW_TRACKING_URI")
        self._client: Any = MlflowClient(tracking_uri=uri or _local_store(local))
        note = options.folder / f"mlflow_{options.role}.id"
        self._run_id = self._resumed(note) or self._created(options, note, None if uri else local / "artifacts")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        points = [self._metric(safe_name(name), value, now, step) for name, value in metrics.items()]
        for some in _chunks(points, _METRICS):
            self._client.log_batch(self._run_id, metrics=some)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def _resumed(self, note: Path) -> str | None:
        """The run noted earlier, open again; None if there is none or this tracking server does not have it."""
        from mlflow.exceptions import MlflowException

        if not note.exists():
            return None
        run_id = note.read_text().strip()
        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "INVALID_STATE"):
                return None
            raise
        return run_id

    def _created(self, options: MonitorOptions, note: Path, artifacts: Path | None) -> str:
        from mlflow.entities import Param

        experiment = self._experiment(options.project, artifacts.as_uri() if artifacts else None)
        tags = {"role": options.role, "group": options.group}
        run_id: str = self._client.create_run(experiment, run_name=options.name, tags=tags).info.run_id
        params = [Param(safe_name(k), v[:_VALUE_CHARACTERS]) for k, v in options.flat_config().items()]
        for some in _chunks(params, _PARAMS):
            self._client.log_batch(run_id, params=some)
        files.write_atomic(note, run_id.encode())
        return run_id

    def _experiment(self, name: str, artifacts: str | None) -> str:
        """Its id. The other role may make it at the same moment."""
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name, artifact_location=artifacts))
            except MlflowException:
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)


def safe_name(name: str) -> str:
    """`eval/mean@4` as `eval/mean_at_4`: MLflow takes only letters, digits, spaces and _ - . /."""
    return re.sub(r"[^\w\-./ ]", "_", name.replace("@", "_at_"), flags=re.ASCII)[:_NAME_CHARACTERS]


def _local_store(folder: Path) -> str:
    """A database; with mlflow-skinny, which cannot write one, files, which MLflow 3 takes only on request."""
    folder.mkdir(parents=True, exist_ok=True)
    if all(importlib.util.find_spec(package) for package in ("sqlalchemy", "alembic")):
        return f"sqlite:///{folder / 'mlflow.db'}"
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    return folder.as_uri()


def _chunks(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]
