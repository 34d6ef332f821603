"""The benchmarks' small forms: they run and print their tables. What they measure is looked at by people."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

TABLES = {
    "buffer.py": ("throughput", "latency", "restart", "memory", "nats-py", "sqlite", "asyncio.Queue"),
    "environment.py": ("steps/s", "attached, through the environment service", "50 episodes open at once", "engines"),
    "rollout.py": ("limit", "of plain"),
    "trainer.py": ("packing", "packed", "memory", "growth"),
    "sync.py": ("pause, requests running", "bare load", "difference, 1% changed", "publish + fetch", "ratio"),
    "sync_storage.py": ("delta", "folder", "s3", "jetstream", "of copy", "limit"),
    "sync_membership.py": ("members", "leases lost", "p99 s", "CPU s"),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", TABLES)
def test_the_small_form_prints_its_tables(repository: Path, script: str) -> None:
    command = [sys.executable, str(repository / "benchmarks" / script), "--tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    table = [line for line in done.stdout.splitlines() if line and "nats.client" not in line]
    assert len(table) >= 4, done.stdout
    for word in TABLES[script]:
        assert word in done.stdout, done.stdout
