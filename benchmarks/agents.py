"""Cost of the recording gateway for an agent: the same prompts by `self.tools.generate` and by OpenAI's client.

    python benchmarks/agents.py [--tiny] [--device cuda] [--hidden 1536 --layers 28 ...]

Five sides of one engine, each warmed up, take turns in every round: the toolbox's generate; a session's asynchronous
client, with whole and with streamed replies; a session over HTTP, the way of agents in other processes, with the client
in this process; and vLLM's HTTP application without session and recording, which shows the share of HTTP. `--parallel`
calls of `--response` tokens run at a time. The limit holds for whole replies of a session: at most 5 % longer than
generate. The table also has the CPU time of this process, which runs everything but the engine's core. Other work on
the machine does not change it.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))
from rollout import make_model

LIMIT = 1.05
KEY = "key-of-the-benchmark"
SIDES = ("tools.generate", "session, whole", "session, streamed", "session over HTTP", "vLLM's HTTP alone")
Ask = Callable[[str], Awaitable[int]]


def client_of(url: str, key: str) -> Any:
    import openai

    return openai.AsyncOpenAI(base_url=url, api_key=key, timeout=600, max_retries=0)


def by_client(client: Any, args: argparse.Namespace, streamed: bool) -> Ask:
    """Samples a reply to one prompt and returns its tokens."""
    options: dict[str, Any] = {"max_tokens": args.response, "temperature": 1.0, "extra_body": {"ignore_eos": True}}

    async def ask(text: str) -> int:
        messages: Any = [{"role": "user", "content": text}]
        if not streamed:
            done = await client.chat.completions.create(model="policy", messages=messages, **options)
            return int(done.usage.completion_tokens)
        usage: Any = {"stream": True, "stream_options": {"include_usage": True}}
        tokens = 0
        async for chunk in await client.chat.completions.create(model="policy", messages=messages, **usage, **options):
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        return tokens

    return ask


async def seconds_of(ask: Ask, args: argparse.Namespace, salt: str) -> float:
    """Seconds of `--calls` calls, `--parallel` at a time. The salt keeps prompts out of the prefix cache."""
    free = asyncio.Semaphore(args.parallel)

    async def one(index: int) -> int:
        async with free:
            return await ask((f"{salt}{index} what is the sum? " * args.prompt)[: args.prompt])

    begin = time.perf_counter()
    tokens = await asyncio.gather(*(one(index) for index in range(args.calls)))
    seconds = time.perf_counter() - begin
    assert set(tokens) == {args.response}, f"replies of {set(tokens)} tokens, not {args.response}"
    return seconds


async def while_it_serves(gateway: Any, asking: Awaitable[float]) -> float:
    """The result of the calls. Raises the error that ended the gateway, instead of waiting for the time limit."""
    task = asyncio.ensure_future(asking)
    try:
        while not (await asyncio.wait([task], timeout=1))[0]:
            await gateway.check()
        return await task
    finally:
        task.cancel()


async def measure(model: str, args: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each round, and CPU seconds of this process, by side."""
    from trinity.config.schema.model import ModelConfig
    from trinity.data.experience import SamplingParams
    from trinity.explorer.chat import ChatTokenizer
    from trinity.explorer.engine.pool import EnginePool
    from trinity.explorer.sessions.server import AgentGateway, OpenTo
    from trinity.explorer.types import EngineOptions
    from trinity.runtime.process import free_port
    from trinity.runtime.trust.keys import KeyFile

    tokenizer = ChatTokenizer(ModelConfig(model_path=model))
    length = args.prompt + args.response + 64
    pool = await EnginePool.start(EngineOptions(model=model, device=args.device, max_model_len=length), [None])
    keys = Path(model) / "keys"
    keys.write_text(KEY)
    open_to = OpenTo(f"127.0.0.1:{free_port()}", KeyFile(keys, "keys"), "plain")
    gateway = AgentGateway(pool, model, tokenizer.template, False, open_to=open_to)
    sampling = SamplingParams(max_tokens=args.response, ignore_eos=True)

    async def generate(text: str) -> int:
        (made,) = await pool.generate(tokenizer.prompt([{"role": "user", "content": text}]), sampling)
        return len(made.token_ids)

    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    cpu: dict[str, list[float]] = {side: [] for side in SIDES}
    try:
        for number in range(args.rounds + 1):  # the first round warms up
            async with (
                gateway.session(sampling, 600) as whole,
                gateway.session(sampling, 600) as streamed,
                gateway.session(sampling, 600) as remote,
                client_of(remote.base_url, remote.key) as over_http,
                client_of(remote.base_url, KEY) as plain,
            ):
                asks = (
                    generate,
                    by_client(whole.asynchronous, args, False),
                    by_client(streamed.asynchronous, args, True),
                    by_client(over_http, args, False),
                    by_client(plain, args, False),
                )
                turn = number % len(SIDES)  # each side is the first of some rounds
                sides = list(zip(SIDES, asks, strict=True))
                for side, ask in [*sides[turn:], *sides[:turn]]:
                    before = time.process_time()
                    taken = await while_it_serves(gateway, seconds_of(ask, args, f"{side} {number} "))
                    if number:
                        seconds[side].append(taken)
                        cpu[side].append(time.process_time() - before)
                for agent in (whole, streamed, remote):
                    agent.reward = 1.0
                    made = agent.experiences(0)
                    assert sum(int(e.action_mask.sum()) for e in made) == args.calls * args.response
    finally:
        await gateway.close()
        pool.close()
    return seconds, cpu


