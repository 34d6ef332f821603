"""A real model learns: GRPO through all services on word problems that it half knows, and TRL in equal GPU time.

    python benchmarks/gpu/real_model.py --model FOLDER         two GPUs; about 17 minutes, TRL and judge included
    python benchmarks/gpu/real_model.py --model FOLDER --quantization fp8 --gpus 1    engines round weights
    python benchmarks/gpu/real_model.py --cpu --tiny           the quickstart's model, which learns nothing here
    python benchmarks/gpu/real_model.py --folder F --picture P.svg    from the runs in --folder; needs matplotlib

FOLDER has a small instruct model. word_problems.py makes the data, or --data has it. Accuracy is measured by greedy
replies on problems outside of training: of trained templates with other numbers and names, and of untrained templates.
The curves are the runs' evaluations. Plain vLLM measures before and after again on the model folders, with twice the
room for a reply (real_model_judge.py). Problems of one template are alike, so intervals come from a bootstrap over
templates. Every part is saved as a file in --folder, and not repeated. TRL begins no step later, counted from the
command, than the first seed began its last step.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import whole_run
from buffer_table import Table
from real_model_judge import SPLITS
from word_problems import make

from support.programs.run import TrinityRun

FULL = {"tasks": 64, "group": 8, "steps": 48, "every": 12, "tokens": 512, "train": 6400, "test": 512}
TINY = {"tasks": 2, "group": 2, "steps": 2, "every": 2, "tokens": 16, "train": 40, "test": 20}
PROMPT, TINY_PROMPT = 256, 1024  # tokens; the quickstart's model has one for each character
WARMUP = 5
TRL_ROWS = 32  # of a micro-batch: with 16 it took 30 steps where it takes 35
RUN_SECONDS, JUDGE_SECONDS = 900.0, 280.0
LABELS = {"same": "templates of the training", "new": "templates it never saw"}
KL = {"kl": "actor/mismatch/kernel_kl", "stale_kl": "actor/mismatch/stale_kl"}  # engine against trainer
PARTS = ("wait", "buffer", "step", "publish", "save")
TRL_MORE_SECONDS = 150.0  # than its last step may need to begin
_RESAMPLES = 2000

Part = dict[str, Any]


def parsed() -> argparse.Namespace:
    made = whole_run.parser(__doc__)
    made.add_argument("--model", type=Path, help="a Hugging Face folder; not needed with --tiny")
    made.add_argument("--data", type=Path, help="what word_problems.py made; else it is made")
    made.add_argument("--lr", type=float, default=5e-6)
    made.add_argument("--quantization", help="of the engines' weights, as vLLM names it: fp8")
    made.add_argument("--gpus", type=int, default=2, help="1: explorer and trainer share it")
    made.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    made.add_argument("--memory", type=float, help="share of a GPU's memory for the engine; else as the run decides")
    made.add_argument("--picture", type=Path, help="draw this file of what --folder has, and play nothing")
    for name, value in FULL.items():
        made.add_argument(f"--{name}", type=int, default=value)
    args = made.parse_args()
    if args.tiny:
        vars(args).update(TINY, seeds=[1])
    elif args.model is None and args.picture is None:
        made.error("--model is needed")
    return args


def config(args: argparse.Namespace, folder: Path, seed: int) -> dict[str, Any]:
    """The YAML of a run: explorers one step ahead, weights by the collective group, answers in a box."""
    columns = {"prompt_key": "question", "response_key": "answer"}
    taskset = {
        "name": "train",
        "path": str(args.data / "train.jsonl"),
        "format": columns,
        "default_workflow_type": "math_boxed_workflow",
        "data_selector": {"selector_type": "shuffle", "seed": seed},
    }
    evaluated = [
        {
            "name": name,
            "path": str(args.data / f"{name}.jsonl"),
            "format": columns,
            "rollout_args": {"temperature": 0.0},
            "default_workflow_type": "math_eval_workflow",
        }
        for name in SPLITS
    ]
    engine: dict[str, Any] = {"seed": seed, "max_num_seqs": 1024}
    if args.quantization:
        engine["engine_args"] = {"quantization": args.quantization}
    if args.memory:
        engine["gpu_memory_utilization"] = args.memory
    return {
        "project": "benchmark",
        "name": f"seed-{seed}",
        "checkpoint_root_dir": str(folder / "jobs"),
        "model": {"model_path": str(args.model), "max_prompt_tokens": TINY_PROMPT if args.tiny else PROMPT,
                  "max_response_tokens": args.tokens},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": args.group, "kl_loss_fn": "none",
                      "optimizer": {"lr": args.lr, "lr_warmup_steps": min(WARMUP, args.steps)}},
        "buffer": {"batch_size": args.tasks, "total_steps": args.steps, "save_experiences": False,
                   "explorer_input": {"taskset": taskset, "eval_tasksets": evaluated}},
        "explorer": {"runner_per_model": 4 * args.tasks, "eval_interval": args.every, "max_timeout": RUN_SECONDS,
                     "rollout_model": engine},
        "synchronizer": {"sync_method": "nccl", "sync_offset": 1},
        "monitor": {"monitor_type": "none"},
    }  # fmt: skip


def play(args: argparse.Namespace, folder: Path, seed: int) -> Part:
    """One run: its curve, its steps, its cost, and the folder of its trained model."""
    values = config(args, folder, seed)
    run = TrinityRun(whole_run.write_yaml(folder / f"seed-{seed}.yaml", values), folder, **whole_run.environment(args))
    begin = time.time()
    with whole_run.started(run):
        whole_run.ends_well(run, RUN_SECONDS)
    seconds = time.time() - begin
    summary, steps = json.loads((run.job / "summary.json").read_text()), whole_run.trained(run.job)
    learnt = next(run.job.glob(f"global_step_{args.steps}/actor/huggingface"))
    model = shutil.copytree(learnt, folder / f"models/seed-{seed}", dirs_exist_ok=True)
    for left in [run.job / "weights", *run.job.glob("global_step_*")]:
        shutil.rmtree(left, ignore_errors=True)
    return {
        "model": str(model),
        "seconds": seconds,
        "gpu_seconds": args.gpus * seconds,
        "trained_after": steps[-1]["time"] - begin,
        "tokens_generated": summary["tokens_generated"],
        "tokens_trained": summary["tokens_trained"],
        "curve": [{"step": e["step"], "split": e["taskset"], "accuracy": e["metrics"]["accuracy/mean@1"]}
                  for e in evaluations(summary)],
        "steps": [{"step": s["step"], "seconds": s["time"] - begin, "reward": s["sample/reward_mean"],
                   "tokens": s["sample/response_tokens"] / (args.tasks * args.group)} for s in steps],
        "parts": {part: sum(s[f"time/{part}"] for s in steps) for part in PARTS},
        **{key: _mean(steps, metric) for key, metric in KL.items()},
    }  # fmt: skip


def _mean(steps: list[dict[str, Any]], metric: str) -> float | None:
    found = [step[metric] for step in steps if metric in step]
    return sum(found) / len(found) if found else None


def evaluations(summary: dict[str, Any]) -> list[dict[str, Any]]:
    return [e for stage in summary.get("stages") or [summary] for e in stage["evaluations"]]


def play_trl(args: argparse.Namespace, folder: Path, seconds: float) -> Part:
    """TRL on the same GPUs, for as many seconds from its command. Without TRL, the reason for the missing result."""
    if importlib.util.find_spec("trl") is None:
        return {"missing": "trl is not installed"}
    out, began = folder / "trl", time.time()
    out.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "1" if args.cpu else "2",
               "--standalone", str(Path(__file__).with_name("real_model_trl.py"))]  # fmt: skip
    given = {"model": args.model, "data": args.data, "out": out, "tasks": args.tasks, "group": args.group,
             "steps": args.steps if args.tiny else 10_000, "tokens": args.tokens, "seed": 1, "rows": TRL_ROWS,
             "lr": args.lr, "warmup": WARMUP, "seconds": seconds}  # fmt: skip
    command += [part for name, value in given.items() for part in (f"--{name}", str(value))]
    own = {"HF_HUB_OFFLINE": "1", "REAL_MODEL_BEGAN": str(began)}
    with (folder / "trl.out").open("w") as log:
        peer = subprocess.Popen([*command, *(["--cpu"] if args.cpu else [])], stdout=log, stderr=log, process_group=0,
                                env={**os.environ, **whole_run.environment(args), **own})  # fmt: skip
        try:
            peer.wait(seconds + TRL_MORE_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"  TRL: not within {seconds + TRL_MORE_SECONDS:.0f} s", file=sys.stderr)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(peer.pid, signal.SIGKILL)
    took = time.time() - began
    if peer.wait() or not (out / "model/config.json").exists():
        return {"missing": f"TRL ended with {peer.returncode}: see {folder / 'trl.out'}"}
    steps = json.loads((out / "steps.json").read_text())
    tokens = int(sum(step["tokens"] for step in steps) * args.tasks * args.group)
    return {"model": str(out / "model"), "seconds": took, "gpu_seconds": 2 * took, "steps": steps,
            "tokens_generated": tokens, "tokens_trained": tokens}  # fmt: skip


def judge(args: argparse.Namespace, folder: Path, models: dict[str, str]) -> None:
    """judged-NAME.json of each model, one at a time on each GPU."""
    script, running = Path(__file__).with_name("real_model_judge.py"), []
    for index, (name, model) in enumerate(models.items()):
        out = folder / f"judged-{name}.json"
        if out.exists():
            continue
        tokenizer = Path(model) / "tokenizer.json"
        if not tokenizer.exists():
            shutil.copy(args.model / "tokenizer.json", tokenizer)
        gpu = {} if args.cpu else {"CUDA_VISIBLE_DEVICES": str(index % args.gpus)}
        command = [sys.executable, str(script), model, str(args.data), str(out), "--tokens", str(2 * args.tokens)]
        command += ["--memory", str(args.memory)] if args.memory else []
        with (folder / f"judged-{name}.out").open("w") as log:
            running.append(subprocess.Popen([*command, *(["--cpu"] if args.cpu else [])], stdout=log, stderr=log,
                                            env={**os.environ, **gpu}))  # fmt: skip
        if args.cpu or index % args.gpus == args.gpus - 1 or index == len(models) - 1:
            for process in running:
                try:
                    process.wait(JUDGE_SECONDS)
                finally:
                    process.kill()
            running.clear()


def part(folder: Path, name: str, play_it: Any) -> Part:
    """The result in the file. A missing result is played and saved."""
    path = folder / f"{name}.json"
    if not path.exists():
        print(f"  {time.strftime('%H:%M:%S')} {name}", file=sys.stderr, flush=True)
        path.write_text(json.dumps(play_it(), indent=1))
    found: Part = json.loads(path.read_text())
    return found


def played(args: argparse.Namespace, folder: Path) -> dict[str, Part]:
    """Every run by name. `before` is the model before training, without a run."""
    folder.mkdir(parents=True, exist_ok=True)
    if args.tiny:
        args.model = whole_run.make_model(folder, "tiny", args.cpu)
    args.data = args.data or make(folder / "problems", args.train, args.test)
    runs: dict[str, Part] = {}
    names = [f"seed-{seed}" for seed in args.seeds]
    for name in names if args.quantization else [*names, "trl"]:
        if name == "trl":
            run = part(folder, name, lambda: play_trl(args, folder, runs[names[0]]["trained_after"]))
        else:
            run = part(folder, name, lambda name=name: play(args, folder, int(name.removeprefix("seed-"))))
        runs[name] = run
        models = {name: run["model"] for name, run in runs.items() if "model" in run}
        if name in (names[0], "trl") or args.quantization:  # before and the first run, then the others
            judge(args, folder, {"before": str(args.model), **models})
    return runs


def gain(after: list[Part], before: list[Part] | None = None) -> tuple[float, float, float]:
    """Accuracy, or its gain over `before`, with the ends of its 95 % interval: a bootstrap over templates."""
    by_template: dict[int, list[float]] = defaultdict(list)
    for index, row in enumerate(after):
        by_template[int(row["template"])].append(row["right"] - (before[index]["right"] if before else 0.0))
    groups = [(sum(values), len(values)) for values in by_template.values()]
    rng, means = random.Random(0), []
    for _ in range(_RESAMPLES):
        drawn = rng.choices(groups, k=len(groups))
        means.append(sum(total for total, _ in drawn) / sum(count for _, count in drawn))
    means.sort()
    mean = sum(total for total, _ in groups) / sum(count for _, count in groups)
    return mean, means[int(0.025 * _RESAMPLES)], means[int(0.975 * _RESAMPLES) - 1]


def tables(folder: Path, runs: dict[str, Part]) -> tuple[Table, Table]:
    judged = {path.stem.removeprefix("judged-"): json.loads(path.read_text()) for path in folder.glob("judged-*.json")}
    learnt = Table("accuracy of greedy replies, counted by plain vLLM on the folders; [95 % over templates]",
                   ("", "before", "after", "gain", "limit", "more than TRL"))  # fmt: skip
    for split, label in LABELS.items():
        for name in (name for name in runs if name in judged):
            found, before, peer = (judged.get(who, {}).get(split) for who in (name, "before", "trl"))
            more = gain(found, before)
            learnt.rows.append((
                f"{name}, {label}", with_ends(gain(before)), with_ends(gain(found)), with_ends(more, "+"),
                "> 0" if more[1] > 0 else "> 0 MISSED",
                with_ends(gain(found, peer), "+") if peer and name != "trl" else "",
            ))  # fmt: skip
    cost = Table(
        "what it took", ("", "steps", "generated tokens", "minutes", "GPU minutes", "reward, first and last", "KL")
    )
    for name, run in runs.items():
        if "missing" in run:
            cost.rows.append((f"{name}: {run['missing']}", "", "", "", "", "", ""))
            continue
        rewards = [step["reward"] for step in run["steps"]]
        some = max(1, len(rewards) // 10)
        first, last = sum(rewards[:some]) / some, sum(rewards[-some:]) / some
        cost.rows.append((name, str(len(rewards)), f"{run['tokens_generated']:,}", f"{run['seconds'] / 60:.1f}",
                          f"{run['gpu_seconds'] / 60:.1f}", f"{first:.3f}, {last:.3f}",
                          ", ".join(f"{run[key]:.1e}" for key in KL if run.get(key) is not None)))  # fmt: skip
    return learnt, cost


def with_ends(figures: tuple[float, float, float], sign: str = "") -> str:
    mean, low, high = (format(figure, f"{sign}.3f") for figure in figures)
    return f"{mean} [{low}, {high}]"


def draw(folder: Path, target: Path) -> None:
    """Left: accuracy at each evaluation; right: reward of each step over the minutes since the command."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "real_model"  # the same files give the same picture
    from matplotlib import pyplot as plt

    runs = {
        path.stem: json.loads(path.read_text()) for path in [*sorted(folder.glob("seed-*.json")), folder / "trl.json"]
    }
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for index, (name, run) in enumerate(runs.items()):
        for split, style in zip(SPLITS, ("-o", "--s"), strict=True):
            points = sorted((e["step"], e["accuracy"]) for e in run.get("curve", ()) if e["split"] == split)
            if points:
                left.plot(
                    *zip(*points, strict=True), style, color=f"C{index}", markersize=4, label=f"{name}, {LABELS[split]}"
                )
        steps = run.get("steps", ())
        right.plot([s["seconds"] / 60 for s in steps], [s["reward"] for s in steps], color=f"C{index}", linewidth=1.2,
                   label="TRL" if name == "trl" else name)  # fmt: skip
    left.set(xlabel="optimizer steps", ylabel="accuracy, greedy, unseen problems")
    right.set(xlabel="minutes since the command, two GPUs", ylabel="mean reward of a step's replies")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)


def main() -> None:
    args = parsed()
    if args.picture is not None:
        draw(args.folder, args.picture)
        return
    with whole_run.working_folder(args.folder) as folder:
        runs = played(args, folder)
        where = "the CPU, float32, gloo" if args.cpu else "two GPUs, bfloat16 with a float32 head, NCCL"
        print(f"{args.model.name}, {args.steps} steps of {args.tasks} x {args.group}, lr {args.lr:g}, {where}")
        for table in tables(folder, runs):
            table.show()


if __name__ == "__main__":
    main()
