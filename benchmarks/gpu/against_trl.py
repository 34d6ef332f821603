"""The same work by TRL's GRPO and by Trinity, on one to four GPUs: 32 x 8 responses of 512 tokens, one update a step.

    python benchmarks/gpu/against_trl.py                 a 1.5 B shape, two GPUs; about 22 minutes
    python benchmarks/gpu/against_trl.py --only 1 2      the first two rows; about 5 minutes
    python benchmarks/gpu/against_trl.py --only 1 2 --size 7B --lora 32     adapters of a 7 B shape on one GPU of 141 GB
    python benchmarks/gpu/against_trl.py --only 7 --size 7B --set trainer.deepspeed.zero_stage=3
    python benchmarks/gpu/against_trl.py --cpu --tiny

Random weights; every response has the same forced length. The first steps are not measured. TRL runs with vLLM in the
trainer's processes (colocate; DDP on two GPUs) and float32 masters, like Trinity. Each run is saved as a file in
--folder, and not repeated. The last column is samples per second over those of TRL on as many GPUs.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import async_vs_sync
import whole_run
from buffer_table import Table

from support.programs.run import TrinityRun

FULL = {"tasks": 32, "group": 8, "tokens": 512, "steps": 9, "unmeasured": 4}
TINY = {"tasks": 2, "group": 2, "tokens": 16, "steps": 3, "unmeasured": 1}
RUN_SECONDS = 400.0
PARTS = ("wait", "step", "publish")


@dataclass(frozen=True)
class Row:
    """One run. offset: batches that explorers may be ahead. As many engines as `gpus` share the trainer's GPUs."""

    name: str
    gpus: int
    peer: bool = False
    offset: int = 0
    engines: int = 1


Player = Callable[[argparse.Namespace, Path, Row, str], dict[str, Any]]
ROWS = (
    Row("TRL, colocate", 1, peer=True),
    Row("shared, sync", 1),
    Row("shared, one step ahead", 1, offset=1),
    Row("TRL, colocate, DDP", 2, peer=True),
    Row("1 + 1, sync", 2),
    Row("1 + 1, one step ahead", 2, offset=1),
    Row("shared, sync", 2, engines=2),
    Row("shared, one step ahead", 2, offset=1, engines=2),
    Row("shared, sync", 4, engines=4),
    Row("shared, one step ahead", 4, offset=1, engines=4),
    Row("shared, two steps ahead", 4, offset=2, engines=4),
    Row("2 + 2, one step ahead", 4, offset=1, engines=2),
    Row("2 + 2, two steps ahead", 4, offset=2, engines=2),
    Row("3 + 1, one step ahead", 4, offset=1, engines=3),
    Row("shared, two steps ahead", 1, offset=2),
)


def parser(document: str | None, rows: int) -> argparse.ArgumentParser:
    """Options of a comparison with so many rows."""
    made = whole_run.parser(document)
    made.add_argument("--size", choices=list(whole_run.SHAPES), default="1.5B", help="shape of the model")
    made.add_argument("--lora", type=int, metavar="RANK", help="train adapters of all linear layers; needs peft")
    made.add_argument("--only", type=int, nargs="+", default=range(1, rows + 1), help="these rows, from 1")
    made.add_argument("--liger", action="store_true", help="the peer with Liger's kernels")
    made.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of Trinity's rows")
    for name, value in FULL.items():
        made.add_argument(f"--{name}", type=int, default=value)
    return made


def parsed(made: argparse.ArgumentParser) -> argparse.Namespace:
    args = made.parse_args()
    if args.tiny:
        vars(args).update(TINY, size="tiny")
    return args


def config(args: argparse.Namespace, folder: Path, row: Row, name: str) -> dict[str, Any]:
    """The YAML of async_vs_sync.py, with responses of one length and one pass over a batch."""
    lengths = {"median": args.tokens, "cap": args.tokens, "sigma": 0.0, "epochs": 1}
    lengths["steps"] = args.steps + 1  # the run is ended before its last step, whose checkpoint is not measured
    values = async_vs_sync.config(argparse.Namespace(**{**vars(args), **lengths}), folder, name)
    if args.lora:
        values["model"]["lora_configs"] = [{"lora_rank": args.lora, "lora_alpha": args.lora}]
    return {
        **values,
        "explorer": {"runner_per_model": 2 * args.tasks, "max_timeout": RUN_SECONDS,
                     "rollout_model": {"engine_num": row.engines}},
        "synchronizer": {"sync_method": "memory" if row.engines == row.gpus else "nccl", "sync_offset": row.offset},
        "trainer": {"save_hf_checkpoint": "never"},
    }  # fmt: skip


