"""wandb, MLflow and SwanLab have the values of a run, and a restart continues it."""

import importlib
import json
import math
import struct
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from trinity.runtime import monitor
from trinity.runtime.monitor import MonitorOptions, open_monitor
from trinity.trackers.mlflow_run import safe_name
from trinity.trackers.wandb_run import run_id

pytestmark = pytest.mark.core

KEY = "k" * 20 + "0" * 20


def _options(folder: Path, kind: str = "none", **args: Any) -> MonitorOptions:
    return MonitorOptions(
        kind=kind,
        args=args,
        project="sums",
        group="tests",
        name="sums/one_trainer",
        role="trainer",
        folder=folder / "monitor",
        config={
            "model": {"model_path": "/models/q", "max_response_tokens": 8},
            "stages": [{"lr": 1e-6}, {"lr": 1e-7}],
            "monitor": {"monitor_args": {"api_key": KEY, "uri": "http://me:hunter2@there/"}},
        },
    )


def test_wandb_ids_are_safe_and_tell_runs_apart(tmp_path: Path) -> None:
    options = _options(tmp_path, "wandb")
    assert run_id(options) == run_id(replace(options, config={}, folder=tmp_path / "elsewhere"))
    assert run_id(options).startswith("sums-one-trainer-")
    assert run_id(replace(options, name="é" * 300 + "/#?")).replace("-", "").isalnum()
    others = [replace(options, **{name: "other"}) for name in ("project", "group", "name")]
    assert len({run_id(each) for each in (options, *others)}) == 4


@pytest.mark.timeout(240)
def test_wandb_offline_has_the_values_and_a_restart_has_the_same_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    options = _options(tmp_path, "wandb", api_key=KEY, tags="a,b", base_url="http://127.0.0.1:9")
    # A busy machine may not start and end wandb in the 10 s of a run.
    monkeypatch.setattr(monitor, "Background", partial(monitor.Background, close_seconds=80))
    for first in (0, 1):  # step 2 comes again
        run = open_monitor(options, first)
        for step in (first + 1, first + 2):
            run.log({"actor/loss": step + 0.25, "bad": math.nan}, step)
        with capture_logs() as logs:
            run.close()
        assert logs == []
        time.sleep(1.1)  # wandb names the folder by the second
    folders = sorted(options.folder.glob("wandb/offline-run-*"))
    assert len(folders) == 2
    assert all(folder.name.endswith(run_id(options)) for folder in folders)
    assert not list(options.folder.glob("wandb/run-*"))
    rows = [row for path in options.folder.glob("wandb/offline-run-*/*.wandb") for row in _wandb_rows(path)]
    assert sorted((row["step"], row["actor/loss"]) for row in rows) == [(1, 1.25), (2, 2.25), (2, 2.25), (3, 3.25)]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    assert not [path for path in files if b"hunter2" in path.read_bytes()]


def _wandb_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of history in wandb's own file: seven bytes, then a LevelDB log, here of one block."""
    wandb_internal_pb2: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")

    data = path.read_bytes()[7:]
    rows = []
    while data:
        length, kind = struct.unpack("<HB", data[4:7])
        assert kind == 1, "a record in several parts"
        record = wandb_internal_pb2.Record.FromString(data[7 : 7 + length])
        data = data[7 + length :]
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def test_mlflow_names_have_no_at_sign() -> None:
    assert safe_name("eval/gsm8k/mean@4") == "eval/gsm8k/mean_at_4"
    assert safe_name("a(b)é") == "a_b__"


@pytest.mark.timeout(120)
def test_mlflow_keeps_the_run_over_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    options = _options(tmp_path, "mlflow")
    for first in (0, 1):
        with capture_logs() as logs:
            run = open_monitor(options, first)
            for step in (first + 1, first + 2):
                run.log({"eval/mean@4": step + 0.25, "bad": math.nan}, step)
            deadline = time.monotonic() + 60  # a database takes its time to make
            while not (options.folder / "mlflow_trainer.id").exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            run.close()
        assert logs == []
    from mlflow import MlflowClient

    database = options.folder / "mlflow" / "mlflow.db"
    client = MlflowClient(f"sqlite:///{database}" if database.exists() else database.parent.as_uri())
    experiment = client.get_experiment_by_name("sums")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_id == (options.folder / "mlflow_trainer.id").read_text()
    assert (found.info.run_name, found.info.status) == ("sums/one_trainer", "FINISHED")
    assert found.data.params["stages.1.lr"] == "1e-07"
    assert found.data.params["monitor.monitor_args.api_key"] == "***"
    history = client.get_metric_history(found.info.run_id, "eval/mean_at_4")
    assert sorted((point.step, point.value) for point in history) == [(1, 1.25), (2, 2.25), (2, 2.25), (3, 3.25)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["monitor"]


@pytest.mark.timeout(120)
def test_swanlab_offline_has_a_folder_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("swanlab")
    options = _options(tmp_path, "swanlab", mode="offline")
    with capture_logs() as logs:
        run = open_monitor(options)
        run.log({"actor/loss": 0.25, "bad": math.nan}, 1)
        run.close()
    assert logs == []
    assert list((options.folder / "swanlab").iterdir())
