"""`reproducible: true` on a GPU: the same asynchronous run twice, compared bit for bit, and the cost of the mode.

    python benchmarks/gpu/reproducible.py                a 0.5 B shape, 10 steps of 16 x 8 responses, one GPU, shared
    python benchmarks/gpu/reproducible.py --gpus 2       the explorer on the first, the trainer on the second
    python benchmarks/gpu/reproducible.py --kills        kill -9 of both during the second run
    python benchmarks/gpu/reproducible.py --cpu --tiny
    python benchmarks/gpu/reproducible.py --cpu --other ../before --rounds 7 --tasks 8 --group 4 --tokens 64

Random weights; rewards follow from the tokens. The runs are equal if `trinity bisect` finds no
difference in tokens, log-probabilities, rewards, metrics and the weights of all steps. The cost is the time of a step
with the mode, over that of a third run without it. The first steps and runs with kills do not count. A run that
--folder has is not repeated.

--other: the folder of another source tree, for example from before the mode was built. Then only runs without the mode
are played, by both trees in turn, which measures the cost of the disabled mode.
"""

import argparse
import os
import random
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import whole_run
from buffer_table import Table

from support.programs.run import TrinityRun, kill_process, process_of
from trinity.study.bisect import compare

MOST_COST = 1.5
MOST_COST_OFF = 1 / 0.98
RUN_SECONDS = 400.0
FULL = {"tasks": 16, "group": 8, "tokens": 256, "steps": 10, "unmeasured": 3}
TINY = {"tasks": 2, "group": 2, "tokens": 12, "steps": 4, "unmeasured": 1}
RUNS = {"one": True, "two": True, "off": False}  # and whether the mode is on
KILLED = {"explorer": 0.3, "trainer": 0.6}  # and after which share of the steps


def parsed() -> argparse.Namespace:
    made = whole_run.parser(__doc__)
    made.add_argument("--size", choices=["0.5B", "1.5B"], default="0.5B", help="shape of the model")
    made.add_argument("--gpus", type=int, choices=[1, 2], default=1)
    made.add_argument("--offset", type=int, default=1, help="batches that the explorer may be ahead")
    made.add_argument("--only", choices=list(RUNS), nargs="+", default=list(RUNS), help="play these runs alone")
    made.add_argument(
        "--eager", action="store_true", help="vLLM without compilation and graphs: starts in half a minute"
    )
    made.add_argument("--kills", action="store_true", help="kill -9 of explorer and trainer in the second run")
    made.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of all runs")
    made.add_argument("--other", type=Path, help="another tree, whose runs without the mode are compared")
    made.add_argument("--rounds", type=int, default=3, help="with --other: runs of each tree")
    for name, value in FULL.items():
        made.add_argument(f"--{name}", type=int, default=value)
    args = made.parse_args()
    if args.cpu:
        args.size = "tiny"
    if args.tiny:
        vars(args).update(TINY)
    return args


def config(args: argparse.Namespace, folder: Path, name: str) -> dict[str, Any]:
    taskset = {
        "name": "sums", "path": str(folder / "data"), "split": "train",
        "format": {"prompt_key": "question", "response_key": "answer"},
        "default_workflow_type": "simple_workflow", "default_reward_fn_type": "spread",
    }  # fmt: skip
    return {
        "project": "benchmark",
        "name": name,
        "checkpoint_root_dir": str(folder / "jobs"),
        **({"reproducible": True} if RUNS.get(name) else {}),  # a tree from before the mode lacks this key
        "model": {"model_path": str(folder / args.size), "max_prompt_tokens": 32, "max_response_tokens": args.tokens},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": args.group, "kl_loss_fn": "none",
                      "optimizer": {"lr": 1e-5}},
        "buffer": {"batch_size": args.tasks, "total_steps": args.steps, "explorer_input": {"taskset": taskset}},
        "explorer": {"runner_per_model": 2 * args.tasks, "eval_on_startup": False, "max_timeout": RUN_SECONDS,
                     "rollout_model": {"enforce_eager": args.eager}},
        "synchronizer": {"sync_method": "checkpoint", "sync_offset": args.offset, "versions_to_keep": args.steps + 1},
        "trainer": {"save_hf_checkpoint": "never"},
        "monitor": {"monitor_type": "none"},
    }  # fmt: skip


