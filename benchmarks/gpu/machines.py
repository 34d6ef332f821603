"""Measure what the trainer loses when one of its two machines is killed, and how soon that machine trains again.

    python benchmarks/gpu/machines.py                    a 1.5 B shape, two machines of two GPUs; about 5 minutes
    python benchmarks/gpu/machines.py --size 7B          needs 90 GiB of memory a GPU, and 200 GB of disk
    python benchmarks/gpu/machines.py --size 7B --optimizer adamw_8bit --gpus 1     two GPUs of 141 GB
    python benchmarks/gpu/machines.py --cpu --tiny

Both machines are processes of this host, with their own GPUs, and meet as machines do: by the run's NATS and the
trainer's service. The second and all its ranks are killed in the middle of a step. Seconds count from the kill, and
from the command that starts it again. The rows below each are their parts, by the first one's log.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path
from typing import Any

import whole_run
from buffer_table import Table

from support.servers.machines import Command
from support.servers.nats import NatsServer

ROW_SECONDS = 420.0
AGAIN_SECONDS = 60.0
_PHASE = "service.phase.began"
# Parts of a start, by the event or phase in the trainer's log at which they end.
PARTS = {
    "service.failed": "the group ends",
    "service.started": "the process serves",
    "trainer.nodes.formed": "machines meet, code is loaded",
    "loads the model": "ranks meet",
    "prepares the optimizer": "the model is loaded",
    "service.ready": "the optimizer and the checkpoint are loaded",
    "trainer.step.done": "the first step",
}


def parsed() -> argparse.Namespace:
    made = whole_run.parser(__doc__)
    made.add_argument("--size", choices=list(whole_run.SHAPES), default="1.5B", help="shape of the model")
    made.add_argument("--gpus", type=int, default=2, help="of each machine")
    made.add_argument("--optimizer", choices=["adamw", "muon", "adamw_8bit"], default="adamw")
    made.add_argument("--interval", type=int, default=10, help="steps from one checkpoint to the next")
    args = made.parse_args()
    if args.tiny:
        vars(args).update(size="tiny", gpus=1)
    return args


def config(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    data = {"name": "sums", "storage_type": "file", "path": str(folder / "data"), "split": "train"}
    keys = {"prompt_type": "plaintext", "prompt_key": "question", "response_key": "answer"}
    return {
        "project": "benchmark",
        "name": "machines",
        "mode": "train",
        "checkpoint_root_dir": str(folder / "jobs"),
        "model": {"model_path": str(folder / args.size), "max_prompt_tokens": 32, "max_response_tokens": 32},
        "cluster": {"node_num": 2, "least_nodes": 1, "node_wait": 1, "node_timeout": 10},
        "algorithm": {"algorithm_type": "sft", "optimizer": {"lr": 1e-6, "optimizer_type": args.optimizer}},
        "buffer": {"train_batch_size": 256, "total_steps": 100_000,
                   "trainer_input": {"experience_buffer": {**data, "format": keys}}},
        "trainer": {"save_interval": args.interval, "save_hf_checkpoint": "never", "max_checkpoints_to_keep": 1,
                    "num_ranks": args.gpus, "deepspeed": {"zero_stage": 0 if args.cpu else 3}},
        "monitor": {"monitor_type": "none"},
    }  # fmt: skip


class Pair:
    """The first and the second machine, and the steps that they have trained."""

    def __init__(self, args: argparse.Namespace, folder: Path, nats: NatsServer) -> None:
        self._args, self._folder, self._url = args, folder, nats.url
        self._config = whole_run.write_yaml(folder / "machines.yaml", config(args, folder))
        self.stage = folder / "jobs/benchmark/machines"

    def start(self, index: int, *own: str) -> Command:
        cards = range(index * self._args.gpus, (index + 1) * self._args.gpus)
        given = whole_run.environment(self._args)
        if not self._args.cpu:
            given["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, cards))
        values = {**os.environ, **given, "TRINITY_NATS_URL": self._url, "TRINITY_HOST": "127.0.0.1"}
        arguments = ["-m", "trinity.cli.main", "run", "--config", str(self._config), *own]
        return Command([sys.executable, *arguments], values, self._folder / f"machine-{index + 1}.out")

    def batches(self) -> list[dict[str, Any]]:
        return whole_run.lines(self.stage / "monitor/batches.jsonl")

    def until(self, ranks: int, more: int, command: Command) -> float:
        """Seconds until so many further steps were trained by so many ranks."""
        began, since = time.monotonic(), len(self.batches())
        while sum(line["ranks"] == ranks for line in self.batches()[since:]) < more:
            if command.process.poll() is not None or time.monotonic() - began > ROW_SECONDS:
                raise RuntimeError(f"no {more} steps by {ranks} ranks:\n{command.text[-3000:]}")
            time.sleep(0.02)
        return time.monotonic() - began

    def parts(self, since: float) -> list[tuple[str, ...]]:
        """Rows of the seconds from then to the first step of the group that was formed then."""
        return parts(self.stage, since, "service.failed")


def parts(stage: Path, since: float, begins: str) -> list[tuple[str, ...]]:
    """Rows of the trainer's seconds from then to its first step after an event, which ends the first part."""
    found = [line for line in whole_run.events(stage, "trainer", *PARTS, _PHASE) if line["at"] >= since]
    rows, at = [], since
    for line in dropwhile(lambda line: line["event"] != begins, found):
        if part := PARTS.get(line.get("phase") or line["event"]):
            rows.append(whole_run.plain(f"    {part}", f"{line['at'] - at:.1f} s"))
            at = line["at"]
        if line["event"] == "trainer.step.done":
            break
    return rows


