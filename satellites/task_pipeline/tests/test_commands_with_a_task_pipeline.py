"""`check` and `run` find the task pipeline by its hook, and refuse its section without the satellite."""

from pathlib import Path
from typing import Any

import pytest

from support.checks.broken_yamls import changed, check
from support.fakes.data.task_pipeline import ROWS, config_of, write
from trinity.cli.supervise.checks import preflight
from trinity.cli.supervise.stage import supervisor
from trinity.config import Config
from trinity.data.datasets import read
from trinity.plugins import satellites

pytestmark = pytest.mark.core


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_of(tmp_path, write(tmp_path / "d.jsonl", ROWS), {"operators": [{"name": "exact_dedup"}], "top_k": 2})


def rows_of(config: Config) -> list[Any]:
    taskset = config.buffer.explorer_input.taskset
    assert taskset is not None and config.data_processor.task_pipeline is None
    return list(read(taskset.path))


def test_a_task_pipeline_is_refused_by_the_name_of_its_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(satellites, "find", lambda hook: None)
    path = tmp_path / "run.yaml"
    path.write_text(changed("data_processor.task_pipeline", "{top_k: 2}"))
    refused = "data_processor.task_pipeline: needs trinity-task-pipeline, which is not installed; install it, "
    assert check(path).startswith(f"{path}: line 18: {refused}")


def test_a_deep_check_reads_the_rows_that_remain(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "check_inputs", lambda plan, source: len(rows_of(plan.config)))
    ((steps, report),) = preflight.check_stages(config, "x").values()
    assert steps == 2
    (line,) = report
    assert line.startswith("task pipeline of taskset_0: 6 rows, exact_dedup 5, top_k 2; 2 rows remain (")
    assert not Path(config.checkpoint_root_dir).exists()


def test_a_run_reads_the_file_of_the_pipeline(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[Config] = []
    monkeypatch.setattr(supervisor, "_unfinished", lambda config, source: begun.append(config) or [])
    supervisor.run(config, "x")
    assert rows_of(begun[0]) == ROWS[:2]
    assert capsys.readouterr().out.startswith("task pipeline of ")
