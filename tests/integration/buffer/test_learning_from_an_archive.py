"""An archive of one run read back by another: as SFT, and as reinforcement learning without explorers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from support.fakes.data.experience import make_group, make_task
from support.servers.buffer_run import BufferRun
from support.servers.nats import NatsServer
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.archive import open_archive
from trinity.config import ConfigError, load
from trinity.config.algorithms import resolve
from trinity.config.schema.algorithm import AlgorithmConfig
from trinity.data.wire import decode_outcome
from trinity.trainer.data.batch import from_groups
from trinity.trainer.data.client import BufferClient

pytestmark = pytest.mark.core

GROUPS = 6


def archive_at(path: str) -> None:
    archive = open_archive(path, "experience_buffer", "first-run")
    archive.append([(i, make_group(make_task(i, run="first-run"), version=i)) for i in range(1, GROUPS + 1)], GROUPS)
    archive.close()


def changes(path: str, storage: str, **algorithm: Any) -> dict[str, Any]:
    source = {"storage_type": storage, "path": path}
    return {
        "mode": "train",
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4, **algorithm},
        "buffer": {"train_batch_size": 8, "total_steps": 5, "trainer_input": {"experience_buffer": source}},
        "synchronizer": {"sync_interval": 1},
    }


@pytest.mark.parametrize(("file", "storage"), [("kept.jsonl", "file"), ("kept.db", "sql"), ("kept.parquet", "file")])
async def test_an_archive_is_trained_on_in_ledger_order_without_explorers(
    tmp_path: Path, nats_server: NatsServer, file: str, storage: str
) -> None:
    archive_at(str(tmp_path / file))
    run = BufferRun(tmp_path, nats_server, **changes(str(tmp_path / file), storage))
    run.buffer.start()
    trainer = run.trainer()
    try:
        first = [await trainer.batch(step) for step in (1, 4)]
        run.buffer.kill()
        run.buffer.start()
        assert [await trainer.batch(step) for step in (1, 4)] == first
        entries = [await trainer.entry(step) for step in (1, 2, 3, 4)]
        of_the_trainer = BufferClient(run.buffer.address, run.run)
        of_the_trainer.start(1)
        read = await asyncio.to_thread(of_the_trainer.next, 30)
        of_the_trainer.close()
    finally:
        await trainer.close()
        run.stop()
    assert read is not None and len(read.groups) == 2
    assert [list(entry.rows) for entry in entries] == [[0, 1], [2, 3], [4, 5], [0, 1]]
    parts = [pb.BatchPart.FromString(part) for part in first[0]]
    outcomes = [part.group.outcome for part in parts if part.HasField("group")]
    assert [decode_outcome(outcome).task.task_id for outcome in outcomes] == ["sums/0/1", "sums/0/2"]
    batch = from_groups(parts[0].entry, outcomes, resolve(AlgorithmConfig(algorithm_type="grpo")))
    assert [s.reward for s in batch.sequences] == [
        e.reward for i in (1, 2) for e in make_group(make_task(i)).experiences
    ]


@pytest.mark.parametrize(("file", "storage"), [("kept.jsonl", "file"), ("kept.db", "sql"), ("kept.parquet", "file")])
async def test_sft_learns_from_an_archive_and_from_rows_alike(
    tmp_path: Path, nats_server: NatsServer, file: str, storage: str
) -> None:
    archive_at(str(tmp_path / file))
    change = changes(str(tmp_path / file), storage, algorithm_type="sft")
    run = BufferRun(tmp_path, nats_server, **change)
    run.buffer.start()
    trainer = run.trainer()
    try:
        parts = [pb.BatchPart.FromString(part) for part in await trainer.batch(1)]
    finally:
        await trainer.close()
        run.stop()
    outcomes = [part.group.outcome for part in parts if part.HasField("group")]
    assert len(outcomes) == 8, "a row is a group"
    batch = from_groups(parts[0].entry, outcomes, resolve(AlgorithmConfig(algorithm_type="sft")))
    assert batch.totals.tokens == sum(group.response_tokens for group in map(decode_outcome, outcomes))


def test_what_is_missing_for_it_is_said_before_anything_starts(tmp_path: Path) -> None:
    document = {"model": {"model_path": "m", "max_model_len": 64}, **changes(str(tmp_path / "kept.csv"), "file")}
    document["buffer"].pop("total_steps")
    (tmp_path / "run.yaml").write_text(json.dumps(document))
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / "run.yaml")
    text = str(refused.value)
    assert "buffer.trainer_input.experience_buffer.path" in text
    assert "buffer.total_steps: is missing" in text