def sources(tree: Path) -> str:
    """PYTHONPATH with a tree's packages first."""
    parts = [path for part in ("cli", "sdk", "lib/*", "services/*") for path in tree.glob(f"{part}/src")]
    own = [str(path.absolute()) for path in (tree / "proto", *parts)]
    return ":".join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])


def play(args: argparse.Namespace, folder: Path, name: str, tree: Path = whole_run.ROOT) -> Path:
    """The job of a run by a tree. Its checkpoint, which is large and not compared, is removed."""
    path, plugins = folder / f"{name}.yaml", str(Path(__file__).parent / "workflows")
    gpus = ",".join(str(index) for index in range(args.gpus))
    given = {**whole_run.environment(args, gpus), "TRINITY_PLUGIN_DIRS": plugins, "PYTHONPATH": sources(tree)}
    run = TrinityRun(whole_run.write_yaml(path, config(args, folder, name)), folder, **given)
    if not (run.job / "summary.json").exists():
        with whole_run.started(run, *args.set):
            if args.kills and name == "two":
                kill(args, run)
            whole_run.ends_well(run, RUN_SECONDS)
        for left in run.job.glob("global_step_*"):
            shutil.rmtree(left, ignore_errors=True)
    return run.job


def kill(args: argparse.Namespace, run: TrinityRun) -> None:
    for name, share in KILLED.items():
        step = int(share * args.steps)
        run.until(lambda s, step=step: (s["step"] or 0) >= step, RUN_SECONDS, f"step {step}")
        time.sleep(random.Random(name).uniform(0, 2))
        status = run.until(lambda s, name=name: process_of(s, name)["pid"], RUN_SECONDS, f"{name} runs")
        assert (status["step"] or 0) < args.steps, f"the run ended before {name} was killed"
        print(f"  kill -9 {kill_process(status, name)}: {name} at step {status['step']}", file=sys.stderr, flush=True)


def seconds_of(args: argparse.Namespace, job: Path) -> float:
    """Mean seconds of the steps that count."""
    ends = [line["time"] for line in whole_run.trained(job)][args.unmeasured - 1 :]
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def rows(args: argparse.Namespace, jobs: dict[str, Path]) -> list[tuple[str, ...]]:
    found = []
    if {"one", "two"} <= jobs.keys():
        steps, difference = compare(jobs["one"], jobs["two"])
        said = f"{len(steps)} steps" if difference is None else f"step {difference.step}: {difference.where}"
        found.append(whole_run.row("differences of two runs", said, float(difference is not None), 0.0))
    seconds = {name: seconds_of(args, job) for name, job in jobs.items()}
    found += [whole_run.plain(f"seconds a step, run {name}", f"{took:.2f}") for name, took in seconds.items()]
    if {"one", "off"} <= jobs.keys():
        plain = [took for name, took in seconds.items() if RUNS[name] and not (args.kills and name == "two")]
        cost = statistics.mean(plain) / seconds["off"]
        found.append(whole_run.row("seconds a step with the mode, over without", f"{cost:.2f}", cost, MOST_COST))
    return found


def compared_with_other(args: argparse.Namespace, folder: Path) -> list[tuple[str, ...]]:
    """Runs of both trees in turn. The first tree changes from round to round."""
    trees = {"this": whole_run.ROOT, "other": args.other}
    ratios = []
    for number in range(args.rounds):
        took = {}
        for which in list(trees)[:: -1 if number % 2 else 1]:
            took[which] = seconds_of(args, play(args, folder, f"{which}-{number}", trees[which]))
        ratios.append(took["this"] / took["other"])
        print(f"  round {number}: {took}", file=sys.stderr, flush=True)
    median = statistics.median(ratios)
    said = f"{median:.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    return [whole_run.row("seconds a step without the mode, over the other tree's", said, median, MOST_COST_OFF)]


def main() -> None:
    args = parsed()
    title = f"reproducible: {args.tasks} x {args.group} responses of up to {args.tokens} tokens, {args.size}"
    with whole_run.working_folder(args.folder) as folder:
        if not (folder / args.size).exists():
            whole_run.make_data(folder)
            whole_run.make_model(folder, args.size, args.cpu)
        if args.other:
            found = compared_with_other(args, folder)
        else:
            found = rows(args, {name: play(args, folder, name) for name in RUNS if name in args.only})
        Table(title, whole_run.COLUMNS, rows=found).show()


if __name__ == "__main__":
    main()
