"""Compares log-probabilities of engine and trainer in a mixture of experts, without and with replayed routes.

    python benchmarks/gpu/router_replay.py      one GPU; about two minutes
    python benchmarks/gpu/router_replay.py --cpu

A tiny Qwen3-MoE whose gates are undecided between each four of eight experts, as in tests/models. The engine records
the experts of talks of two turns; the trainer computes them again in the same precision.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="in float32 only, as the test does")
    args = parser.parse_args()
    from models.replay import gap_of

    for dtype in ("float32",) if args.cpu else ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as folder:
            gap = asyncio.run(gap_of(Path(folder), "cpu" if args.cpu else "cuda", dtype))
        print(f"{dtype}: {gap}", flush=True)


if __name__ == "__main__":
    main()
