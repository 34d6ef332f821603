"""deploy/compose on two machines of the trainer: trainer-first.yaml and trainer-node.yaml, without Docker.

The first machine's trainer is on the network of this machine, the second machine is a namespace. It is killed once.
"""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.programs.trainer_site import START, sft
from support.servers.compose import Project
from support.servers.containers import missing
from trinity.cluster.certs import certs

pytestmark = [
    pytest.mark.extended,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
]
STEPS = 16


def test_a_second_machine_trains_is_killed_and_trains_again(
    repository: Path, quickstart_model: Path, quickstart_data: Path, tmp_path: Path
) -> None:
    data, files = tmp_path / "data", repository / "deploy/compose"
    shutil.copytree(quickstart_model, data / "model")
    shutil.copytree(quickstart_data, data / "sums")
    values = sft(Path("/data/model"), Path("/data/sums"), checkpoint_root_dir="/data/jobs")
    values["cluster"] = {"node_num": 2, "least_nodes": 1, "node_wait": 30, "node_timeout": 10}
    values["buffer"] |= {"total_steps": STEPS, "train_batch_size": 128}
    values["trainer"]["save_interval"] = 2
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(values))
    identity = tmp_path / "identity"
    given = {"TRINITY_CONFIG": str(config), "TRINITY_DATA": str(data), "TRINITY_IDENTITY": str(identity)}
    above = files / "trainer-first.yaml"
    with Project(files / "compose.yaml", given, tmp_path / "first", above=above) as first:
        address = first.network.address
        certs.init(identity, config=config, host=[address])
        more = {**given, "TRINITY_RUN_HOST": address, "TRINITY_NODE": "gpu-2"}
        with Project(files / "trainer-node.yaml", more, tmp_path / "second", first.network) as second:
            node, trainer = second.services["trainer-node"], first.services["trainer"]
            certs.issue("trainer", name="gpu-2", folder=identity, config=config, host=[node.container.address])
            second.up()
            first.up("nats", "buffer", "trainer")
            monitor = data / "jobs/machines/sft/monitor/batches.jsonl"
            until_ranks(monitor, 2, 3, trainer)
            node.container.kill()
            until_ranks(monitor, 2, 3, trainer)
            assert node.restarts >= 1 and trainer.restarts >= 1
            assert trainer.wait(START) == 0, trainer.container.tail()
            assert node.wait(60) == 0, node.container.tail()
    assert sorted({line["step"] for line in lines(monitor)}) == list(range(1, STEPS + 1))


def until_ranks(monitor: Path, ranks: int, more: int, trainer: Any) -> None:
    """Waits for further steps by so many ranks."""
    since, deadline = len(lines(monitor)), time.monotonic() + START
    while sum(line["ranks"] == ranks for line in lines(monitor)[since:]) < more:
        assert trainer.code is None and time.monotonic() < deadline, trainer.container.tail()
        time.sleep(0.1)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
