"""What a real buffer on a real NATS says on /metrics of its counts, its streams and a trainer that waits."""

import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.fakes.peers import explorer
from support.servers.buffer_run import BufferRun
from support.servers.nats import NatsServer

pytestmark = pytest.mark.core


def scrape(run: BufferRun) -> dict[str, float]:
    """Values by name, or by name and stream; all of them of the run."""
    address = next(event["metrics"] for event in run.buffer.events() if event["event"] == "service.started")
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("trinity_buffer_"):
                assert sample.labels["run"] == run.run
                found[
                    " ".join([sample.name.removeprefix("trinity_buffer_"), sample.labels.get("stream", "")]).strip()
                ] = sample.value
    return found


def until(run: BufferRun, holds: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if holds(found := scrape(run)):
            return found
        time.sleep(0.2)
    raise AssertionError(f"not within a minute: {scrape(run)}")


async def test_metrics_follow_the_run(tmp_path: Path, nats_server: NatsServer) -> None:
    run = BufferRun(tmp_path, nats_server, groups=4).start()
    trainer = run.trainer()
    try:
        await trainer.begin()
        found = until(run, lambda m: m["tasks_outstanding"] > 0)
        assert (found["nats_connected"], found["ledger_step"], found["last_step"]) == (1, 0, run.steps)
        assert found["trainer_waiting_seconds"] == 0  # nothing asked for a batch yet
        async with explorer(nats_server.url, run.run):
            await trainer.batch(1)
        found = until(run, lambda m: m["ledger_step"] >= 1 and m["stream_messages experiences"] >= 4)
        assert found["groups_stored"] >= run.groups
        assert found["stream_bytes experiences"] > 0
        assert found["nats_storage_bytes"] > 0
        assert found["dead_letters"] == 0
        assert "tasks_queued" in found
    finally:
        await trainer.close()
        run.stop()
