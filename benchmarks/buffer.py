"""The buffer: throughput, latency, restart, memory. Each part prints one table of figures and limits.

    python benchmarks/buffer.py [throughput] [latency] [restart] [memory] [tls] [--tiny]

Without names, all parts but tls, which compares throughput with and without mTLS. nats-server has the settings of
`trinity run` (every message is on disk before it is acknowledged). Buffer and sync are separate processes.
"""

import argparse
import asyncio
import logging
import sys
from pathlib import Path

PARTS = ("throughput", "latency", "restart", "memory", "tls")

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


async def measure(args: argparse.Namespace) -> None:
    import buffer_flow
    import buffer_stored
    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    groups_per_second: dict[int, float] = {}
    if "throughput" in args.parts:
        (await buffer_flow.throughput(args, groups_per_second)).show()
    if "latency" in args.parts:
        (await buffer_flow.latency(args, groups_per_second)).show()
    if "restart" in args.parts:
        (await buffer_stored.restart(args)).show()
    if "memory" in args.parts:
        (await buffer_stored.memory(args)).show()
    if "tls" in args.parts:
        (await buffer_flow.cost_of_tls(args)).show()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", metavar="part", help=f"any of {', '.join(PARTS)}; all but the last if none is named"
    )
    flow = "throughput and latency: "
    parser.add_argument("--groups", type=int, default=3200, help=flow + "groups of a run; a quarter of 8 x 4096 tokens")
    parser.add_argument("--responses", type=int, nargs="+", default=[512, 4096], help=flow + "tokens of a response")
    parser.add_argument("--per-step", type=int, default=32, help=flow + "groups of an optimizer step")
    parser.add_argument("--runs", type=int, default=3, help="repetitions; medians are shown")
    parser.add_argument("--logged", type=int, default=100_000, help="restart: small groups in the log and the ledger")
    parser.add_argument("--unjudged", type=int, default=20_000, help="restart: further groups that no buffer has seen")
    parser.add_argument("--stored", type=int, default=200_000, help="memory: small groups; 1000000 takes half an hour")
    parser.add_argument("--tiny", action="store_true", help="seconds of work: shows that it runs, measures nothing")
    args = parser.parse_args()
    unknown = sorted(set(args.parts) - set(PARTS))
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    args.parts = args.parts or list(PARTS[:-1])
    if args.tiny:
        args.groups, args.responses, args.per_step, args.runs = 32, [512], 4, 1
        args.logged, args.unjudged, args.stored = 128, 64, 128
    asyncio.run(measure(args))


if __name__ == "__main__":
    main()
