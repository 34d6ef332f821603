"""The benchmarks' small forms: they run and print their table. What they measure is looked at by people."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("script", "rows"), [("buffer.py", 3), ("rollout.py", 5)])
def test_the_small_form_prints_a_table(repository: Path, script: str, rows: int) -> None:
    command = [sys.executable, str(repository / "benchmarks" / script), "--tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    table = [line for line in done.stdout.splitlines() if line and "nats.client" not in line]
    assert len(table) == rows, done.stdout
    assert "limit" in done.stdout
