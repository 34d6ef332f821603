"""The same work by veRL's GRPO and by Trinity, on one or two GPUs: 32 x 8 responses of 512 tokens, one update a step.

    python benchmarks/gpu/against_verl.py                           a 1.5 B shape, two GPUs; about 45 minutes
    python benchmarks/gpu/against_verl.py --only 4 7 8 5            those rows, in this order
    python benchmarks/gpu/against_verl.py --verl FOLDER             veRL and its packages lie there
    python benchmarks/gpu/against_verl.py --only 4 --verl-set actor_rollout_ref.actor.strategy=fsdp
    python benchmarks/gpu/against_verl.py --cpu --tiny              Trinity's rows on one GPU

Random weights; the same prompts; every response has the same forced length. The first steps are not measured. veRL
0.9.1 runs its own entry point with the settings of its examples for GRPO with FSDP (packed sequences, micro-batches by
tokens, no offload, CUDA graphs, float32 masters) and what is faster here: FSDP 2 that keeps what it gathered, no
recomputation of activations, and the engine's log-probabilities as those of the old policy. The last two columns are
samples per second over the best synchronous and the best asynchronous row of veRL on as many GPUs.
"""

import argparse
import contextlib
import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import against_trl
import async_vs_sync
import psutil
import whole_run
from buffer_table import Table

_SUBREAPER = 36  # prctl: orphans of this process become its children
_IS_THERE = "import importlib.util as u, sys; sys.exit(u.find_spec('verl') is None)"
_FIGURES = ("timing_s/gen", "timing_s/old_log_prob", "timing_s/adv", "timing_s/update_actor", "timing_s/update_weights",
            "response_length/mean", "prompt_length/mean", "perf/total_num_tokens")  # fmt: skip


@dataclass(frozen=True)
class Row(against_trl.Row):
    """`mode`: veRL's trainer mode, for its rows. Its engines share the trainer's GPUs unless it is separate."""

    mode: str = ""

    @property
    def separate(self) -> bool:
        return self.mode == "separate_async"


ROWS = (
    Row("veRL, colocated", 1, peer=True, mode="sync"),
    Row("shared, sync", 1),
    Row("shared, one step ahead", 1, offset=1),
    Row("veRL, colocated", 2, peer=True, mode="sync"),
    Row("veRL, 1 + 1, asynchronous", 2, peer=True, mode="separate_async"),
    Row("veRL, colocated, asynchronous", 2, peer=True, mode="colocate_async"),
    Row("shared, sync", 2, engines=2),
    Row("shared, one step ahead", 2, offset=1, engines=2),
    Row("1 + 1, one step ahead", 2, offset=1),
)


def parsed() -> argparse.Namespace:
    made = against_trl.parser(__doc__, len(ROWS))
    made.add_argument("--verl", type=Path, help="a folder of veRL and its packages, before all others for veRL only")
    made.add_argument("--verl-set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of veRL's rows, last")
    made.add_argument("--micro-tokens", type=int, default=8192, help="of veRL's micro-batch on a GPU")
    made.add_argument("--limit", type=float, default=against_trl.RUN_SECONDS, help="seconds of a row of veRL")
    return against_trl.parsed(made)


