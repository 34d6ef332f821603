"""Conversations on two engines: prompts' tokens that are computed again, with and without a home for each conversation.

    python benchmarks/turns.py [--talks 12] [--turns 6] [--rounds 4] [--device cpu|cuda]

Turns of all conversations end in any order, as an agent's tools do. A turn adds 96 tokens to its prompt: a reply of 32
and an observation. Rounds alternate, and new conversations begin in each.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))
from buffer_table import Table
from rollout import make_model

from trinity.data.experience import SamplingParams
from trinity.explorer.engine.engine import CACHED, PROMPTS
from trinity.explorer.engine.pool import EnginePool, Homes
from trinity.explorer.types import EngineOptions
from trinity.runtime.metrics import Counter

_SHAPE = {"hidden": 256, "layers": 8, "heads": 4, "kv_heads": 2, "intermediate": 1024, "vocabulary": 4096}


class Nowhere(Homes):
    """Forgets where a prompt's beginning was sampled."""

    def enter(self, tokens: object, sequences: int) -> int:
        return super().enter((), sequences)


async def play(pool: EnginePool, args: argparse.Namespace, kind: type[Homes], seed: int) -> tuple[float, float]:
    """(part of the prompts' tokens that was computed, seconds)."""
    pool._homes = kind(len(pool.engines))
    drawn = random.Random(seed)

    async def talk(tokens: list[int], waits: list[float]) -> None:
        for wait in waits:
            await asyncio.sleep(wait)
            (reply,) = await pool.generate(tokens, SamplingParams(max_tokens=32, min_tokens=32, n=1, ignore_eos=True))
            tokens = [*tokens, *reply.token_ids.tolist(), *(drawn.randrange(10, 4000) for _ in range(64))]

    prompts, cached, began = _count(PROMPTS), _count(CACHED), time.monotonic()
    talks = [[drawn.randrange(10, 4000) for _ in range(256)] for _ in range(args.talks)]
    waits = [[drawn.uniform(0, 0.5) for _ in range(args.turns)] for _ in talks]
    await asyncio.gather(*map(talk, talks, waits))
    return 1 - (_count(CACHED) - cached) / (_count(PROMPTS) - prompts), time.monotonic() - began


def _count(counter: Counter) -> float:
    return next(iter(counter.collect())).samples[0].value


async def measure(args: argparse.Namespace, model: Path) -> None:
    devices = ["0", "1"] if args.device == "cuda" else [None, None]
    pool = await EnginePool.start(EngineOptions(str(model), args.device, 1024), devices)
    try:
        await play(pool, args, Homes, 0)
        found: dict[type[Homes], list[tuple[float, float]]] = {Nowhere: [], Homes: []}
        for index in range(args.rounds):
            for kind, results in found.items():
                results.append(await play(pool, args, kind, 1 + 2 * index + (kind is Homes)))
    finally:
        pool.close()
    made = Table("turns on two engines", ("requests go to", "prompt tokens computed", "seconds"), [])
    for kind, name in ((Nowhere, "the least busy engine"), (Homes, "the conversation's engine")):
        parts, seconds = zip(*found[kind], strict=True)
        made.rows.append((name, f"{statistics.median(parts):.1%}", f"{statistics.median(seconds):.1f}"))
    made.show()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("talks", 12), ("turns", 6), ("rounds", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--tiny", action="store_true", help="shows that it runs, measures nothing")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    if args.tiny:
        vars(args).update(talks=3, turns=2, rounds=1)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), argparse.Namespace(device=args.device, **_SHAPE))
        asyncio.run(measure(args, Path(folder)))


if __name__ == "__main__":
    main()
