"""The same run twice on two GPUs: explorer and trainer in turns, and both at once with staleness at most 2.

    python benchmarks/gpu/async_vs_sync.py              a 0.5 B shape, 6 steps of 64 x 8 responses; about seven minutes
    python benchmarks/gpu/async_vs_sync.py --size 1.5B --steps 6
    python benchmarks/gpu/async_vs_sync.py --cpu --tiny

A run that --folder already has is read, not repeated, so buffer.py with the same --folder prints its table at once.
Random weights. The lengths of the responses are log-normal, cut at a cap, and the same in both runs: a workflow in
workflows/ forces them. The first two steps are not measured. The trainer makes two passes over each batch, so the
explorer is the faster side. If it is slower (--epochs 1), the time that the trainer waits has no limit.
"""

import argparse
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import whole_run
import yaml
from buffer_table import Table

from support.programs.run import TrinityRun

LEAST_FASTER, MOST_WAITING, STALENESS = 1.7, 0.03, 2
RUN_SECONDS = 300.0
FULL = {"tasks": 64, "group": 8, "steps": 6, "median": 256, "cap": 2048, "unmeasured": 2}
TINY = {"tasks": 2, "group": 2, "steps": 5, "median": 12, "cap": 64, "unmeasured": 1}
_WINDOW_SECONDS = 5.0
_PARTS = ("wait", "buffer", "step", "publish", "save")


@dataclass(frozen=True)
class Measured:
    """One run from the end of its first measured step to the end of its last. Shares are of this time.

    `parts`: seconds of the trainer for each step, by name; `gaps`: between steps. Tokens are response tokens.
    """

    steps_per_hour: float
    parts: dict[str, list[float]]
    gaps: list[float]
    staleness: float
    samples: int
    lengths: list[int]
    trainer_tokens_per_second: float
    sampling: float
    running: float
    paused: float
    tokens_per_second: float
    peak_tokens_per_second: float

    def share(self, part: str) -> float:
        return sum(self.parts[part]) / sum(self.gaps)


def parser(document: str | None) -> argparse.ArgumentParser:
    made = whole_run.parser(document)
    made.add_argument("--size", choices=["0.5B", "1.5B"], default="0.5B", help="shape of the model")
    for name, value in FULL.items():
        made.add_argument(f"--{name}", type=int, default=value)
    made.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of the lengths")
    made.add_argument("--epochs", type=int, default=2, help="passes of the trainer over each batch")
    return made


def parsed(document: str | None) -> argparse.Namespace:
    args = parser(document).parse_args()
    if args.tiny:
        vars(args).update(TINY, size="tiny")
    return args


def config(args: argparse.Namespace, folder: Path, name: str) -> dict[str, Any]:
    """The YAML of the run `name`, sync or async."""
    length = {"median": args.median, "cap": args.cap, "sigma": args.sigma, "record": str(folder / f"{name}.jsonl")}
    taskset = {
        "name": "sums", "path": str(folder / "data"), "split": "train", "workflow_args": length,
        "format": {"prompt_key": "question", "response_key": "answer"},
        "default_workflow_type": "long_tailed_workflow", "default_reward_fn_type": "accuracy_reward",
    }  # fmt: skip
    return {
        "project": "benchmark",
        "name": name,
        "checkpoint_root_dir": str(folder / "jobs"),
        "model": {"model_path": str(folder / args.size), "max_prompt_tokens": 32, "max_response_tokens": args.cap},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": args.group, "kl_loss_fn": "none",
                      "optimizer": {"lr": 1e-6}},
        "buffer": {"batch_size": args.tasks, "total_steps": args.steps, "save_experiences": False,
                   "explorer_input": {"taskset": taskset}},
        "explorer": {"runner_per_model": args.tasks * (STALENESS + 1), "max_timeout": RUN_SECONDS,
                     "rollout_model": {"max_num_seqs": args.tasks * args.group * (STALENESS + 1)}},
        "synchronizer": {"sync_method": "nccl", "sync_offset": STALENESS if name == "async" else 0},
        "trainer": {"epochs_per_batch": args.epochs, "max_token_len_per_gpu": max(512, 8 * args.cap),
                    "save_hf_checkpoint": "never", "gradient_checkpointing": False},
        "monitor": {"monitor_type": "none"},
    }  # fmt: skip