def kill(machine: Command) -> None:
    """kill -9 of all its processes, its ranks first."""
    for process in reversed(machine.descendants("")):
        process.kill()
    machine.kill()


def measure(args: argparse.Namespace, folder: Path, nats: NatsServer) -> Iterator[tuple[str, ...]]:
    """Yields each row once it is known."""
    pair, whole = Pair(args, folder, nats), 2 * args.gpus
    first, second = pair.start(0, "mode=train"), pair.start(1, "mode=train_node", "cluster.node_name=second")
    try:
        yield whole_run.plain("start: until the first step", f"{pair.until(whole, 1, first):.1f} s")
        steps = args.interval + 2
        yield whole_run.plain(f"a step by {whole} ranks", f"{pair.until(whole, steps, first) / steps:.2f} s")
        waits = [line["time/save"] for line in whole_run.trained(pair.stage) if line.get("time/save")]
        yield whole_run.plain("a step waits for its checkpoint, at most", f"{max(waits, default=0):.2f} s")
        before = max(line["step"] for line in pair.batches())
        kill(second)
        lost = pair.until(args.gpus, 1, first)
        yield whole_run.row("killed: until a step by the others", f"{lost:.1f} s", lost, AGAIN_SECONDS)
        yield from pair.parts(time.time() - lost)
        again = before - pair.batches()[-1]["step"] + 1
        yield whole_run.plain("steps that were trained again", str(max(0, again)))
        yield whole_run.plain(f"a step by {args.gpus} ranks", f"{pair.until(args.gpus, 5, first) / 5:.2f} s")
        second = pair.start(1, "mode=train_node", "cluster.node_name=second")
        back = pair.until(whole, 1, first)
        yield whole_run.row("back: until a step by all", f"{back:.1f} s", back, 2 * AGAIN_SECONDS)
        yield from pair.parts(time.time() - back)
    finally:
        kill(second)
        kill(first)


def main() -> None:
    args = parsed()
    with whole_run.working_folder(args.folder) as folder:
        whole_run.make_data(folder)
        whole_run.make_model(folder, args.size, args.cpu)
        (folder / "nats").mkdir(exist_ok=True)
        nats = NatsServer(folder / "nats")
        nats.start()
        try:
            made = Table(f"two machines of {args.gpus} GPUs, {args.size}, ZeRO 3", whole_run.COLUMNS, [])
            for row in measure(args, folder, nats):
                print(*row, file=sys.stderr, flush=True)
                made.rows.append(row)
            made.show()
        finally:
            nats.stop()


if __name__ == "__main__":
    main()
