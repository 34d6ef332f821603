"""The small forms of GPU scripts, on the CPU: they run on the real parts and print their tables.

That of rollout.py is the one of benchmarks/rollout.py, which test_benchmarks_run.py has.
"""

import subprocess
import sys
from pathlib import Path

import pytest

TABLES = {
    "sync_object.py": ("pause", "the step changed", "checked in place", "difference: apply to the base", "ratio"),
    "trainer.py": ("4096, memory", "kept", "16384", "packed", "compiled", "6N", "ratio"),
    "buffer.py": ("the buffer", "trains", "publishes the weights", "of limit"),
    "membership.py": (
        "two joins",
        "one is killed in a collective",
        "two leaves by SIGTERM",
        "violations: 0,",
        "of limits",
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", TABLES)
def test_the_small_form_prints_its_table(repository: Path, script: str) -> None:
    command = [sys.executable, str(repository / "benchmarks/gpu" / script), "--cpu", "--tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    for word in TABLES[script]:
        assert word in done.stdout, done.stdout
