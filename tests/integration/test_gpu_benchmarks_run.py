"""The small forms of GPU scripts, on the CPU: they run on the real parts and print their tables.

That of rollout.py is the one of benchmarks/rollout.py, which test_benchmarks_run.py has. Whole runs sample with
transformers (support/programs/small_form.py): what these scripts read is what the other parts leave.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest

from support.programs import small_form

TABLES = {
    "sync_object.py": ("pause", "the step changed", "checked in place", "difference: apply to the base", "ratio"),
    "version_live.py": ("tiny, quiet", "tiny, busy", "before", "now", "pause", "LIVE"),
    "sync_nccl.py": ("pause", "loading", "extra memory", "ratio"),
    "sync_nccl.py --zero3": ("pause", "loading", "extra memory", "ratio"),
    "logprobs.py": (
        "plain vLLM, with them",
        "explorer, with them",
        "mean error",
        "the explorer's formula alone",
        "ratio",
    ),
    "quantized.py": ("int8 weights", "loads in s", "of the first", "KL"),
    "trainer.py": ("4096, memory", "none", "16384", "packed", "branched shared", "compiled", "6N", "ratio"),
    "trainer.py sequence-16k": ("sequence-16k", "tokens/s"),
    "trainer.py --size 7B-A1B 4096": ("4096", "6N", "tokens/s"),
    "tenants.py": ("one after the other", "at once", "8"),
    "tinker_tenants.py": ("one after the other", "at once", "an hour"),
    "noisy_tenant.py": ("x 1", "x 8", "with pauses alone", "lost"),
    "vision.py": ("rollout", "trainer", "language", "images, tokens/s", "ratio"),
    "e2e_learns.py": ("16 = 16 + 0 + 0", "16 of 16", "15 of 15", "KL of engine and trainer", "of limit"),
    "real_model.py": ("seed-1, templates it never saw", "what it took", "GPU minutes", "limit"),
    "against_trl.py --only 2": ("shared, sync", "samples/s", "publishes", "of TRL"),
    "against_verl.py --only 1 2": (
        "veRL, colocated: verl is not installed",
        "shared, sync",
        "tokens/step",
        "of its sync",
    ),
    "reproducible.py --only off": ("seconds a step, run off", "of limit"),
    "machines.py": ("killed: until a step by the others", "back: until a step by all", "of limit"),
    "goodput.py": ("samples/s undisturbed", "of undisturbed", "the trainer killed", "the first step", "of limit"),
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
def test_the_small_form_prints_its_table(repository: Path, script: str, tmp_path: Path) -> None:
    prints(repository, script, tmp_path, TABLES[script])


def test_both_tables_come_of_the_same_runs(repository: Path, tmp_path: Path) -> None:
    for script, said in ASYNCHRONOUS.items():
        prints(repository, f"{script} --folder {tmp_path}", tmp_path, said)


def prints(repository: Path, script: str, folder: Path, said: Iterable[str]) -> None:
    name, *arguments = script.split()
    given = "--cpu", "--tiny", *arguments
    printed = small_form.printed(repository / "benchmarks/gpu" / name, given, folder / f"printed by {name}")
    for part in said:
        assert part in printed, printed
