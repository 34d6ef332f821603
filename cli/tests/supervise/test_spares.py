"""Explorers and trainers on GPUs keep a spare, which has imported their code when they die."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trinity.cli.supervise.processes.devices import Placement
from trinity.cli.supervise.stage.stage import Stage
from trinity.config import Config, make_plan
from trinity.reading.nats import NatsAccess

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("placement", "spares"),
    [
        (Placement("cpu", [], [], 1), set()),
        (Placement("cuda", ["0"], ["1"], 1), {"explorer", "trainer"}),
    ],
)
def test_processes_on_gpus_keep_a_spare(placement: Placement, spares: set[str], tmp_path: Path) -> None:
    config = Config.model_validate({"project": "p", "name": "n", "checkpoint_root_dir": str(tmp_path)})
    job: Any = SimpleNamespace(folder=tmp_path)
    nothing: Any = None
    stage = Stage(job, make_plan(config), NatsAccess("nats://127.0.0.1:1"), placement, nothing, 1)  # type: ignore[arg-type]
    stage.prepare()
    assert {child.service for child in stage.children if child.keeps_spare} == spares
