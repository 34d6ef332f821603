"""Experience through publish -> log -> ledger -> StreamBatches, against raw nats-py with the same bytes.

    python benchmarks/buffer.py [--tiny] [--groups 400]

One nats-server with the settings of `trinity run` (every message on disk before it is acknowledged), a real buffer and
sync process. Raw: nats-py publishes the same payloads pipelined (64 in flight) and pulls them back; no checks.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

LIMIT = 0.5
IN_FLIGHT = 64


async def raw(url: str, payload: bytes, count: int) -> float:
    """Seconds of nats-py alone: pipelined publish, then fetch."""
    import nats
    from nats.js.api import StreamConfig

    client = await nats.connect(url, pending_size=64 * 1024 * 1024)
    js = client.jetstream(publish_async_max_pending=IN_FLIGHT)
    await js.add_stream(StreamConfig(name="RAW", subjects=["raw"], allow_direct=True))
    begin = time.perf_counter()
    acknowledged = []
    for index in range(count):
        acknowledged.append(await js.publish_async("raw", payload, headers={"Nats-Msg-Id": str(index)}))
    await asyncio.gather(*acknowledged)
    pull = await js.pull_subscribe("raw", durable="bench")
    got = 0
    while got < count:
        messages = await pull.fetch(min(IN_FLIGHT, count - got), timeout=10)
        got += len(messages)
        await asyncio.gather(*(message.ack() for message in messages))
    seconds = time.perf_counter() - begin
    await js.delete_stream("RAW")
    await client.close()
    return seconds


async def ours(folder: Path, nats, response: int, count: int, per_step: int) -> tuple[float, int]:  # type: ignore[no-untyped-def]
    """Seconds from the first group published to the last batch received, and the payload's size in bytes."""
    from support.buffer_run import BufferRun
    from support.experience import make_group, make_task
    from trinity.api.buffer.v1 import buffer_pb2 as pb
    from trinity.explorer import attempt
    from trinity.runtime import names
    from trinity.runtime.broker import connect
    from trinity.runtime.experience import Group
    from trinity.runtime.wire import encode_outcome

    algorithm = {"algorithm_type": "grpo", "repeat_times": 8}
    run = BufferRun(folder, nats, steps=count // per_step, groups=per_step, algorithm=algorithm).start()
    trainer = run.trainer()
    # The same tokens for every task, so that making them costs nothing.
    experiences = make_group(make_task(repeat_times=8), response=response).experiences

    async def publish(broker, gate: asyncio.Semaphore, ordinal: int) -> None:  # type: ignore[no-untyped-def]
        async with gate:
            task = make_task(ordinal, run=run.run, repeat_times=8)
            await attempt.store(broker, names.RunNames(run.run), Group(task, 1, "bench", experiences, 0.0, 0.0))

    async def receive() -> int:
        received = 0
        async for part in trainer.buffer.StreamBatches(pb.StreamBatchesRequest(run=run.run, from_step=1)):
            received += part.HasField("group")
            if part.HasField("end") and part.end.step == run.steps:
                break
        return received

    try:
        await trainer.begin()
        async with asyncio.timeout(120):
            while (await trainer.stats()).fed < count:
                await asyncio.sleep(0.1)
        async with await connect(nats.url, "bench") as broker:
            gate = asyncio.Semaphore(IN_FLIGHT)
            begin = time.perf_counter()
            receiving = asyncio.create_task(receive())
            await asyncio.gather(*(publish(broker, gate, ordinal) for ordinal in range(1, count + 1)))
            assert await receiving == count
            seconds = time.perf_counter() - begin
    finally:
        await trainer.close()
        run.stop()
    return seconds, len(encode_outcome(Group(make_task(repeat_times=8), 1, "bench", experiences, 0.0, 0.0)))


async def pair(response: int, count: int, per_step: int) -> tuple[float, float, int]:
    """Seconds of ours and of raw, one after the other on a fresh nats-server, and the payload's bytes."""
    from support.nats import NatsServer

    with tempfile.TemporaryDirectory() as folder:
        nats = NatsServer(Path(folder) / "nats")
        nats.start()
        try:
            seconds, size = await ours(Path(folder), nats, response, count, per_step)
            return seconds, await raw(nats.url, bytes(size), count), size
        finally:
            nats.stop()


async def measure(args: argparse.Namespace) -> None:
    columns = ("bytes", "groups/s", "MB/s", "raw groups/s", "raw MB/s", "ratio", "limit")
    print(f"{'group':<14}" + "".join(f"{column:>13}" for column in columns))
    for response in (512, 4096):
        count = args.groups if response == 512 else max(args.per_step, args.groups // 4)
        count -= count % args.per_step
        measured = [await pair(response, count, args.per_step) for _ in range(args.runs)]
        measured.sort(key=lambda one: one[1] / one[0])
        seconds, bare, size = measured[len(measured) // 2]
        rate, limit = count / seconds, count / bare
        figures = (
            f"{size:,}",
            f"{rate:,.0f}",
            f"{rate * size / 1e6:,.0f}",
            f"{limit:,.0f}",
            f"{limit * size / 1e6:,.0f}",
        )
        row = (*figures, f"{rate / limit:.2f}", f"{LIMIT:.2f}")
        print(f"8 x {response:<10}" + "".join(f"{figure:>13}" for figure in row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=3200, help="groups of 8 x 512 tokens; a quarter of 8 x 4096")
    parser.add_argument("--per-step", type=int, default=32, help="groups of an optimizer step")
    parser.add_argument("--runs", type=int, default=3, help="pairs; the one with the median ratio is shown")
    parser.add_argument("--tiny", action="store_true", help="seconds of work: shows that it runs, measures nothing")
    args = parser.parse_args()
    if args.tiny:
        args.groups, args.per_step, args.runs = 16, 4, 1
    asyncio.run(measure(args))


if __name__ == "__main__":
    main()