def prepare(args: argparse.Namespace, folder: Path) -> None:
    """Make data and model if they are missing."""
    if not (folder / args.size).exists():
        whole_run.make_data(folder)
        whole_run.make_model(folder, args.size, args.cpu)


def play(args: argparse.Namespace, folder: Path, name: str) -> Measured:
    """Play a run, unless the folder has it with the same YAML. Removes its large checkpoint and weights."""
    path, values = folder / f"{name}.yaml", config(args, folder, name)
    record = folder / f"{name}.jsonl"
    before = yaml.safe_load(path.read_text()) if path.exists() else None
    plugins = str(Path(__file__).parent / "workflows")
    given = {**whole_run.environment(args), "TRINITY_PLUGIN_DIRS": plugins}
    run = TrinityRun(whole_run.write_yaml(path, values), folder, **given)
    if before != values or not (run.job / "summary.json").exists():
        prepare(args, folder)
        record.unlink(missing_ok=True)
        with whole_run.started(run):
            whole_run.ends_well(run, RUN_SECONDS)
        for left in [run.job / "weights", *run.job.glob("global_step_*")]:
            shutil.rmtree(left, ignore_errors=True)
    return measured(args, run.job, whole_run.lines(record))


def measured(args: argparse.Namespace, job: Path, responses: Sequence[dict[str, Any]]) -> Measured:
    steps = whole_run.trained(job)
    times, counted = [line["time"] for line in steps], steps[args.unmeasured :]
    begin, end = times[args.unmeasured - 1], times[-1]
    seconds = end - begin
    parts = {part: [line[f"time/{part}"] for line in counted] for part in _PARTS}
    inside = [_overlap(line, begin, end) for line in responses]
    loads = whole_run.events(job, "explorer", "explorer.weights.loaded")
    return Measured(
        steps_per_hour=3600 * len(counted) / seconds,
        parts=parts,
gaps=[after - before for before, after in pairwise(times[args.unmeasured - 1 :])],
        staleness=max(line["sample/staleness_max"] for line in steps),
        samples=args.tasks * args.group * len(steps),
        lengths=[line["tokens"] for line in responses],
        trainer_tokens_per_second=sum(line["sample/response_tokens"] for line in counted) / sum(parts["step"]),
        sampling=_union(inside) / seconds,
        running=sum(last - first for first, last, _ in inside) / seconds,
        paused=sum(load["pause"] for load in loads if begin < load["at"] < end) / seconds,
        tokens_per_second=sum(tokens for *_, tokens in inside) / seconds,
        peak_tokens_per_second=_peak(inside, begin, end),
    )  # fmt: skip


def _overlap(line: dict[str, Any], begin: float, end: float) -> tuple[float, float, float]:
    """(begin, end, tokens) of a response's part within the time, at an even rate of tokens."""
    first, last = max(line["begin"], begin), min(line["end"], end)
    if first >= last:
        return begin, begin, 0.0
    return first, last, line["tokens"] * (last - first) / (line["end"] - line["begin"])


def _union(intervals: Iterable[tuple[float, float, float]]) -> float:
    """Seconds covered by the intervals."""
    total, reached = 0.0, float("-inf")
    for first, last, _ in sorted(intervals):
        total += max(0.0, last - max(first, reached))
        reached = max(reached, last)
    return total


