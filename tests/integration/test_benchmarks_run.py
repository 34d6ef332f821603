"""The benchmarks' small forms: they run and print their tables. What they measure is looked at by people."""

import subprocess
import sys
from pathlib import Path

import pytest

TABLES = {
    "buffer.py": ("throughput", "latency", "restart", "memory", "nats-py", "sqlite", "asyncio.Queue"),
    "rollout.py": ("limit", "of plain"),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", TABLES)
def test_the_small_form_prints_its_tables(repository: Path, script: str) -> None:
    command = [sys.executable, str(repository / "benchmarks" / script), "--tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    table = [line for line in done.stdout.splitlines() if line and "nats.client" not in line]
    assert len(table) >= 5, done.stdout
    for word in TABLES[script]:
        assert word in done.stdout, done.stdout
