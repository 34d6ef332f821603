"""Cost of recording plain calls: the same calls at an endpoint with explorer.traffic, and at one without.

    python benchmarks/traffic.py [--tiny] [--calls 256 --parallel 4 --response 64 ...]

Both endpoints have the same engine and take turns in every round. A recorded call waits until a nats-server on this
machine has stored it. Compared are the p99 of all rounds' calls, of whole replies; the limit is 5 %. Other work on
the machine changes the tail most: the median ratio of the rounds' medians says whether recording does.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))
from rollout import make_model

LIMIT = 1.05
KEY = "key-of-the-benchmark"
SIDES = ("not recorded", "recorded")


async def measure(model: str, folder: Path, args: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Seconds of each call of each round, by side."""
    import openai

    from support.servers.nats import NatsServer
    from trinity.buffer.state.streams import traffic_spec
    from trinity.config.schema.explorer import TrafficConfig
    from trinity.config.schema.model import ModelConfig
    from trinity.data.experience import Limits, SamplingParams
    from trinity.explorer.chat import ChatTokenizer
    from trinity.explorer.engine.engine import EnginePool
    from trinity.explorer.journal.calls import Calls
    from trinity.explorer.sessions.server import AgentGateway, OpenTo
    from trinity.explorer.types import EngineOptions
    from trinity.runtime.broker import connect, ensure_streams
    from trinity.runtime.names import RunNames
    from trinity.runtime.process import free_port
    from trinity.runtime.trust.keys import KeyFile

    nats = NatsServer(folder / "nats")
    nats.start()
    tokenizer, names = ChatTokenizer(ModelConfig(model_path=model)), RunNames("bench")
    length = args.prompt + args.response + 64
    pool = await EnginePool.start(EngineOptions(model=model, device=args.device, max_model_len=length), [None])
    (folder / "keys").write_text(KEY)
    seconds: dict[str, list[list[float]]] = {side: [] for side in SIDES}

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
                    await round_of(client, f"{side} {number} ", found)
            stored = (await broker.state(names.traffic_stream)).messages
            assert stored == (args.rounds + 1) * args.calls, f"{stored} calls were recorded"
    finally:
        pool.close()
        nats.stop()
    return seconds


def table(seconds: dict[str, list[list[float]]], args: argparse.Namespace) -> bool:
    """Print both sides. Returns True if the limit is kept."""
    print(f"\n{args.rounds} x {args.calls} calls, {args.parallel} at a time, {args.response} tokens each")
    print(f"{'side':14} {'p50 ms':>8} {'p99 ms':>8}")
    p99 = {}
    for side, rounds in seconds.items():
        found = [one for calls in rounds for one in calls]
        p99[side] = statistics.quantiles(found, n=100)[98]
        print(f"{side:14} {1000 * statistics.median(found):8.1f} {1000 * p99[side]:8.1f}")
    ratio = p99["recorded"] / p99["not recorded"]
    pairs = zip(*(map(statistics.median, rounds) for rounds in reversed(seconds.values())), strict=True)
    ratios = sorted(one / other for one, other in pairs)
    print(f"p99 with recording: {ratio:.3f} of that without (limit {LIMIT})")
    print(f"rounds' medians: {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")
    return ratio <= LIMIT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a model and calls that say nothing, to try the script")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    sizes = {"hidden": 256, "layers": 4, "heads": 4, "kv-heads": 2, "intermediate": 0, "vocabulary": 4096}
    calls = {"prompt": 128, "response": 64, "calls": 128, "parallel": 4, "rounds": 6}
    for name, value in {**sizes, **calls}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    if args.tiny:
        args.hidden, args.layers, args.calls, args.parallel, args.response, args.rounds = 128, 1, 4, 2, 8, 1
    with tempfile.TemporaryDirectory(prefix="trinity-bench-") as name:
        folder = Path(name)
        make_model(folder, args)
        seconds = asyncio.run(measure(name, folder, args))
    return 0 if table(seconds, args) or args.tiny else 1


if __name__ == "__main__":
    sys.exit(main())
