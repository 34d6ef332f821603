"""Cost of recording plain calls: the same calls at an endpoint with explorer.traffic, and at one without.

    python benchmarks/traffic.py [--tiny] [--rounds 40 --calls 32 --parallel 4 --response 64 ...]

Both endpoints have the same engine, and a nats-server on this machine stores the recorded calls. Rounds are
short, and the sides take turns within each pair, so that other work of the machine meets both. Compared are the p99 of
whole replies: its ratio over all pairs, with the middle 90 % of 1,000 drawings of as many pairs (a bootstrap). The
limit is 5 %. A ratio whose range contains the limit decides nothing: measure more pairs. Medians are compared likewise,
and the processor time of engine, endpoints, client and nats-server, on which other work of the machine has less effect.
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))
from buffer_table import percentile
from rollout import make_model

LIMIT = 1.05
KEY = "key-of-the-benchmark"
SIDES = ("not recorded", "recorded")


Rounds = dict[str, list[list[float]]]


async def measure(model: str, folder: Path, args: argparse.Namespace) -> tuple[Rounds, Rounds]:
    """Seconds of each call of each round, and the round's processor seconds, by side."""
    import openai

    from support.servers.nats import NatsServer
    from trinity.buffer.state.streams import traffic_spec
    from trinity.config.schema.explorer import TrafficConfig
    from trinity.config.schema.model import ModelConfig
    from trinity.data.experience import Limits, SamplingParams
    from trinity.explorer.chat import ChatTokenizer
    from trinity.explorer.engine.pool import EnginePool
    from trinity.explorer.sessions.server import AgentGateway, OpenTo
    from trinity.explorer.types import EngineOptions
    from trinity.runtime.broker import connect, ensure_streams
    from trinity.runtime.names import RunNames
    from trinity.runtime.process import free_port
    from trinity.runtime.trust.keys import KeyFile
    from trinity.traffic.calls import Calls

    nats = NatsServer(folder / "nats")
    nats.start()
    tokenizer, names = ChatTokenizer(ModelConfig(model_path=model)), RunNames("bench")
    length = args.prompt + args.response + 64
    pool = await EnginePool.start(EngineOptions(model=model, device=args.device, max_model_len=length), [None])
    (folder / "keys").write_text(KEY)
    seconds: Rounds = {side: [] for side in SIDES}
    processor: Rounds = {side: [] for side in SIDES}

    async def round_of(client: openai.AsyncOpenAI, salt: str, found: list[float]) -> None:
        """The salt keeps prompts out of the prefix cache."""
        free = asyncio.Semaphore(args.parallel)

        async def one(index: int) -> None:
            async with free:
                begin = time.perf_counter()
                asked: Any = [{"role": "user", "content": (f"{salt}{index} and a sum? " * args.prompt)[: args.prompt]}]
                await client.chat.completions.create(
                    model="plain", messages=asked, max_tokens=args.response, extra_body={"ignore_eos": True}
                )
                found.append(time.perf_counter() - begin)

        await asyncio.gather(*(one(index) for index in range(args.calls)))

    try:
        async with AsyncExitStack() as stack:
            broker = await stack.enter_async_context(await connect(nats.url, "bench"))
            await ensure_streams(broker, [traffic_spec(names, TrafficConfig(), 1)])
            clients: list[tuple[str, openai.AsyncOpenAI]] = []
            for side in SIDES:
                listen = f"127.0.0.1:{free_port()}"
                sampling = SamplingParams(max_tokens=args.response) if side == "recorded" else None
                open_to = OpenTo(listen, KeyFile(folder / "keys", "keys"), "plain", sampling)
                gateway = AgentGateway(pool, model, tokenizer.template, False, open_to=open_to)
                gateway.calls = Calls(broker, names, "bench", Limits())
                stack.push_async_callback(gateway.close)
                gateway.start()
                client = openai.AsyncOpenAI(base_url=f"http://{listen}/v1", api_key=KEY, timeout=600, max_retries=0)
                clients.append((side, await stack.enter_async_context(client)))
            for number in range(args.rounds + 1):  # the first round warms up
                for side, client in clients if number % 2 else reversed(clients):
                    found: list[float] = []
                    seconds[side] += [found] if number else []
                    before = processor_seconds()
                    await round_of(client, f"{side} {number} ", found)
                    processor[side] += [[processor_seconds() - before]] if number else []
            await asyncio.sleep(2.0)  # that NATS has for a call
            stored = (await broker.state(names.traffic_stream)).messages
            assert stored == (args.rounds + 1) * args.calls, f"{stored} calls were recorded"
    finally:
        pool.close()
        nats.stop()
    return seconds, processor


def processor_seconds() -> float:
    own = psutil.Process(os.getpid())
    return sum(sum(process.cpu_times()[:2]) for process in (own, *own.children(recursive=True)))


def table(seconds: Rounds, processor: Rounds, args: argparse.Namespace) -> bool:
    """Print both sides. Returns True unless the p99 is above the limit, in nearly all drawings."""
    print(f"\n{args.rounds} pairs of {args.calls} calls, {args.parallel} at a time, {args.response} tokens each")
    print(f"{'side':14} {'p50 ms':>8} {'p99 ms':>8} {'processor ms a call':>20}")
    for side, rounds in seconds.items():
        found = [one for calls in rounds for one in calls]
        used = 1000 * statistics.median(one for (one,) in processor[side]) / args.calls
        print(f"{side:14} {1000 * statistics.median(found):8.1f} {1000 * percentile(found, 0.99):8.1f} {used:20.1f}")
    lowest = {}
    for name, sides, part, limit in (
        ("p99", seconds, 0.99, f" (limit {LIMIT})"),
        ("p50", seconds, 0.5, ""),
        ("processor time", processor, 0.5, ""),
    ):
        pairs, dice = list(zip(*(sides[side] for side in reversed(SIDES)), strict=True)), random.Random(0)
        drawn = sorted(ratio(dice.choices(pairs, k=len(pairs)), part) for _ in range(1000))
        lowest[name] = drawn[50]
        middle = f"{drawn[50]:.3f} to {drawn[949]:.3f}"
        print(f"{name} with recording: {ratio(pairs, part):.3f} of that without, {middle}{limit}")
    return lowest["p99"] <= LIMIT


def ratio(pairs: list[tuple[list[float], list[float]]], part: float) -> float:
    """A quantile of all calls of one side, of that of the other side."""
    recorded, plain = ([one for calls in side for one in calls] for side in zip(*pairs, strict=True))
    return percentile(recorded, part) / percentile(plain, part)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a model and calls that say nothing, to try the script")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    sizes = {"hidden": 256, "layers": 4, "heads": 4, "kv-heads": 2, "intermediate": 0, "vocabulary": 4096}
    calls = {"prompt": 128, "response": 64, "calls": 32, "parallel": 4, "rounds": 40}
    for name, value in {**sizes, **calls}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    if args.tiny:
        args.hidden, args.layers, args.calls, args.parallel, args.response, args.rounds = 128, 1, 4, 2, 8, 2
    with tempfile.TemporaryDirectory(prefix="trinity-bench-") as name:
        folder = Path(name)
        make_model(folder, args)
        seconds, processor = asyncio.run(measure(name, folder, args))
    return 0 if table(seconds, processor, args) or args.tiny else 1


if __name__ == "__main__":
    sys.exit(main())
