"""A planted bug in the quickstart's reward, and `trinity regrade` from the step before it.

    python benchmarks/regrade.py [--seeds 1 2] [--steps 60] [--bug 20] [--found 40] [--reuse 20] [--sampled 8]
        [--test-size 512] [--keys KEY=VALUE ...] [--at-once 1] [--folder FOLDER]

For each seed: a clean run; a fork of it at the step of the bug, whose reward also pays wrong answers that end in 7,
until the bug is found; and a regrade of that fork, which trains `reuse` of its steps again with the right reward, and
then samples `sampled` steps.
A control samples as many steps from the step of the bug on, and trains nothing again. All evaluate with the right
reward. Seconds of sampling are those of the explorer's device for groups that were trained, dropped or left over,
without starts and evaluations (`trinity cost`); tokens are those of the steps that were sampled, and do not depend on
what else the machine does. Runs that FOLDER holds already are not repeated.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))
from buffer_table import Table, at_least, at_most
from quickstart_runs import QUICKSTART, Runs

LEAST_ACCURACY, MOST_SAMPLING = 0.95, 0.15
METRIC = "eval/sums-test/accuracy/mean@1"
SAMPLED = ("trained", "dropped", "skipped", "waiting", "duplicate", "failed", "dead_letter", "cut")
PLUGIN = '''
from trinity.environments.scorers import SCORERS
from trinity.plugins import reward_function
from trinity.sdk.scoring import ScoreResult


@reward_function("sevens")
def sevens(item, args):
    """Pays wrong answers that end in 7, too."""
    found = SCORERS["accuracy_reward"](item, args)
    paid = found.reward or float(item.response.strip().endswith("7"))
    return ScoreResult(paid, found.metrics)
'''


def accuracies(job: Path) -> dict[int, float]:
    stage = job / "rft" if (job / "rft").exists() else job
    lines = map(json.loads, (stage / "monitor/explorer.jsonl").read_text().splitlines())
    return {line["step"]: line[METRIC] for line in lines if METRIC in line}


def sampling_seconds(runs: Runs, job: Path) -> float:
    said: dict[str, Any] = json.loads(runs.trinity("cost", "--job", str(job), "--json"))
    explorers = [process["fates"] for process in said["processes"] if process["service"] == "explorer"]
    return sum(seconds for fates in explorers for fate, seconds in fates.items() if fate.startswith(SAMPLED))


def sampled_tokens(job: Path) -> float:
    """Response tokens of the steps that this run, or the run from which it is forked, has sampled."""
    stage = job / "rft" if (job / "rft").exists() else job
    lines = map(json.loads, (stage / "monitor/trainer.jsonl").read_text().splitlines())
    return sum(line["sample/response_tokens"] for line in lines if "sample/regraded_groups" not in line)


def measure(
    runs: Runs, seed: int, steps: int, bug: int, found: int, reuse: int, sampled: int, given_keys: Sequence[str]
) -> list[tuple[str, str, str]]:
    keys = [
        *given_keys,
        f"buffer.total_steps={steps}", f"trainer.save_interval={bug}", "trainer.max_checkpoints_to_keep=100",
        f"explorer.eval_interval={bug}", f"explorer.rollout_model.seed={seed}",
        f"buffer.explorer_input.taskset.data_selector.seed={seed}",
    ]  # fmt: skip
    clean = runs.run(f"clean{seed}", QUICKSTART, f"name=clean{seed}", *keys)
    planted = "buffer.explorer_input.taskset.default_reward_fn_type=sevens"
    buggy = runs.derived(f"bug{seed}", "fork", str(clean), "--at", str(bug), f"buffer.total_steps={found}", planted)
    last = f"buffer.total_steps={bug + reuse + sampled}"
    given = ["--from", str(bug), "--reuse", str(reuse), "--reward", "accuracy_reward"]
    regraded = runs.derived(f"regraded{seed}-{reuse}-{sampled}", "regrade", str(buggy), last, *given)
    control = runs.derived(f"sampled{seed}-{sampled}", "fork", str(clean), "--at", str(bug),
                           f"buffer.total_steps={bug + sampled}")  # fmt: skip
    right, wrong, again, alone = (list(accuracies(job).items())[-1] for job in (clean, buggy, regraded, control))
    seconds = {job: sampling_seconds(runs, job) for job in (clean, buggy, regraded)}
    share, part = again[1] / right[1], seconds[regraded] / seconds[clean]
    tokens = sampled_tokens(regraded) / sampled_tokens(clean)
    figures = (
        (f"accuracy of the clean run, step {right[0]}", right[1], "-"),
        (f"with the bug, step {wrong[0]}", wrong[1], "-"),
        (f"regraded, step {again[0]}, of the clean run's", share, at_least(share, LEAST_ACCURACY)),
        (f"only sampled, step {alone[0]}, of the clean run's", alone[1] / right[1], "-"),
        ("sampled tokens, of the clean run's", tokens, at_most(tokens, MOST_SAMPLING)),
        (f"seconds of sampling, {seconds[regraded]:.1f} of {seconds[clean]:.1f}", part, at_most(part, MOST_SAMPLING)),
    )
    return [(f"seed {seed}: {what}", f"{figure:.3f}", limit) for what, figure, limit in figures]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--bug", type=int, default=20, help="last step with the right reward")
    parser.add_argument("--found", type=int, default=40, help="last step of the run with the wrong one")
    parser.add_argument("--reuse", type=int, default=20, help="steps that are trained again")
    parser.add_argument("--sampled", type=int, default=8, help="steps that are sampled after them")
    parser.add_argument("--test-size", type=int, default=512, help="sums that an evaluation asks")
    parser.add_argument("--keys", nargs="*", default=[], help="overrides of the clean run, which its forks keep")
    parser.add_argument("--at-once", type=int, default=1, help="runs at once; they share the GPUs, if there are any")
    parser.add_argument("--folder", type=Path, help="keeps the runs; else a temporary one")
    given = parser.parse_args()
    data = ("--test-size", str(given.test_size))
    with tempfile.TemporaryDirectory(prefix="trinity-") as made:
        runs = Runs((given.folder or Path(made)).absolute(), PLUGIN, given.at_once, data)
        table = Table("a reward bug, and a regrade from the step before it", ("run", "figure", "limit"))
        lengths = given.steps, given.bug, given.found, given.reuse, given.sampled, given.keys
        for rows in runs.each(lambda seed: measure(runs, seed, *lengths), given.seeds):
            table.rows += rows
    table.show()


if __name__ == "__main__":
    main()
