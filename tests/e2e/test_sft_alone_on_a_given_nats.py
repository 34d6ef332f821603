"""A run of one SFT stage on a NATS that was there before: nothing embedded is started, a model is left.

That NATS asks for a password and is restarted during the run. The password is in no file of the run.
"""

import asyncio
import json
from pathlib import Path

import pytest

from support.programs.forked_run import ForkedRun
from support.programs.run import process_of, write_config
from support.servers.nats import NatsServer
from trinity.runtime import names
from trinity.runtime.broker import Bucket, connect

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(300)]


PASSWORD = "s3cr3t-of-nats"


async def announced(url: str) -> bytes:
    """What the run tells those who want to join."""
    async with await connect(url, "test") as broker:
        bucket = await Bucket.open(broker, names.RUNS_BUCKET)
        run = names.RunNames(names.run_id("quickstart", "arithmetic"))
        entry = await bucket.get(run.job_key)
        assert b"arithmetic/sft" in entry.value
        return entry.value


def test_it_trains_and_leaves_a_model(
    repository: Path, quickstart_model: Path, quickstart_data: Path, tmp_path: Path
) -> None:
    server = NatsServer(tmp_path / "nats", f'authorization {{ user: trinity, password: "{PASSWORD}" }}\n')
    url = server.url.replace("//", f"//trinity:{PASSWORD}@")
    source = repository / "examples/quickstart/arithmetic.yaml"
    config = write_config(source, tmp_path / "sft.yaml", {"stages": {0: {"buffer": {"total_steps": 12}}}})
    text = config.read_text()
    secret = "monitor: {monitor_type: wandb, monitor_args: {api_key: secret-of-the-run}}\n"
    config.write_text(text[: text.index("- stage_name: rft")] + secret)
    environment = {"TRINITY_MODEL_PATH": str(quickstart_model), "TRINITY_TASKSET_PATH": str(quickstart_data)}
    environment["WANDB_MODE"] = "offline"
    run = ForkedRun(config, tmp_path, TRINITY_NATS_URL=url, **environment)
    server.start()
    try:
        run.start()
        run.until(lambda s: process_of(s, "buffer")["health"] == "SERVING", 120, "the buffer serves")
        server.kill()
        log = run.job / "sft/log/buffer.log"
        run.until(lambda _: "nats.client.disconnected" in log.read_text(), 60, "the buffer has lost NATS")
        server.start()
        status = run.until(lambda s: s["step"], 120, "the first step")
        assert {p["service"] for p in status["processes"]} == {"buffer", "trainer"}
        assert status["nats_url"] == server.url
        assert run.finish(120) == 0, run.tail()
        record = asyncio.run(announced(url))
    finally:
        run.end()
        server.stop()
    assert b"secret-of-the-run" not in record
    assert PASSWORD.encode() not in record
    files = [run.output, *(path for path in (tmp_path / "jobs").rglob("*") if path.is_file())]
    assert not [path for path in files if PASSWORD.encode() in path.read_bytes()]
    job = tmp_path / "jobs/quickstart/arithmetic"
    assert (job / "sft/config.json").stat().st_mode & 0o077 == 0  # it has the YAML's keys
    assert json.loads((job / "summary.json").read_text())["steps"] == 12
    assert (job / "sft/global_step_12/actor/huggingface/model.safetensors").exists()
    assert (job / "sft/latest_checkpointed_iteration.txt").read_text() == "12"
    losses = [
        json.loads(line)["actor/sft_loss"] for line in (job / "sft/monitor/trainer.jsonl").read_text().splitlines()
    ]
    assert losses[-1] < losses[0]