def table(seconds: dict[str, list[float]], cpu: dict[str, list[float]], args: argparse.Namespace) -> bool:
    """Print medians and each round's ratio to generate. Returns True if the limit is kept.

    `at best`: the ratio of the two sides' fastest rounds, which other work on the machine changes least.
    """
    print(
        f"\n{args.calls} calls, {args.parallel} at a time, prompts of {args.prompt} bytes, {args.response} tokens each"
    )
    base = seconds[SIDES[0]]
    print(f"{'side':20} {'s':>8} {'ms a call':>10} {'CPU ms':>7} {'of generate':>12}  (least to most) {'at best':>9}")
    kept = True
    for side, found in seconds.items():
        ratios = [one / other for one, other in zip(found, base, strict=True)]
        middle, median = statistics.median(found), statistics.median(ratios)
        each = 1000 * middle * args.parallel / args.calls
        bounds = f"{min(ratios):.3f} to {max(ratios):.3f}"
        own = 1000 * statistics.median(cpu[side]) / args.calls
        best = min(found) / min(base)
        print(f"{side:20} {middle:8.2f} {each:10.1f} {own:7.2f} {median:12.3f}  ({bounds}) {best:9.3f}")
        kept = kept and (side != SIDES[1] or median <= LIMIT)
    print(f"limit of a session's whole replies: {LIMIT:.2f} of generate: {'kept' if kept else 'NOT kept'}")
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a model and calls that say nothing, to try the script")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", default="", help="a folder of a model; empty: random weights of the sizes below")
    sizes = {"hidden": 256, "layers": 4, "heads": 4, "kv-heads": 2, "intermediate": 0, "vocabulary": 4096}
    calls = {"prompt": 256, "response": 200, "calls": 64, "parallel": 8, "rounds": 5}
    for name, value in {**sizes, **calls}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path, help="write the seconds there")
    args = parser.parse_args()
    if args.tiny:
        args.hidden, args.layers, args.calls, args.parallel, args.response, args.rounds = 128, 1, 4, 2, 8, 1
    with tempfile.TemporaryDirectory(prefix="trinity-bench-") as folder:
        if not args.model:
            make_model(Path(folder), args)
        seconds, cpu = asyncio.run(measure(args.model or folder, args))
    if args.json:
        args.json.write_text(json.dumps(seconds))
    return 0 if table(seconds, cpu, args) or args.tiny else 1


if __name__ == "__main__":
    sys.exit(main())