def _peak(intervals: Sequence[tuple[float, float, float]], begin: float, end: float) -> float:
    """Tokens a second of the best few seconds."""
    best, at = 0.0, begin
    while at < end:
        until = min(at + _WINDOW_SECONDS, end)
        parts = (tokens * max(0.0, min(last, until) - max(first, at)) / (last - first)
                 for first, last, tokens in intervals if last > first)  # fmt: skip
        best = max(best, sum(parts) / max(until - at, _WINDOW_SECONDS / 2))
        at += _WINDOW_SECONDS
    return best


def table(args: argparse.Namespace, sync: Measured, ahead: Measured) -> Table:
    """The table. Its last column is async over sync, or the figure over its limit."""
    made = Table(
        f"{args.steps} steps of {args.tasks} x {args.group} responses, {args.size}, {'CPU' if args.cpu else '2 GPUs'}",
        ("", "sync", "async", "limit", "ratio"),
        [f"lengths log-normal, median {args.median}, sigma {args.sigma:g}, at most {args.cap}; "
         f"the first {args.unmeasured} step(s) are not measured"],
    )  # fmt: skip

    def compared(what: str, form: str, figure: Any, limit: str = "", mark: str = "") -> None:
        a, b = figure(sync), figure(ahead)
        ratio = f"{b / a:.2f}{mark}" if a else ""
        made.rows.append((what, format(a, form), format(b, form), limit, ratio))

    faster = ahead.steps_per_hour / sync.steps_per_hour
    compared("steps an hour", ",.0f", lambda m: m.steps_per_hour, f">= {LEAST_FASTER}",
             "" if faster >= LEAST_FASTER else " MISSED")  # fmt: skip
    made.rows.append(_waiting(sync, ahead))
    for part, what in {
        "step": "trains",
        "publish": "publishes",
        "save": "saves",
        "buffer": "is handed the batch",
    }.items():
        compared(f"trainer: {what}, of the time", ".1%", lambda m, part=part: m.share(part))
    compared("explorer: samples, of the time", ".1%", lambda m: m.sampling)
    compared("explorer: has nothing to sample", ".1%", lambda m: 1 - m.sampling)
    compared("explorer: is paused for weights", ".2%", lambda m: m.paused)
    compared("explorer: sequences at once, mean", ",.1f", lambda m: m.running)
    compared("explorer: tokens/s", ",.0f", lambda m: m.tokens_per_second)
    compared(f"explorer: the same, best {_WINDOW_SECONDS:g} s", ",.0f", lambda m: m.peak_tokens_per_second)
    compared("trainer: response tokens/s while it trains", ",.0f", lambda m: m.trainer_tokens_per_second)
    compared("samples", ",d", lambda m: m.samples)
    compared("response tokens, mean", ",.0f", lambda m: sum(m.lengths) / len(m.lengths))
    compared("response tokens, longest", ",d", lambda m: max(m.lengths))
    staleness = "" if ahead.staleness <= STALENESS else " MISSED"
    made.rows.append(("staleness, at most", f"{sync.staleness:g}", f"{ahead.staleness:g}", f"<= {STALENESS}",
                      f"{ahead.staleness / STALENESS:.2f}{staleness}"))  # fmt: skip
    return made


def _waiting(sync: Measured, ahead: Measured) -> tuple[str, ...]:
    """The row of the trainer's wait. Its limit applies if explorers sample more than the trainer learns."""
    share = ahead.share("wait")
    cells = "trainer: waits for experience, of the time", f"{sync.share('wait'):.1%}", f"{share:.1%}"
    can = max(sync.peak_tokens_per_second, ahead.peak_tokens_per_second)
    if can < ahead.trainer_tokens_per_second:
        return *cells, "slower explorer", ""
    mark = "" if share <= MOST_WAITING else " MISSED"
    return *cells, f"<= {MOST_WAITING:.0%}", f"{share / MOST_WAITING:.2f}{mark}"


def main() -> None:
    args = parsed(__doc__)
    with whole_run.working_folder(args.folder) as folder:
        sync, ahead = play(args, folder, "sync"), play(args, folder, "async")
        table(args, sync, ahead).show()


if __name__ == "__main__":
    main()
