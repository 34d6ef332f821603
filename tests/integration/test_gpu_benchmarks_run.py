"""The small forms of GPU scripts, on the CPU: they run on the real parts and print their tables.

That of rollout.py is the one of benchmarks/rollout.py, which test_benchmarks_run.py has.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

TABLES = {
    "sync_object.py": ("pause", "the step changed", "checked in place", "difference: apply to the base", "ratio"),
    "sync_nccl.py": ("pause", "loading", "extra memory", "ratio"),
    "sync_nccl.py --zero3": ("pause", "loading", "extra memory", "ratio"),
    "logprobs.py": (
        "plain vLLM, with them",
        "explorer, with them",
        "mean error",
        "the explorer's formula alone",
        "ratio",
    ),
    "trainer.py": ("4096, memory", "kept", "16384", "packed", "compiled", "6N", "ratio"),
    "e2e_learns.py": ("16 = 16 + 0 + 0", "16 of 16", "15 of 15", "KL of engine and trainer", "of limit"),
    "membership.py": (
        "two joins",
        "one is killed in a collective",
        "two leaves by SIGTERM",
        "violations: 0,",
        "of limits",
    ),
}
ASYNCHRONOUS = {
    "async_vs_sync.py": ("steps an hour", "waits for experience", "is paused for weights", "staleness", "ratio"),
    "buffer.py": ("the buffer", "trains", "publishes the weights", "of limit"),
}

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("script", TABLES)
def test_the_small_form_prints_its_table(repository: Path, script: str) -> None:
    prints(repository, script, TABLES[script])


def test_both_tables_come_of_the_same_runs(repository: Path, tmp_path: Path) -> None:
    for script, words in ASYNCHRONOUS.items():
        prints(repository, f"{script} --folder {tmp_path}", words)


def prints(repository: Path, script: str, words: Iterable[str]) -> None:
    name, *arguments = script.split()
    command = [sys.executable, str(repository / "benchmarks/gpu" / name), "--cpu", "--tiny", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    for word in words:
        assert word in done.stdout, done.stdout
