"""Experiments an hour of `trinity tinker`: eight tenants at once against one after the other.

    python benchmarks/gpu/tinker_tenants.py [--size 1.5B] [--tenants 8]       one GPU, or two; about eight minutes
    python benchmarks/gpu/tinker_tenants.py --cpu --tiny

All of it is real: HTTP, the durable log on NATS, executor and explorer. An experiment is a loop of --steps: sample
prompts x `--samples` sequences by the newest adapters, a pass with gradients of the importance-sampling loss over them,
a step of AdamW, and a save for the sampler. Rewards are random numbers. The tenants, adapters of rank 16, work one
after the other and then at once, in --rounds; each number of `--prompts` has a table. The executor takes the first GPU
of CUDA_VISIBLE_DEVICES, the explorer the last.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import whole_run
from buffer_table import Table, at_least

from support.servers.tinker_stack import BASE, HttpTenant
from trinity.runtime.process import free_port
from trinity.tinker.commands.samples import Samples
from trinity.tinker.commands.wire import Datum, Forward, read_samples, write_forward

LEAST_GAIN = 2.5
START_SECONDS, STOP_SECONDS = 300.0, 60.0
FULL = {"tenants": 8, "steps": 4, "rounds": 2, "samples": 8, "prompt": 128, "response": 128}
TINY = {"tenants": 2, "steps": 1, "rounds": 1, "samples": 2, "prompt": 16, "response": 16}
RANK, SAMPLER_GIB = 16, 40.0
ADAM = {"learning_rate": 1e-5, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


def parsed() -> argparse.Namespace:
    made = whole_run.parser(__doc__)
    made.add_argument("--size", choices=list(whole_run.SHAPES), default="1.5B", help="shape of the base")
    for name, value in FULL.items():
        made.add_argument(f"--{name}", type=int, default=value)
    made.add_argument("--prompts", type=int, nargs="+", default=[2, 8])
    if "--tiny" in sys.argv:
        made.set_defaults(**TINY, size="tiny", prompts=[1])
    return made.parse_args()


def config(args: argparse.Namespace, folder: Path, gpus: str) -> dict[str, Any]:
    return {
        "name": "experiments",
        "checkpoint_root_dir": str(folder),
        "model_path": str(folder / args.size),
        "base_model": BASE,
        "tenants": [f"tenant{number}" for number in range(args.tenants)],
        "port": free_port(),
        "max_length": args.prompt + args.response,
        "max_rank": RANK,
        "dtype": "float32" if args.cpu else "bfloat16",
        "sampled_adapters": args.tenants,
        "sampler_devices": "" if args.cpu else gpus.split(",")[-1],
        "sampler_gpu_gib": 0.0 if args.cpu else SAMPLER_GIB,
    }


@contextlib.contextmanager
def served(args: argparse.Namespace, folder: Path) -> Iterator[SimpleNamespace]:
    """The service, with the url and keys of its tenants. Raises RuntimeError if it does not start."""
    environment = whole_run.environment(args)
    values = config(args, folder, environment["CUDA_VISIBLE_DEVICES"])
    file, told = whole_run.write_yaml(folder / "tinker.yaml", values), folder / "tinker.out"
    command = [sys.executable, "-m", "trinity.cli.main", "tinker", "--config", str(file)]
    with told.open("wb") as out:
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + START_SECONDS
        while "try it" not in told.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the service did not start:\n{told.read_text()[-3000:]}")
            time.sleep(0.2)
        keys = folder / "tinker/experiments/keys"
        yield SimpleNamespace(
            url=f"http://127.0.0.1:{values['port']}",
            keys={tenant: (keys / tenant).read_text().strip() for tenant in values["tenants"]},
        )
    finally:
        process.terminate()
        process.wait(timeout=STOP_SECONDS)


def data_of(prompt: list[int], samples: Samples, rng: np.random.Generator) -> list[Datum]:
    """The sequences of one prompt, each with one random advantage for its sampled tokens."""
    made = []
    for one in samples.sequences:
        tokens = np.concatenate([prompt, one.tokens]).astype(np.int64)
        before, sampled = np.zeros(len(prompt) - 1, np.float32), len(one.tokens)
        inputs = {
            "target_tokens": tokens[1:],
            "logprobs": np.concatenate([before, one.logprobs]).astype(np.float32),
            "advantages": np.concatenate([before, np.full(sampled, rng.normal())]).astype(np.float32),
        }
        made.append(Datum(tokens[:-1], inputs))
    return made


class Experiment:
    """One tenant's model, and its loop."""

    def __init__(self, args: argparse.Namespace, service: SimpleNamespace, number: int) -> None:
        self._args, self._rng, self._seq_id, self._samplers = args, np.random.default_rng(number), 0, 0
        self._http = HttpTenant(service, f"tenant{number}")
        self._model = self._http.create(RANK)
        self._saved = self._http.result(self._save())["path"]
        self.seconds = {"samples": 0.0, "commands": 0.0}
        self._sampled(1)

    def run(self, prompts: int) -> None:
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        for _ in range(self._args.steps):
            begin = time.monotonic()
            data = [one for prompt, samples in self._sampled(prompts) for one in data_of(prompt, samples, self._rng)]
            sampled = time.monotonic()
            self.seconds["samples"] += sampled - begin
            self._seq_id += 1
            passed = Forward(self._model, self._seq_id, tuple(data), "importance_sampling", {}, True)
            sent = [self._http.post("forward_backward", write_forward(passed))["request_id"]]
            sent += [self._command("optim_step", adam_params=ADAM), self._save()]
            *_, saved = [self._http.result(request) for request in sent]
            self._saved = saved["path"]
            self.seconds["commands"] += time.monotonic() - sampled

    def _save(self) -> str:
        return self._command("save_weights_for_sampler", path=f"after{self._seq_id}")

    def _command(self, kind: str, **body: Any) -> str:
        self._seq_id += 1
        return str(self._http.post(kind, {"model_id": self._model, "seq_id": self._seq_id, **body})["request_id"])

    def _sampled(self, count: int) -> list[tuple[list[int], Samples]]:
        """Random prompts with samples by the newest adapters. All requests are under way together."""
        args, self._samplers = self._args, self._samplers + 1
        session = {"session_id": self._http.session, "sampling_session_seq_id": self._samplers}
        sampler = self._http.post("create_sampling_session", session | {"model_path": self._saved})
        asked = {
            "sampling_session_id": sampler["sampling_session_id"], "num_samples": args.samples,
            "sampling_params": {"max_tokens": args.response, "temperature": 1.0, "stop": []},
        }  # fmt: skip
        prompts = self._rng.integers(1, 250, (count, args.prompt)).tolist()
        requests = []
        for number, prompt in enumerate(prompts):
            chunks = {"chunks": [{"tokens": prompt, "type": "encoded_text"}]}
            requests.append(self._http.post("asample", asked | {"seq_id": number, "prompt": chunks})["request_id"])
        answers = [self._http.result(request, read_samples, START_SECONDS) for request in requests]
        if refused := [answer for answer in answers if not isinstance(answer, Samples)]:
            raise RuntimeError(f"no samples: {refused[0]}")
        return list(zip(prompts, answers, strict=True))