def play(args: argparse.Namespace, folder: Path, row: Row, name: str) -> dict[str, Any]:
    path = whole_run.write_yaml(folder / f"{name}.yaml", config(args, folder, row, name))
    plugins = str(Path(__file__).parent / "workflows")
    run = TrinityRun(path, folder, **whole_run.environment(args, cards(row)), TRINITY_PLUGIN_DIRS=plugins)
    began = time.time()
    with whole_run.started(run, *args.set):
        steps = whole_run.until_trained(run, args.steps, RUN_SECONDS)
    counted = steps[args.unmeasured :]
    seconds = (steps[-1]["time"] - steps[args.unmeasured - 1]["time"]) / len(counted)
    for left in [run.job / "weights", *run.job.glob("global_step_*")]:
        shutil.rmtree(left, ignore_errors=True)
    parts = {part: statistics.mean(line[f"time/{part}"] for line in counted) for part in PARTS}
    tokens = statistics.mean(line["sample/response_tokens"] for line in counted)
    return {"seconds": seconds, "first": steps[0]["time"] - began, "tokens": tokens, **parts}


def play_trl(args: argparse.Namespace, folder: Path, row: Row, name: str) -> dict[str, Any]:
    """The reason for a missing result, if TRL is not installed or fails."""
    if importlib.util.find_spec("trl") is None:
        return {"missing": "trl is not installed"}
    out = folder / f"{name}.steps.json"
    script = Path(__file__).with_name("against_trl_peer.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(row.gpus)]
    command += [str(script), "--model", str(folder / args.size), "--out", str(out)]
    for key in ("tasks", "group", "tokens", "steps", "rows"):
        command += [f"--{key}", str(getattr(args, key))]
    command += [f"--{key}" for key in ("cpu", "liger") if getattr(args, key)]
    command += ["--lora", str(args.lora)] if args.lora else []
    given = {**os.environ, **whole_run.environment(args, cards(row)), "HF_HUB_OFFLINE": "1"}
    with (folder / f"{name}.out").open("w") as log:
        peer = subprocess.Popen(command, stdout=log, stderr=log, env=given, process_group=0)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                peer.wait(RUN_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(peer.pid, signal.SIGKILL)
    if peer.wait() or not out.exists():
        return {"missing": f"TRL ended with {peer.returncode}: {(folder / f'{name}.out').read_text()[-800:]}"}
    ends = json.loads(out.read_text())[args.unmeasured - 1 :]
    return {"seconds": (ends[-1] - ends[0]) / (len(ends) - 1)}


def cards(row: Row) -> str:
    return ",".join(str(index) for index in range(row.gpus))


def found_by(args: argparse.Namespace, folder: Path, row: Row, peer: Player = play_trl) -> dict[str, Any]:
    """Plays a row, or reads its file if it was played before. `peer` plays the rows of the peer."""
    name = f"{row.name}-{row.gpus}".replace(", ", "-").replace(" ", "-").replace("+", "and")
    path = folder / f"{name}.json"
    if not path.exists():
        try:
            found = (peer if row.peer else play)(args, folder, row, name)
        except (RuntimeError, IndexError) as error:  # the other rows are still useful
            found = {"missing": str(error)[-1500:]}
        path.write_text(json.dumps(found))
        print(f"  {name}: {found}", file=sys.stderr, flush=True)
    return dict(json.loads(path.read_text()))


def main() -> None:
    given = parser(__doc__, len(ROWS))
    given.add_argument("--rows", type=int, default=16, help="of TRL's micro-batch")
    args = parsed(given)
    made = Table(
        f"{args.tasks} x {args.group} responses of {args.tokens} tokens, one update a step, {args.size}",
        ("", "GPUs", "s/step", "samples/s", "waits", "trains", "publishes", "first step", "of TRL"),
        [f"the first {args.unmeasured} of {args.steps} steps are not measured"],
    )
    wanted = [ROWS[number - 1] for number in args.only]
    with whole_run.working_folder(args.folder) as folder:
        async_vs_sync.prepare(args, folder)
        peers: dict[int, float] = {}
        for row in (row for row in wanted if not (args.cpu and row.gpus > 1)):
            found = found_by(args, folder, row)
            if "missing" in found:
                made.rows.append((f"{row.name}: {found['missing'].splitlines()[0][:60]}", str(row.gpus), *[""] * 7))
                continue
            speed = args.tasks * args.group / found["seconds"]
            if row.peer:
                peers[row.gpus] = speed
            parts = tuple(f"{found[part]:.2f}" if part in found else "" for part in (*PARTS, "first"))
            ratio = f"{speed / peers[row.gpus]:.2f}" if row.gpus in peers else ""
            made.rows.append((row.name, str(row.gpus), f"{found['seconds']:.2f}", f"{speed:.1f}", *parts, ratio))
    made.show()


if __name__ == "__main__":
    main()
