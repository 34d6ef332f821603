"""Tenants of one base: passes of all at once against one tenant after the other. A 1.5 B shape on one GPU.

    python benchmarks/gpu/tenants.py             1, 4 and 8 tenants; about three minutes
    python benchmarks/gpu/tenants.py --cpu --tiny

Each tenant's step is a pass with gradients over `--sequences` of `--length` tokens, and one of AdamW. Ranks are 4, 8,
16 and 32 in turn. The executor alone works, on commands that all wait; logs, HTTP and sampling are not in it. Both
sides work in turns, round by round; the medians of rounds count.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whole_run import SHAPES

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests")]

RANKS = (4, 8, 16, 32)
LEAST_GAIN = 2.5
SIZES = ((4, 64), (8, 256), (32, 512))  # sequences of a pass, tokens of each
TINY = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 128, "vocabulary": 512}
_LORA = {"seed": 0, "train_attn": True, "train_mlp": True}
_ADAM = {"learning_rate": 1e-5, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}


class Work:
    """Commands of the tenants, at the executor's next positions."""

    def __init__(self, executor: Any, vocabulary: int) -> None:
        self.executor, self._vocabulary = executor, vocabulary

    def _command(self, kind: Any, model: str, body: bytes, position: int) -> Any:
        from trinity.tinker.commands.log import Command

        return Command(kind, model, model, position, body, 0.0, position)

    def create(self, models: int) -> None:
        from trinity.tinker.commands.log import Kind, canonical

        for index in range(models):
            body = canonical({"lora_config": {"rank": RANKS[index % len(RANKS)], **_LORA}})
            made = self.executor.execute(self._command(Kind.CREATE_MODEL, f"m{index}", body, index + 1))
            assert made.kind == Kind.CREATE_MODEL, made

    def steps(self, models: int, sequences: int, length: int, seed: int) -> list[Any]:
        import numpy as np

        from trinity.tinker.commands.log import Kind, canonical
        from trinity.tinker.commands.wire import Datum, Forward, write_forward

        rng, made, at = np.random.default_rng(seed), [], self.executor.commands
        for index in range(models):
            data = []
            for _ in range(sequences):
                tokens = rng.integers(0, self._vocabulary, length)
                values = {name: rng.standard_normal(length).astype(np.float32) for name in ("logprobs", "advantages")}
                data.append(Datum(tokens, {"target_tokens": tokens, **values}))
            body = write_forward(Forward(f"m{index}", 1, tuple(data), "ppo", {}, True))
            made.append(self._command(Kind.FORWARD_BACKWARD, f"m{index}", body, at + len(made) + 1))
            step = canonical({"adam_params": _ADAM})
            made.append(self._command(Kind.OPTIM_STEP, f"m{index}", step, at + len(made) + 1))
        return made


def seconds_of(action: Callable[[], Any], device: str) -> float:
    import torch

    begin = time.perf_counter()
    action()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(args: argparse.Namespace, folder: Path) -> Any:
    import torch
    from buffer_table import Table, at_least
    from rollout import make_model

    from trinity.tinker.executor.executor import Executor
    from trinity.tinker.executor.model import SharedModel
    from trinity.tinker.executor.states import States

    make_model(folder / "model", args)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = SharedModel(str(folder / "model"), dtype, torch.device(args.device), args.micro_tokens)
    work = Work(Executor(model, States(folder / "states"), shares=True), args.vocabulary)
    work.create(max(args.models))
    table = Table(
        f"steps of tenants on {args.device}",
        ("tenants", "a pass", "one after the other, s", "at once, s", "of one after the other"),
        [f"seconds for one step of every tenant, medians of {args.rounds} rounds; goal of 8: {LEAST_GAIN}"],
    )
    execute, together = work.executor.execute, work.executor.execute_all
    for sequences, length in args.sizes:
        for models in args.models:
            found: dict[str, list[float]] = {"alone": [], "together": []}
            for round_ in range(args.rounds + 1):  # the first warms up
                made = work.steps(models, sequences, length, round_)
                found["alone"].append(seconds_of(lambda made=made: [execute(one) for one in made], args.device))  # type: ignore[misc]
                found["together"].append(seconds_of(lambda made=made: together(made), args.device))  # type: ignore[misc]
            alone, at_once = (statistics.median(found[side][1:]) for side in ("alone", "together"))
            gain = alone / at_once
            shown = f"{gain:.2f} ({at_least(gain, LEAST_GAIN)})" if models == 8 else f"{gain:.2f}"
            table.rows.append((str(models), f"{sequences} x {length}", f"{alone:.3f}", f"{at_once:.3f}", shown))
            print(*table.rows[-1], file=sys.stderr, flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SHAPES), default="1.5B", help="shape of the base")
    parser.add_argument("--models", type=int, nargs="+", default=[1, 4, 8], help="numbers of tenants")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--micro-tokens", type=int, default=16384, help="of a forward pass, with padding")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="seconds of work: shows that it runs, measures nothing")
    args = parser.parse_args()
    args.device, args.sizes = "cpu" if args.cpu else "cuda", SIZES
    vars(args).update(SHAPES[args.size])
    if args.tiny:
        vars(args).update({**TINY, "models": [1, 8], "rounds": 1, "sizes": ((2, 8),)})
    with tempfile.TemporaryDirectory(prefix="tenants-") as name:
        measure(args, Path(name)).show()


if __name__ == "__main__":
    main()
