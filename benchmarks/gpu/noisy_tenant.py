"""A light tenant alone, and beside a noisy one that always has commands waiting. A 1.5 B shape on one GPU.

    python benchmarks/gpu/noisy_tenant.py             about three minutes
    python benchmarks/gpu/noisy_tenant.py --cpu       a small shape on one thread; --tiny shows that it runs

The light tenant makes steps, each a pass with gradients and one of AdamW, and pauses nine times as long as a step takes
alone. The noisy one sends steps with passes of the same size, and of eight times the size. Executor and queue are real;
log, HTTP and sampling are not in it, and pauses in which nobody waits are skipped. Both sides are measured in turns,
and the medians of rounds count. On the CPU seconds are those of this process, so that others on the machine do not
count. Since no part of a pass is interrupted, a step beside waits on average for half a part of the noisy one's.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tenants import TINY
from whole_run import SHAPES

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests")]

ON_CPU = {"hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4, "intermediate": 1024, "vocabulary": 4096, "steps": 8,
          "sequences": 4, "length": 32, "micro_tokens": 128}  # fmt: skip
MOST_LOSS, DUTY = 0.1, 0.1
_WAITING = 4  # commands of the noisy tenant, which are never fewer
_LORA = {"seed": 0, "train_attn": True, "train_mlp": True, "rank": 16}
_ADAM = {"learning_rate": 1e-5, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}


class Place:
    """An executor with both tenants, and their queue."""

    def __init__(self, model: Any, args: argparse.Namespace, folder: Path) -> None:
        from trinity.tinker.commands.log import Kind, canonical
        from trinity.tinker.executor.executor import Executor
        from trinity.tinker.executor.queue import FairQueue
        from trinity.tinker.executor.states import States

        self._args, self._position, self._skipped = args, 0, 0.0
        self._clock = time.process_time if args.device == "cpu" else time.monotonic
        self._executor = Executor(model, States(folder), clock=self._clock)
        self._queue = FairQueue(0, {})
        self._noisy = 0  # commands that wait
        for tenant in ("light", "noisy"):
            self._add(tenant, Kind.CREATE_MODEL, canonical({"lora_config": _LORA}))
        self._rest()

    def _add(self, tenant: str, kind: Any, body: bytes) -> None:
        from trinity.tinker.commands.log import Command

        self._position += 1
        self._queue.add(Command(kind, tenant, tenant, self._position, body, 0.0, self._position))
        self._noisy += tenant == "noisy"

    def _step(self, tenant: str, times: int) -> None:
        import numpy as np

        from trinity.tinker.commands.log import Kind, canonical
        from trinity.tinker.commands.wire import Datum, Forward, write_forward

        rng, data = np.random.default_rng(times), []
        for _ in range(times * self._args.sequences):
            tokens = rng.integers(0, self._args.vocabulary, self._args.length)
            weights = np.ones(self._args.length, np.float32)
            data.append(Datum(tokens, {"target_tokens": tokens, "weights": weights}))
        whole = Forward(tenant, 1, tuple(data), "cross_entropy", {}, True)
        self._add(tenant, Kind.FORWARD_BACKWARD, write_forward(whole))
        self._add(tenant, Kind.OPTIM_STEP, canonical({"adam_params": _ADAM}))

    def _now(self) -> float:
        return self._clock() + self._skipped

    def _rest(self, running: Iterable[Any] = ()) -> None:
        """Executes what is begun, and what waits."""
        from trinity.tinker.executor.turns import turn

        for executed in running:
            self._noisy -= sum(command.tenant == "noisy" for command, _ in executed)
        if self._queue:
            self._rest(turn(self._executor, self._queue))

    def light(self, steps: int, pause: float, times: int = 0) -> tuple[float, float]:
        """Returns the seconds of a step with its pause, and the median of those without. times: size of the noisy
        tenant's passes; 0: there is none."""
        from trinity.tinker.commands.log import Kind
        from trinity.tinker.executor.turns import turn

        begin, taken = self._now(), list[float]()
        due, sent = begin + pause, False
        running: Iterator[Any] = iter(())
        while len(taken) < steps:
            while times and self._noisy < _WAITING:
                self._step("noisy", times)
            if not sent and self._now() >= due:
                self._step("light", 1)
                sent = True
            if (executed := next(running, None)) is None:
                self._skipped += 0.0 if self._queue else max(0.0, due - self._now())
                running = turn(self._executor, self._queue) if self._queue else iter(())
            for command, _ in executed or ():
                self._noisy -= command.tenant == "noisy"
                if (command.tenant, command.kind) == ("light", Kind.OPTIM_STEP):
                    taken.append(self._now() - due)
                    due, sent = self._now() + pause, False
        whole = (self._now() - begin) / steps
        self._rest(running)
        return whole, statistics.median(taken)


def measure(args: argparse.Namespace, folder: Path) -> Any:
    import torch
    from buffer_table import Table, at_most
    from rollout import make_model

    from trinity.tinker.executor.model import SharedModel

    make_model(folder / "model", args)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    if args.device == "cpu":
        torch.set_num_threads(1)
    model = SharedModel(str(folder / "model"), dtype, torch.device(args.device), args.micro_tokens)
    place = Place(model, args, folder / "states")
    note = f"passes of {args.sequences} x {args.length} tokens, parts of {args.micro_tokens}; "
    table = Table(
        f"a light tenant beside a noisy one, on {args.device}",
        ("noisy pass", "a step alone, s", "beside, s", "with pauses alone, s", "beside, s", "lost", "limit"),
        [note + f"medians of {args.rounds} rounds of {args.steps} steps"],
    )
    place.light(3, 0.0, max(args.times))  # warms up
    for times in args.times:
        rounds = []
        for _ in range(args.rounds):
            _, step = place.light(5, 0.0)
            pause = step * (1 / DUTY - 1)
            rounds.append((*place.light(args.steps, pause), *place.light(args.steps, pause, times)))
        whole_alone, alone, whole_beside, beside = map(statistics.median, zip(*rounds, strict=True))
        lost = 1 - whole_alone / whole_beside
        figures = [f"{seconds:.3f}" for seconds in (alone, beside, whole_alone, whole_beside)]
        table.rows.append((f"x {times}", *figures, f"{lost:.1%}", at_most(lost, MOST_LOSS)))
        print(*table.rows[-1], file=sys.stderr, flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SHAPES), default="1.5B", help="shape of the base")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15, help="of the light tenant in a round, alone and beside")
    parser.add_argument("--sequences", type=int, default=8, help="of the light tenant's pass")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--micro-tokens", type=int, default=2048, help="of a part of a pass, with padding")
    parser.add_argument("--times", type=int, nargs="+", default=[1, 8], help="sizes of the noisy tenant's passes")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="seconds of work: shows that it runs, measures nothing")
    args = parser.parse_args()
    args.device = "cpu" if args.cpu else "cuda"
    vars(args).update(SHAPES[args.size])
    if args.cpu:
        vars(args).update(ON_CPU)
    if args.tiny:
        vars(args).update({**TINY, "rounds": 1, "steps": 3, "sequences": 2, "length": 8, "micro_tokens": 16})
    with tempfile.TemporaryDirectory(prefix="noisy-tenant-") as name:
        measure(args, Path(name)).show()


if __name__ == "__main__":
    main()