def overrides(args: argparse.Namespace, folder: Path, row: Row, name: str) -> list[str]:
    """veRL's configuration, as arguments of its entry point."""
    data = make_data(args, folder)
    actor, rollout, model = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
    values: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "algorithm.rollout_correction.bypass_mode": True,
        "data.train_files": data, "data.val_files": data, "data.shuffle": False,
        "data.train_batch_size": args.tasks, "data.max_prompt_length": 32, "data.max_response_length": args.tokens,
        f"{model}.path": folder / args.size,
        f"{model}.use_remove_padding": True,
        f"{model}.enable_gradient_checkpointing": False,
        f"{model}.use_liger": args.liger,
        f"{actor}.optim.lr": 1e-6,
        f"{actor}.strategy": "fsdp2",
        f"{actor}.fsdp_config.reshard_after_forward": False,
        f"{actor}.fsdp_config.param_offload": False, f"{actor}.fsdp_config.optimizer_offload": False,
        f"{actor}.ppo_mini_batch_size": args.tasks,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": args.micro_tokens,
        f"{actor}.use_kl_loss": False, f"{actor}.entropy_coeff": 0,
        f"{rollout}.name": "vllm", f"{rollout}.mode": "async", f"{rollout}.n": args.group,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.gpu_memory_utilization": 0.8 if row.separate else 0.5,
        f"{rollout}.free_cache_engine": not row.separate,  # a separate engine keeps its memory for itself
        f"{rollout}.enforce_eager": False,
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.ignore_eos": True, f"{rollout}.temperature": 1.0,
        f"{rollout}.max_num_seqs": args.tasks * args.group, f"{rollout}.max_model_len": args.tokens + 64,
        "reward.custom_reward_function.path": Path(__file__).with_name("against_verl_peer.py"),
        "reward.num_workers": 2,
        "trainer.v1.trainer_mode": row.mode,
        "trainer.nnodes": 1, "trainer.n_gpus_per_node": 1 if row.separate else row.gpus,
        "trainer.total_training_steps": args.steps, "trainer.total_epochs": 1000,
        "trainer.logger": "[console,file]",
        "trainer.save_freq": -1, "trainer.test_freq": -1, "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
        "ray_kwargs.ray_init.num_cpus": max(24, os.cpu_count() or 0),
        "+ray_kwargs.ray_init.num_gpus": row.gpus,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "hydra.run.dir": folder / f"{name}.hydra",
    }  # fmt: skip
    if row.separate:  # one update between two versions, and one batch ahead
        values |= {
            "actor_rollout_ref.hybrid_engine": False,
            f"{rollout}.nnodes": 1, f"{rollout}.n_gpus_per_node": 1,
            f"{rollout}.checkpoint_engine.backend": "nccl",
            "trainer.v1.separate_async.parameter_sync_step": 1,
        }  # fmt: skip
    return [*(f"{key}={value}" for key, value in values.items()), *args.verl_set]


def make_data(args: argparse.Namespace, folder: Path) -> Path:
    """The tasks of Trinity's rows in veRL's form. Prompts of a step have the same tokens on both sides."""
    made = folder / "verl.jsonl"
    lines = [json.loads(line) for line in (folder / "data/train.jsonl").read_text().splitlines()]
    made.write_text("".join(
        json.dumps({
            "data_source": "sums", "prompt": [{"role": "user", "content": line["question"]}],
            "reward_model": {"style": "rule", "ground_truth": line["answer"]}, "extra_info": {"index": index},
        }) + "\n"
        for index, line in enumerate(lines)
    ))  # fmt: skip
    return made


def play_verl(args: argparse.Namespace, folder: Path, row: Row, name: str) -> dict[str, Any]:
    """The figures of a run, or the reason why they are missing."""
    steps, log = folder / f"{name}.steps.jsonl", folder / f"{name}.out"
    steps.unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, (str(args.verl or ""), os.environ.get("PYTHONPATH", ""))))
    given = {
        **os.environ, **whole_run.environment(args, against_trl.cards(row)), "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1", "HYDRA_FULL_ERROR": "1", "RAY_USAGE_STATS_ENABLED": "0",
        "VERL_FILE_LOGGER_PATH": str(steps),
        # At INFO, 0.9.1 ends in a TypeError of a log line if no engine shares the trainer's GPUs.
        "VERL_LOGGING_LEVEL": "WARN",
    }  # fmt: skip
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(args, folder, row, name)]
    if subprocess.run([sys.executable, "-c", _IS_THERE], env=given, timeout=60).returncode:
        return {"missing": "verl is not installed"}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    began = time.time()
    ends: list[float] = []
    with log.open("w") as out:
        peer = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=given, cwd=folder)
        try:
            while peer.poll() is None and len(ends) < args.steps and time.time() < began + args.limit:
                ends += [time.time()] * (len(whole_run.lines(steps)) - len(ends))
                time.sleep(0.02)
        finally:
            end_all(peer)
    lines = [line["data"] for line in whole_run.lines(steps)]
    if len(ends) < args.steps:
        text = log.read_text(errors="replace")
        errors = [line for line in text.splitlines() if "Error" in line] or [""]
        why = f"veRL ended with {peer.returncode} after {len(ends)} steps: {errors[-1].strip()}"
        return {"missing": f"{why}\n{text[-3000:]}"}
    return {"first": ends[0] - began, **measured(ends, lines, args.unmeasured)}


