"""A small model learns through all services: SFT, then GRPO, asynchronously, with weights by the collective group.

    python benchmarks/gpu/e2e_learns.py             two GPUs: explorer and trainer; about four minutes
    python benchmarks/gpu/e2e_learns.py --cpu       over gloo, on two cores in about eight minutes
    python benchmarks/gpu/e2e_learns.py --cpu --tiny

The quickstart's model and sums, from random weights. On GPUs both sides compute in bfloat16, the trainer its logits in
float32. The KL of engine and trainer covers response tokens that were sampled by the version that the trainer has at
that step. So small a model would not get compiled kernels by default; here it has them, like a real model.
"""

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import whole_run
from buffer_table import Table

from support.programs.run import TrinityRun, write_config

SECONDS = 460.0
LEAST_ACCURACY, MOST_KL, LEAST_BY_GROUP = 0.9, 1e-3, 0.9
SUMMARY = (
    "steps", "reward_first", "reward_last", "eval_before", "eval_after", "groups_fed", "groups_stored", "dead_letters",
    "outstanding", "duplicates_dropped", "versions", "tokens_generated", "tokens_trained", "wall_seconds", "stages",
)  # fmt: skip
TINY = {
    "buffer": {"batch_size": 4, "total_steps": 4},
    "explorer": {"eval_interval": 4},
    "stages": {0: {"buffer": {"total_steps": 6, "train_batch_size": 16}}},
}


def config(args: argparse.Namespace, folder: Path) -> Path:
    """The quickstart's YAML: explorers one step ahead; weights by the collective group."""
    values: dict[str, Any] = {"synchronizer": {"sync_method": "nccl", "sync_offset": 1}}
    if not args.cpu:
        values["trainer"] = {"fused_kernels": True}
    source = whole_run.ROOT / "examples/quickstart/arithmetic.yaml"
    return write_config(source, folder / "learns.yaml", {**values, **(TINY if args.tiny else {})})


def play(args: argparse.Namespace, folder: Path) -> tuple[Path, float, int | None]:
    """The finished job, its seconds, and the number of groups with a complete trace (None without an exporter)."""
    data = whole_run.make_data(folder, test_size=16 if args.tiny else 128)
    model = whole_run.make_model(folder, "tiny", args.cpu)
    given = {"TRINITY_MODEL_PATH": str(model), "TRINITY_TASKSET_PATH": str(data), **whole_run.environment(args)}
    with ExitStack() as stack:
        collector = _collector()
        if collector is not None:
            stack.callback(collector.start().stop)
            given |= collector.environment()
        run = TrinityRun(config(args, folder), folder, **given)
        begin = time.monotonic()
        stack.enter_context(whole_run.started(run))
        whole_run.ends_well(run, 1200.0 if args.cpu else SECONDS)
        seconds = time.monotonic() - begin
        return run.job, seconds, len(collector.trained_traces()) if collector is not None else None


def _collector() -> Any:
    try:
        import opentelemetry.exporter.otlp.proto.grpc.trace_exporter  # noqa: F401  (what the services send with)

        from support.servers.otlp import Collector
    except ImportError:
        return None
    return Collector()


def rows(job: Path, seconds: float, traces: int | None) -> list[tuple[str, ...]]:
    summary, stage = json.loads((job / "summary.json").read_text()), job / "rft"
    steps = whole_run.trained(stage)
    fed, stored, dead, left = (summary[key] for key in ("groups_fed", "groups_stored", "dead_letters", "outstanding"))
    sft, grpo = (part["wall_seconds"] for part in summary["stages"])
    before, after, first, last = (summary[key] for key in ("eval_before", "eval_after", "reward_first", "reward_last"))
    there = sum(summary.get(key) is not None for key in SUMMARY)
    return [
        whole_run.row("accuracy on the test split, before and after GRPO", f"{before:.3f}, {after:.3f}", after,
                      LEAST_ACCURACY, least=True),
        whole_run.row("reward of the first and of the last steps", f"{first:.3f}, {last:.3f}", last, first, least=True),
        _kl(steps),
        _on_probe(stage),
        whole_run.row("groups fed = stored + dead + outstanding", f"{fed} = {stored} + {dead} + {left}",
                      float(abs(fed - stored - dead - left)), 0.0),
        _by_group(stage),
        whole_run.row("traces from the task to the gradient step, of groups",
                      f"{traces} of {stored}" if traces is not None else "no OTLP exporter is installed",
                      (traces or 0) / max(1, stored), 1.0, least=True),
        whole_run.row("figures in summary.json", f"{there} of {len(SUMMARY)}", there / len(SUMMARY), 1.0, least=True),
        whole_run.plain("seconds of the stages, SFT and GRPO", f"{sft:.0f}, {grpo:.0f}"),
        whole_run.row("seconds, all in all", f"{seconds:.0f}", seconds, SECONDS),
    ]  # fmt: skip


def _kl(steps: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """The largest value of all steps. Steps without a token of the trainer's version have none."""
    found = [line["actor/mismatch/kernel_kl"] for line in steps if "actor/mismatch/kernel_kl" in line]
    mean = sum(found) / max(1, len(found))
    shown = f"{mean:.1e}, {max(found, default=1.0):.1e} ({len(found)} of {len(steps)} steps)"
    what = "KL of engine and trainer at equal version, mean and largest"
    return whole_run.row(what, shown, max(found, default=1.0), MOST_KL)


def _on_probe(stage: Path) -> tuple[str, ...]:
    """For every version, the difference between the first engine that loaded it and the trainer, on its probe."""
    errors = [event["error"] for event in whole_run.events(stage, "sync", "sync.version.verified")]
    shown = f"{max(errors, default=float('nan')):.1e} ({len(errors)} versions)"
    return whole_run.plain("largest difference of a log-probability on the probe", shown)


def _by_group(stage: Path) -> tuple[str, ...]:
    loads = whole_run.events(stage, "explorer", "explorer.weights.loaded")
    by_group = sum(load["transport"].startswith("collective") for load in loads)
    shown = f"{by_group} of {len(loads)}"
    return whole_run.row("versions that came by the collective group", shown, by_group / max(1, len(loads)),
                         LEAST_BY_GROUP, least=True)  # fmt: skip


def main() -> None:
    args = whole_run.parser(__doc__).parse_args()
    with whole_run.working_folder(args.folder) as folder:
        found = rows(*play(args, folder))
    where = "the CPU, float32, gloo" if args.cpu else "two GPUs, bfloat16 with a float32 head, NCCL"
    Table(f"the quickstart, asynchronous, on {where}", whole_run.COLUMNS, rows=found).show()


if __name__ == "__main__":
    main()
