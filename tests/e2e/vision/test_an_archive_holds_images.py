"""A run archives episodes with pictures; a run without explorers trains from the archive what the first one stored."""

import asyncio
import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.checks.audit import messages
from support.fakes.data.archives import facts
from support.fakes.data.vision import EXAMPLE, make_model
from support.programs.run import TrinityRun, write_config
from support.servers.nats import NatsServer
from trinity.archive.reader import read_experiences
from trinity.data.experience import Group, TaskKind
from trinity.data.wire import decode_outcome
from trinity.runtime.broker import connect
from trinity.runtime.names import RunNames, run_id

pytestmark = [
    pytest.mark.extended,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("torchvision") is None, reason="vLLM's Qwen2.5-VL needs torchvision: '.[vision]'"
    ),
]

STEPS, BATCH, ROLLOUTS = 2, 4, 2


def test_what_was_archived_is_trained(tmp_path: Path) -> None:
    make_data = [sys.executable, str(EXAMPLE / "make_data.py"), "--episodes", str(tmp_path / "data")]
    subprocess.run(make_data, check=True, timeout=60, capture_output=True)
    archive = tmp_path / "kept.jsonl"
    source: dict[str, Any] = {"storage_type": "file", "path": str(archive)}
    changes: dict[str, Any] = {
        "algorithm": {"repeat_times": ROLLOUTS},
        "buffer": {
            "total_steps": STEPS,
            "batch_size": BATCH,
            "explorer_input": {"eval_tasksets": []},
            "trainer_input": {"experience_buffer": source},
        },
    }
    paths = {
        "TRINITY_MODEL_PATH": str(make_model(tmp_path / "model")),
        "TRINITY_TASKSET_PATH": str(tmp_path / "data"),
    }
    config = write_config(EXAMPLE / "counting.yaml", tmp_path / "counting.yaml", changes)
    explored = TrinityRun(config, tmp_path, **paths)
    try:
        explored.start("--plugin-dir", str(EXAMPLE / "plugins"))
        assert explored.finish(600) == 0, explored.tail()
    finally:
        explored.end()
    stored = asyncio.run(asyncio.wait_for(_on_the_broker(explored), 120))
    read = [_facts(group) for group in read_experiences(str(archive), "experience_buffer")]
    assert read and read == stored[: len(read)]
    assert all(len(one.images) == 2 for group in read_experiences(str(archive), "x") for one in group.experiences)

    values = yaml.safe_load((EXAMPLE / "counting.yaml").read_text()) | {"mode": "train", "name": "again"}
    values["algorithm"]["repeat_times"] = ROLLOUTS
    sizes = {"total_steps": STEPS, "train_batch_size": BATCH * ROLLOUTS}
    values["buffer"] = {**sizes, "trainer_input": {"experience_buffer": source}}
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(values))
    trained = TrinityRun(again, tmp_path, **paths)
    try:
        trained.start()
        assert trained.finish(300) == 0, trained.tail()
    finally:
        trained.end()
    lines = (trained.job / "log/trainer.log").read_text().splitlines()
    done = [line for line in map(json.loads, lines) if line["event"] == "trainer.step.done"]
    assert [line["step"] for line in done] == [1, 2]
    # The first version sampled the first groups.
    assert done[0]["actor/mismatch/kernel_logprob_diff"] < 1e-4, done[0]


def _facts(group: Group) -> str:
    """protobuf gives metrics in any order."""
    ordered = [replace(one, metrics=dict(sorted(one.metrics.items()))) for one in group.experiences]
    return facts(replace(group, experiences=tuple(ordered)))


async def _on_the_broker(run: TrinityRun) -> list[str]:
    server = NatsServer(run.job / "nats", users=run.job / "identity/nats")
    names = RunNames(run_id("vision", "counting"))
    server.start()
    try:
        async with await connect(server.url, "test", creds=server.admin()) as broker:
            found = [decode_outcome(m.data) for m in await messages(broker, names.experiences_stream)]
    finally:
        server.stop()
    return [_facts(one) for one in found if isinstance(one, Group) and one.task.kind is TaskKind.TRAIN]