def measured(ends: list[float], lines: list[dict[str, Any]], unmeasured: int) -> dict[str, Any]:
    """Seconds between the ends of the measured steps, and means of veRL's own figures of them."""
    counted = lines[unmeasured : len(ends)]
    mean = {key: statistics.mean(line.get(key, 0.0) for line in counted) for key in _FIGURES}
    return {
        "seconds": (ends[-1] - ends[unmeasured - 1]) / len(counted),
        "tokens": statistics.mean(_response_tokens(line) for line in counted),
        "wait": mean["timing_s/gen"],
        "step": mean["timing_s/old_log_prob"] + mean["timing_s/adv"] + mean["timing_s/update_actor"],
        "publish": mean["timing_s/update_weights"],
        "memory": max(line.get("perf/max_memory_reserved_gb", 0.0) for line in counted),
        "own": {key: [line.get(key) for line in counted] for key in (*_FIGURES, "timing_s/step")},
    }


def _response_tokens(line: dict[str, Any]) -> float:
    """Returns the response tokens of a step, from all its tokens and the mean lengths of prompts and responses."""
    response, prompt = line["response_length/mean"], line["prompt_length/mean"]
    return float(line["perf/total_num_tokens"] * response / (response + prompt))


def end_all(peer: "subprocess.Popen[bytes]") -> None:
    """Kill every process that descends from this one: Ray's workers and vLLM's engines leave their parents."""
    me = psutil.Process()
    deadline = time.monotonic() + 30
    while (left := me.children(recursive=True)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        peer.poll()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)
    peer.poll()


def main() -> None:
    args = parsed()
    made = Table(
        f"{args.tasks} x {args.group} responses of {args.tokens} tokens, one update a step, {args.size}",
        ("", "GPUs", "s/step", "samples/s", "tokens/step", "waits", "trains", "publishes", "first step",
         "of its sync", "of its async"),
        [f"the first {args.unmeasured} of {args.steps} steps are not measured; tokens of the responses"],
    )  # fmt: skip
    wanted = [ROWS[number - 1] for number in args.only]
    with whole_run.working_folder(args.folder) as folder:
        async_vs_sync.prepare(args, folder)
        found = {row: against_trl.found_by(args, folder, row, play_verl)
                 for row in wanted if not (args.cpu and row.gpus > 1)}  # fmt: skip
    speeds = {row: args.tasks * args.group / one["seconds"] for row, one in found.items() if "missing" not in one}
    for row, one in found.items():
        if row not in speeds:
            made.rows.append((f"{row.name}: {one['missing'].splitlines()[0][:120]}", str(row.gpus), *[""] * 9))
            continue
        parts = (f"{one[part]:.2f}" for part in (*against_trl.PARTS, "first"))
        ratios = (over(speeds, row, sync) for sync in (True, False))
        made.rows.append((row.name, str(row.gpus), f"{one['seconds']:.2f}", f"{speeds[row]:.1f}",
                          f"{one['tokens']:,.0f}", *parts, *ratios))  # fmt: skip
    made.show()


def over(speeds: dict[Row, float], row: Row, sync: bool) -> str:
    """The row's speed over veRL's best on as many GPUs, of its synchronous or asynchronous rows."""
    best = max((speed for peer, speed in speeds.items()
                if peer.peer and peer.gpus == row.gpus and (peer.mode == "sync") is sync), default=None)  # fmt: skip
    return f"{speeds[row] / best:.2f}" if best else ""


if __name__ == "__main__":
    main()
