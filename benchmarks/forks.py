"""Forks of the quickstart: their cost, their equality, and the precision of pairs of them.

    python benchmarks/forks.py [fork] [pairs] [--pairs 20] [--steps 10] [--same-tasks] [--at-once 1] [--folder FOLDER]

`fork`: a reproducible run of 40 steps is forked at step 20 with unchanged keys; the seconds of `trinity fork`, the
bytes that the fork does not share, and the steps that are equal bit for bit.

`pairs`: for each seed two forks of step 20 with learning rates of 3e-4 and 6e-4 train `steps` steps, with the same
tasks and random numbers. The seed decides the order of the tasks and the sampling, as in two runs that a user starts
with two seeds; `--same-tasks` keeps the parent's order for all. Compared are the variances of the difference of the
mean reward: of pairs, and of runs of different seeds, Var A + Var B. Fewer than about ten pairs give only the order of
the ratio. Runs that FOLDER holds already are not repeated.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))
from buffer_table import Table, at_least, at_most
from quickstart_runs import QUICKSTART, Runs

from trinity.study.paired import compare_runs

AT, STEPS = 20, 40
MOST_SECONDS, MOST_DISK, LEAST_FACTOR = 10.0, 0.05, 5.0
RATES = (3e-4, 6e-4)
_KEYS = (f"buffer.total_steps={STEPS}", "trainer.save_interval=10", "trainer.max_checkpoints_to_keep=100",
         "reproducible=true", "explorer.rollout_model.seed=1")  # fmt: skip


def parent_of(runs: Runs) -> Path:
    return runs.run("reproducible", QUICKSTART, "name=reproducible", *_KEYS)


def own_bytes(folder: Path) -> int:
    """Bytes of files that no other folder has a link to."""
    found = [path.lstat() for path in folder.rglob("*") if path.is_file()]
    return sum(one.st_size for one in found if one.st_nlink == 1)


def all_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def measure_fork(runs: Runs, table: Table) -> None:
    parent = parent_of(runs)
    folder, measured = runs.jobs / "unchanged", runs.jobs / "unchanged.json"
    if not measured.exists():
        begin = time.monotonic()
        runs.trinity("fork", str(parent), "--at", str(AT), "--name", folder.name)
        seconds = time.monotonic() - begin
        measured.write_text(json.dumps({"seconds": seconds, "share": own_bytes(folder) / all_bytes(parent)}))
    seconds, share = (json.loads(measured.read_text())[key] for key in ("seconds", "share"))
    runs.run(folder.name, folder / "fork.yaml")
    found = json.loads(runs.trinity("bisect", str(parent / "rft"), str(folder), "--json", fails=True))
    last = found["difference"]["step"] - 1 if found["difference"] else STEPS
    table.rows.append(("trinity fork, seconds", f"{seconds:.1f}", at_most(seconds, MOST_SECONDS)))
    table.rows.append(("own bytes of the fork, of the parent's job", f"{share:.4f}", at_most(share, MOST_DISK)))
    table.rows.append(("steps after it, equal bit for bit", f"{last - AT}", at_least(last - AT, STEPS - AT)))


def measure_pairs(runs: Runs, pairs: int, steps: int, same_tasks: bool, table: Table) -> None:
    parent = parent_of(runs)

    def fork(seed: int, rate: float) -> Path:
        keys = [f"algorithm.optimizer.lr={rate}", f"explorer.rollout_model.seed={seed}",
                f"buffer.total_steps={AT + steps}", "explorer.eval_interval=1000"]  # fmt: skip
        if not same_tasks:
            keys.append(f"buffer.explorer_input.taskset.data_selector.seed={seed}")
        name = f"pair{seed}-{rate:g}-{steps}{'' if same_tasks else '-order'}"
        return runs.derived(name, "fork", str(parent), "--at", str(AT), *keys)

    folders = runs.each(lambda of: fork(*of), [(seed, rate) for seed in range(1, pairs + 1) for rate in RATES])
    compared = [compare_runs([pair]).whole for pair in zip(folders[::2], folders[1::2], strict=True)]
    means = [(whole.a, whole.b) for whole in compared]
    one, other = (list(side) for side in zip(*means, strict=True))
    paired = statistics.variance(b - a for a, b in means)
    unpaired = statistics.variance(one) + statistics.variance(other)
    factor = unpaired / paired if paired else float("inf")
    tasks = "the same tasks" if same_tasks else "each seed's order of tasks"
    note = f"{pairs} pairs of {steps} steps after step {AT}, learning rates {RATES[0]:g} and {RATES[1]:g}, {tasks}"
    table.notes.append(note)
    table.rows.append(("difference of the mean reward", f"{statistics.fmean(other) - statistics.fmean(one):+.4f}", "-"))
    table.rows.append(("variance of the paired difference", f"{paired:.2e}", "-"))
    table.rows.append(("of unpaired seeds", f"{unpaired:.2e}", "-"))
    table.rows.append(("unpaired / paired", f"{factor:.2f}", at_least(factor, LEAST_FACTOR)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["fork", "pairs"], help="fork, pairs")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--same-tasks", action="store_true", help="all pairs have the parent's order of tasks")
    parser.add_argument("--at-once", type=int, default=1, help="runs at once; they share the GPUs, if there are any")
    parser.add_argument("--folder", type=Path, help="keeps the runs; else a temporary one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trinity-") as made:
        runs = Runs((given.folder or Path(made)).absolute(), at_once=given.at_once)
        table = Table("forks of the quickstart", ("what", "figure", "limit"))
        if "fork" in given.parts:
            measure_fork(runs, table)
        if "pairs" in given.parts:
            measure_pairs(runs, given.pairs, given.steps, given.same_tasks, table)
    table.show()


if __name__ == "__main__":
    main()
