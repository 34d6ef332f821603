"""Explorers join, leave, and are killed with -9, one in the middle of a collective update, while a run continues.

    python benchmarks/gpu/membership.py             two GPUs, about five minutes; more give each explorer its own
    python benchmarks/gpu/membership.py --cpu --tiny

The trainer has the last GPU. With two, the explorers share the other one: the first is in the collective group, which
takes a GPU once; the others load from the folder. No explorer may delay the trainer beyond a deadline: a version waits
`collective_timeout` for a member, a batch waits for the lease of a task of a dead explorer. In the end all explorers
leave, and the streams on NATS are audited against the logs of the processes.
"""

import argparse
import logging
import signal
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import structlog
import whole_run
from buffer_table import Table
from membership_party import COLLECTIVE_SECONDS, EVENT_SECONDS, START_SECONDS, Explorer, Party, by_group, threads

from support.checks.stopped_audit import audited
from support.programs.run import TrinityRun
from trinity.runtime.names import TASK_LEASE_SECONDS

GROUP, RESPONSE = 4, 48
COLUMNS = ("event", "at s", "took s", "steps", "longest step s", "longest publish s", "limits s", "of limits")


def config(args: argparse.Namespace, folder: Path) -> Path:
    """The run without explorers. It is stopped at the end."""
    taskset = {
        "name": "sums", "path": str(folder / "data"), "split": "train", "default_workflow_type": "simple_workflow",
        "format": {"prompt_key": "question", "response_key": "answer"}, "default_reward_fn_type": "accuracy_reward",
    }  # fmt: skip
    values: dict[str, Any] = {
        "project": "benchmark", "name": "membership", "mode": "train", "checkpoint_root_dir": str(folder / "jobs"),
        "model": {"model_path": str(folder / args.size), "max_prompt_tokens": 32, "max_response_tokens": RESPONSE},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": GROUP, "kl_loss_fn": "none", "optimizer": {"lr": 1e-6}},
        "buffer": {"batch_size": args.tasks, "total_steps": 100_000, "save_experiences": False,
                   "explorer_input": {"taskset": taskset}},
        "synchronizer": {"sync_method": "nccl", "sync_offset": 2, "bucket_mib": 1,
                         "collective_timeout": COLLECTIVE_SECONDS},
        "monitor": {"monitor_type": "none"},
    }  # fmt: skip
    return whole_run.write_yaml(folder / "membership.yaml", values)


def play(args: argparse.Namespace, folder: Path) -> tuple[Party, dict[str, int]]:
    """Plays all events, and returns the counts at the end."""
    cards = _cards(args)
    given = {"CUDA_VISIBLE_DEVICES": cards[-1] if cards else "", **threads(args)}
    party = Party(args, folder, TrinityRun(config(args, folder), folder, **given), cards=cards[:-1])
    try:
        with whole_run.started(party.main):
            party.main.until(lambda status: status["nats_url"], START_SECONDS, "the run has a NATS")
            party.leave(_few(party) if args.tiny else _many(party))
            counts = party.rest()
            party.main.signal(signal.SIGTERM)
            party.main.finish(EVENT_SECONDS)
            return party, counts
    finally:
        for explorer in party.explorers.values():
            explorer.run.end()


def _few(party: Party) -> Explorer:
    """Two explorers join, and one is killed. Returns the surviving one, here and below."""
    one, two = party.start("one"), party.start("two")
    party.joined(one, two)
    party.kill_in_collective(one)
    return two


def _many(party: Party) -> Explorer:
    """Two explorers join a run of one. One of them is killed, then the first one, which joins again."""
    party.main.until(lambda status: status["trainer_state"] == "waiting", START_SECONDS, "the trainer waits")
    one = party.start("one")
    party.joined(one)
    party.wait_for_steps(3)
    two = party.start("two")
    if len(party.cards) == 1:  # one engine at a time may measure how much of the GPU is free
        party.joined(two)
    three = party.start("three")
    party.joined(*([three] if len(party.cards) == 1 else [two, three]))
    party.wait_for_steps(3)
    party.kill(three)
    party.wait_for_steps(3)
    party.kill_in_collective(one)
    party.wait_for_steps(3)
    party.joined(party.start(one.name))
    party.until(lambda: by_group(one), EVENT_SECONDS, f"{one.name} is in the collective group again")
    party.wait_for_steps(3)
    party.leave(two)
    party.wait_for_steps(3)
    return one


def _cards(args: argparse.Namespace) -> list[str]:
    """The GPUs. The last one is the trainer's."""
    if args.cpu:
        return []
    from trinity.runtime.devices import visible_gpus

    if len(cards := visible_gpus()) < 2:
        raise SystemExit(f"two GPUs are needed, {len(cards)} are visible; --cpu needs none")
    return cards[:4]


def rows(party: Party) -> list[tuple[str, ...]]:
    """A row for each event, with the longest step and version from it until the next one."""
    steps = whole_run.trained(party.main.job)
    gaps = [(after["time"], after["time"] - before["time"], after["time/publish"]) for before, after in pairwise(steps)]
    usual, publish = (statistics.median(gap[index] for gap in gaps) for index in (1, 2))
    limits = usual + TASK_LEASE_SECONDS, publish + COLLECTIVE_SECONDS
    events = sorted(party.events, key=lambda event: event.at)
    ends = [*(event.at for event in events[1:]), float("inf")]
    made = [("(the median of all steps)", "", "", f"{len(gaps)}", f"{usual:.2f}", f"{publish:.2f}", "", "")]
    for event, end in zip(events, ends, strict=True):
        during = [gap for gap in gaps if event.at < gap[0] <= end]
        worst = [max((gap[index] for gap in during), default=0.0) for index in (1, 2)]
        ratio = max(found / limit for found, limit in zip(worst, limits, strict=True))
        made.append((
            event.what, f"{event.at - events[0].at:.0f}", f"{event.seconds:.1f}" if event.seconds is not None else "",
            f"{len(during)}", *(f"{found:.2f}" for found in worst), f"{limits[0]:.1f}, {limits[1]:.1f}",
            f"{ratio:.2f}" + (" MISSED" if ratio > 1 else ""),
        ))  # fmt: skip
    return made


def main() -> None:
    parser = whole_run.parser(__doc__)
    parser.add_argument("--size", choices=["0.5B", "1.5B"], default="0.5B", help="shape of the model")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))  # prints only the table
    args.tasks, args.size = (2, "tiny") if args.tiny else (8, args.size)
    with whole_run.working_folder(args.folder) as folder:
        whole_run.make_data(folder)
        whole_run.make_model(folder, args.size, args.cpu)
        party, counts = play(args, folder)
        logs = [explorer.log_folder for explorer in party.explorers.values()]
        made, wrong = rows(party), audited(party.main.job, logs, counts)
    told = f"groups fed {counts['fed']} = stored {counts['stored']} + dead {counts['dead_letters']} + "
    told += f"outstanding {counts['outstanding']}; duplicates dropped {counts['duplicates_dropped']}"
    verdict = "MISSED" if wrong else "kept"
    made.append(("I1 to I4 of what the run left", "", "", "", "", "", f"violations: {len(wrong)}, allowed: 0", verdict))
    notes = [
        f"limits: a step {TASK_LEASE_SECONDS:g} s, a version {COLLECTIVE_SECONDS:g} s above the median",
        told,
        *wrong,
    ]
    Table("explorers that come and go", COLUMNS, notes, made).show()


if __name__ == "__main__":
    main()
