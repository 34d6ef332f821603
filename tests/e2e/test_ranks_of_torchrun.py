"""torchrun around `trinity-trainer serve`, of services that are started by hand: its ranks train, the first serves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support.programs.trainer_site import START, sft
from support.servers.nats import NatsServer
from support.servers.service import ServiceProcess
from trinity.runtime.names import run_id
from trinity.runtime.trust.roles import Role

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 4


def test_ranks_of_torchrun_train_and_the_first_serves(
    nats_server: NatsServer, quickstart_model: Path, quickstart_data: Path, tmp_path: Path
) -> None:
    values = sft(quickstart_model, quickstart_data, checkpoint_root_dir=str(tmp_path / "jobs"), cluster={})
    values["buffer"]["total_steps"] = STEPS
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(values))
    run, given = run_id("machines", "sft", ""), {"CONFIG_FILE": str(config)}
    settings = given | nats_server.settings(Role.BUFFER, run)
    buffer = ServiceProcess("buffer", tmp_path, **settings, LOG_GIB="0.25").start()
    of_trainer = given | nats_server.settings(Role.TRAINER, run)
    of_trainer |= {"BUFFER_ADDRESS": buffer.address, "SYNC_ADDRESS": "127.0.0.1:1", "DEVICE": "cpu"}
    environment = {f"TRINITY_TRAINER_{name}": value for name, value in of_trainer.items()}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    try:
        done = subprocess.run(
            [*torchrun, "-m", "trinity.trainer.main", "serve"],
            env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=START,
        )
    finally:
        buffer.kill()
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (tmp_path / "jobs/machines/sft/monitor/batches.jsonl").read_text().splitlines()
    assert [(line["step"], line["ranks"]) for line in map(json.loads, lines)] == [(n, 2) for n in range(1, STEPS + 1)]