def seconds_of(experiments: list[Experiment], at_once: int, prompts: int) -> dict[str, float]:
    """Returns the seconds until all experiments ended, and the mean seconds one waited for samples and commands."""
    begin = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        for done in [pool.submit(experiment.run, prompts) for experiment in experiments]:
            done.result()
    waited = {name: statistics.mean(one.seconds[name] for one in experiments) for name in experiments[0].seconds}
    return {"all": time.monotonic() - begin, **waited}


def main() -> None:
    args = parsed()
    with whole_run.working_folder(args.folder) as folder:
        whole_run.make_model(folder, args.size, args.cpu)
        with served(args, folder) as service:
            experiments = [Experiment(args, service, number) for number in range(args.tenants)]
            for prompts in args.prompts:
                measured(args, experiments, prompts).show()


def measured(args: argparse.Namespace, experiments: list[Experiment], prompts: int) -> Table:
    taken: dict[int, list[dict[str, float]]] = {1: [], args.tenants: []}
    for number in range(args.rounds + 1):
        for at_once, rounds in taken.items():
            rounds.append(seconds_of(experiments, at_once, prompts))
            told = ", ".join(f"{name} {value:.2f} s" for name, value in rounds[-1].items())
            print(f"round {number}, {at_once} at once: {told}", file=sys.stderr, flush=True)
    table = Table(
        f"{args.tenants} tenants, {args.steps} steps of {prompts} x {args.samples} sequences, {args.size}",
        ("experiments", "s", "an hour", "one waits for samples, commands s", "ratio", "limit"),
        ["medians of the rounds after the first, which compiles"],
    )
    sides = [
        {name: statistics.median(one[name] for one in rounds[1:]) for name in rounds[0]} for rounds in taken.values()
    ]
    gain = sides[0]["all"] / sides[1]["all"]
    for name, found, judged in zip(
        ("one after the other", "at once"), sides, (("", ""), (f"{gain:.2f}", at_least(gain, LEAST_GAIN))), strict=True
    ):
        waits = f"{found['samples']:.2f}, {found['commands']:.2f}"
        table.rows.append((name, f"{found['all']:.2f}", f"{args.tenants * 3600 / found['all']:,.0f}", waits, *judged))
    return table


if __name__ == "__main__":
    main()
