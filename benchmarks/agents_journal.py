"""Cost of the journal for episodes of ten turns: the same tasks with and without it, in alternating rounds.

    python benchmarks/agents_journal.py [--tiny] [--device cuda] [--hidden 1536 --layers 28 ...]

Real parts: vLLM, a whole attempt, the environment service, and a nats-server that syncs each write. A turn is written
while its episode plays the next one. Two figures: the seconds of rounds with the journal over those of rounds without;
and the share of an episode's time spent waiting for writes. The limit of both is 2 %.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))
from rollout import make_model

LIMIT = 0.02
TURNS = 10
LAKE = ["SFFF", "FFFF", "FFFF", "FFFG"]


async def measure(folder: Path, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each round with and without the journal, and of each wait for a write."""
    from support.fakes.data.experience import make_task
    from support.servers.nats import NatsServer
    from support.servers.service import ServiceProcess
    from trinity.buffer.state.streams import stream_specs
    from trinity.config.schema.model import ModelConfig
    from trinity.data.experience import Group, Limits, SamplingParams
    from trinity.explorer.chat import ChatTokenizer
    from trinity.explorer.engine.auxiliary import AuxiliaryModels
    from trinity.explorer.engine.pool import EnginePool
    from trinity.explorer.environments.client import EnvironmentClient
    from trinity.explorer.journal.journal import EpisodeJournal, Journals, TaskJournal
    from trinity.explorer.rollout import attempt
    from trinity.explorer.rollout.toolbox import ExplorerTools
    from trinity.explorer.types import EngineOptions
    from trinity.runtime.broker import connect, ensure_streams
    from trinity.runtime.names import RunNames

    model = args.model or str(folder)
    nats, environment = NatsServer(folder / "nats"), ServiceProcess("environment", folder).start()
    nats.start()
    tokenizer, names = ChatTokenizer(ModelConfig(model_path=model)), RunNames("tests-run-000000")
    pool = await EnginePool.start(EngineOptions(model=model, device=args.device, max_model_len=4096), [None])
    tools = ExplorerTools(pool, tokenizer, EnvironmentClient(environment.address), AuxiliaryModels({}), 1024, 4096)
    seconds: dict[str, list[float]] = {"without": [], "with": [], "waits": []}
    sampling = SamplingParams(max_tokens=args.response, n=args.rollouts, ignore_eos=True)
    task = replace(
        make_task(row_json=json.dumps({"desc": LAKE}), repeat_times=args.rollouts, sampling=sampling),
        workflow="frozen_lake_workflow",
        timeout_seconds=600.0,
    )
    keep, settle = EpisodeJournal.keep, TaskJournal.settle

    async def timed(work: Awaitable[Any]) -> Any:
        begin = time.perf_counter()
        found = await work
        seconds["waits"].append(time.perf_counter() - begin)
        return found

    EpisodeJournal.keep = lambda *given: timed(keep(*given))  # type: ignore[method-assign]
    TaskJournal.settle = lambda *given: timed(settle(*given))  # type: ignore[method-assign]

    async def reaches(_: int) -> bool:
        return True

    async def play(number: int, journals: Journals | None) -> None:
        played = replace(task, ordinal=number, task_id=f"lake/{number}", row=number)
        group = await attempt.explore(played, 1, "bench", tools, journals=journals)
        assert isinstance(group, Group), group
        turns = [experience.metrics["steps"] for experience in group.experiences]
        assert turns == [TURNS] * args.rollouts, f"episodes of {turns} turns, not {TURNS}"

    try:
        async with await connect(nats.url, "bench") as broker:
            await ensure_streams(broker, stream_specs(names, log_bytes=2**30, replicas=1))
            journals = Journals(broker, names, "bench", Limits(4096, 0), lambda _: True, reaches)
            for number in range(args.rounds + 1):  # the first round warms up
                sides = [("without", None), ("with", journals)]
                for side, kept in sides if number % 2 else reversed(sides):
                    if number == 1 and side == "with":
                        seconds["waits"].clear()
                    begin = time.perf_counter()
                    first = 1 + args.tasks * (2 * number + (side == "with"))
                    await asyncio.gather(*(play(first + index, kept) for index in range(args.tasks)))
                    if number:
                        seconds[side].append(time.perf_counter() - begin)
            stored = (await broker.state(names.turns_stream)).messages
            assert stored == (args.rounds + 1) * args.tasks * args.rollouts * TURNS, f"{stored} turns were written"
    finally:
        await tools.close()
        pool.close()
        environment.kill()
        nats.stop()
    return seconds


def table(seconds: dict[str, list[float]], args: argparse.Namespace) -> bool:
    """Print both figures. Returns True if the limits are kept."""
    without, kept, waits = seconds["without"], seconds["with"], seconds["waits"]
    ratios = [one / other for one, other in zip(kept, without, strict=True)]
    part = sum(waits) / (sum(kept) * args.tasks * args.rollouts)
    print(f"\n{args.tasks} x {args.rollouts} episodes at once, {TURNS} turns of {args.response} tokens, {args.device}")
    print(f"{'':28}{'median':>10}   (least to most)")
    for side, found in {
        "without the journal, s": without,
        "with the journal, s": kept,
        "ratio of a round": ratios,
    }.items():
        print(f"{side:28}{statistics.median(found):>10.3f}   ({min(found):.3f} to {max(found):.3f})")
    turns = [one / TURNS for one in kept]
    for name, times in {"a wait, ms": waits, "a turn, ms": turns}.items():
        print(f"{name:28}{1000 * statistics.median(times):>10.2f}   (mean {1000 * statistics.mean(times):.2f})")
    fine = statistics.median(ratios) <= 1 + LIMIT and part <= LIMIT
    print(f"waits of the episodes' time: {part:.2%}; limit of both: {LIMIT:.0%}: {'kept' if fine else 'NOT kept'}")
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a model and calls that say nothing, to try the script")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", default="", help="a folder of a model; empty: random weights of the sizes below")
    sizes = {"hidden": 256, "layers": 4, "heads": 4, "kv-heads": 2, "intermediate": 0, "vocabulary": 4096}
    for name, value in {**sizes, "tasks": 2, "rollouts": 4, "response": 64, "rounds": 9}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    if args.tiny:
        args.hidden, args.layers, args.tasks, args.rollouts, args.response, args.rounds = 128, 1, 1, 2, 8, 1
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    with tempfile.TemporaryDirectory(prefix="trinity-bench-") as folder:
        if not args.model:
            make_model(Path(folder), args)
        seconds = asyncio.run(measure(Path(folder), args))
    return 0 if table(seconds, args) or args.tiny else 1


if __name__ == "__main__":
    sys.exit(main())
