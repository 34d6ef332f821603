"""Samples a second while explorers are killed every minute, and what a death of the trainer costs.

    python benchmarks/gpu/goodput.py                four GPUs: three explorers and the trainer; about eight minutes
    python benchmarks/gpu/goodput.py --gpus 2       two explorers share the first GPU
    python benchmarks/gpu/goodput.py --cpu --tiny

One run of a 0.5 B shape: --quiet seconds without a fault, then --kills times kill -9 of one explorer after the other,
every --every seconds, then twice kill -9 of the trainer. Supervisors start again what was killed. A trainer's death
counts until the first step beyond those before it; the rows below are its parts, by the trainer's log.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import whole_run
from buffer_table import Table
from machines import parts
from membership_party import EVENT_SECONDS, START_SECONDS, Party, threads

from support.programs.run import TrinityRun, process_of

LEAST_GOODPUT = 0.9
FULL = {"tasks": 32, "group": 8, "tokens": 256, "quiet": 60, "kills": 3, "every": 60}
TINY = {"tasks": 2, "group": 4, "tokens": 16, "quiet": 10, "kills": 1, "every": 10, "gpus": 2, "size": "tiny"}


def parsed() -> argparse.Namespace:
    made = whole_run.parser(__doc__)
    made.add_argument("--size", choices=list(whole_run.SHAPES), default="0.5B", help="shape of the model")
    made.add_argument("--gpus", type=int, choices=[2, 3, 4], default=4)
    for name, value in FULL.items():
        made.add_argument(f"--{name}", type=int, default=value)
    if "--tiny" in sys.argv:
        made.set_defaults(**TINY)
    return made.parse_args()


def config(args: argparse.Namespace, folder: Path) -> Path:
    taskset = {
        "name": "sums", "path": str(folder / "data"), "split": "train", "default_workflow_type": "simple_workflow",
        "format": {"prompt_key": "question", "response_key": "answer"}, "default_reward_fn_type": "accuracy_reward",
    }  # fmt: skip
    lengths = {"max_prompt_tokens": 32, "max_response_tokens": args.tokens}
    values: dict[str, Any] = {
        "project": "benchmark", "name": "membership", "mode": "train", "checkpoint_root_dir": str(folder / "jobs"),
        "model": {"model_path": str(folder / args.size), **lengths},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": args.group, "kl_loss_fn": "none",
                      "optimizer": {"lr": 1e-6}},
        "buffer": {"batch_size": args.tasks, "total_steps": 100_000, "explorer_input": {"taskset": taskset}},
        "synchronizer": {"sync_method": "checkpoint", "sync_offset": 2},
        "trainer": {"save_interval": 10, "save_hf_checkpoint": "never", "max_checkpoints_to_keep": 2},
        "monitor": {"monitor_type": "none"},
    }  # fmt: skip
    return whole_run.write_yaml(folder / "goodput.yaml", values)


def measure(args: argparse.Namespace, party: Party) -> Iterator[tuple[str, ...]]:
    """Yields each row once it is known."""
    explorers = [party.start(f"explorer{number}") for number in range(max(2, args.gpus - 1))]
    party.joined(*explorers)
    party.wait_for_steps(3)
    quiet = rate(args, party, args.quiet)
    yield whole_run.plain("samples/s undisturbed", f"{quiet:.1f}")
    begin, steps = time.time(), party.steps()
    for number in range(args.kills):
        os.kill(explorers[number % len(explorers)].process()["pid"], signal.SIGKILL)
        time.sleep(max(0.0, begin + (number + 1) * args.every - time.time()))
    killed = (party.steps() - steps) * args.tasks * args.group / (time.time() - begin)
    yield whole_run.plain(f"samples/s, an explorer killed every {args.every} s", f"{killed:.1f}")
    yield whole_run.row("    of undisturbed", f"{killed / quiet:.2f}", killed / quiet, LEAST_GOODPUT, least=True)
    for _ in range(2):
        party.wait_for_steps(3)
        status, before = party.main.poll_status(), party.steps()
        assert status is not None, party.main.tail()
        at = time.time()
        os.kill(process_of(status, "trainer")["pid"], signal.SIGKILL)
        party.until(lambda before=before: party.steps() > before, EVENT_SECONDS, "a step after the trainer's death")
        yield whole_run.plain("the trainer killed: until a further step", f"{time.time() - at:.1f} s")
        yield from parts(party.main.job, at, "service.started")


def rate(args: argparse.Namespace, party: Party, seconds: float) -> float:
    begin, steps = time.time(), party.steps()
    time.sleep(seconds)
    return (party.steps() - steps) * args.tasks * args.group / (time.time() - begin)


def main() -> None:
    args = parsed()
    cards = [] if args.cpu else [str(number) for number in range(args.gpus)]
    if not args.cpu:
        from trinity.runtime.devices import visible_gpus

        cards = visible_gpus()[: args.gpus]
        if len(cards) < args.gpus:
            raise SystemExit(f"{args.gpus} GPUs are needed, {len(cards)} are visible; give --gpus {max(2, len(cards))}")
    with whole_run.working_folder(args.folder) as folder:
        whole_run.make_data(folder)
        whole_run.make_model(folder, args.size, args.cpu)
        given = {"CUDA_VISIBLE_DEVICES": cards[-1] if cards else "", **threads(args)}
        party = Party(args, folder, TrinityRun(config(args, folder), folder, **given), cards=cards[:-1])
        made = Table(
            f"{args.tasks} x {args.group} x {args.tokens} tokens, {args.size}, {args.gpus} GPUs", whole_run.COLUMNS, []
        )
        try:
            with whole_run.started(party.main):
                party.main.until(lambda status: status["nats_url"], START_SECONDS, "the run has a NATS")
                for row in measure(args, party):
                    print(*row, file=sys.stderr, flush=True)
                    made.rows.append(row)
        finally:
            for explorer in party.explorers.values():
                explorer.run.end()
        made.show()


if __name__ == "__main__":
    main()
