"""Engines of one explorer start at once, each on its own devices. A cancelled start leaves no process."""

import asyncio
import time
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path

import psutil
import pytest

from trinity.data.experience import SamplingParams
from trinity.explorer.engine.engine import CACHED
from trinity.explorer.engine.pool import EnginePool
from trinity.explorer.types import EngineFailed, EngineOptions

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(300)]


def options(model: Path, length: int = 256) -> EngineOptions:
    return EngineOptions(str(model), "cpu", length, max_num_seqs=2, cpu_kvcache_gib=1)


async def seen(what: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not what():
            await asyncio.sleep(0.05)


async def a_conversation_stays(pool: EnginePool) -> None:
    """The next turn goes to the engine of the turn before, though it is the busier one, and reads its blocks there."""
    greedy = SamplingParams(max_tokens=2, n=1, temperature=0)
    turn = [7 + index % 90 for index in range(180)]
    await pool.generate(turn, greedy)
    async with pool.engine_for(turn) as home, pool.engine_for(()) as idle:
        assert idle is not home
    async with pool.engine_for(turn) as home, pool.engine_for([*turn, *range(10, 40)]) as again:
        assert again is home
    before = next(iter(CACHED.collect())).samples[0].value
    await pool.generate([*turn, *range(10, 40)], greedy)
    assert next(iter(CACHED.collect())).samples[0].value >= before + 96


async def test_engines_start_at_once_and_each_sees_its_own_devices(quickstart_model: Path) -> None:
    starting = asyncio.create_task(EnginePool.start(options(quickstart_model), ["5,6", "7,8"]))
    known: set[int] = set()
    seen_devices: list[str] = []

    def both_began() -> bool:  # their environment is read while they import vLLM, whose title overwrites it
        for child in active_children():
            core = psutil.Process(child.pid)
            if core.pid not in known:
                known.add(core.pid)
                seen_devices.append(core.environ()["CUDA_VISIBLE_DEVICES"])
        return len(seen_devices) == 2

    await seen(both_began, 120)
    assert not starting.done(), "the second began after the first had started"
    assert seen_devices == ["5,6", "7,8"]
    longest, before = 0.0, time.monotonic()
    while not starting.done():  # the loop answers health probes meanwhile
        await asyncio.sleep(0.05)
        longest, before = max(longest, time.monotonic() - before), time.monotonic()
    pool = starting.result()
    try:
        assert longest < 10
        greedy = SamplingParams(max_tokens=4, n=1, temperature=0)
        told = await asyncio.gather(*(engine.generate([1, 2, 3], greedy) for engine in pool.engines))
        assert told[0][0].token_ids.tolist() == told[1][0].token_ids.tolist()
        await a_conversation_stays(pool)
    finally:
        pool.close()
    await seen(lambda: not active_children())


async def test_a_cancelled_start_ends_the_processes_at_once(quickstart_model: Path) -> None:
    starting = asyncio.create_task(EnginePool.start(options(quickstart_model), [None, None]))
    await seen(lambda: bool(active_children()), 120)
    begin = time.monotonic()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await seen(lambda: not active_children(), 20)
    assert time.monotonic() - begin < 20


async def test_where_one_engine_fails_the_others_end(quickstart_model: Path) -> None:
    starting = asyncio.create_task(EnginePool.start(options(quickstart_model), [None, None]))
    await seen(lambda: len(active_children()) == 2, 120)
    active_children()[0].kill()
    with pytest.raises(EngineFailed, match="did not start"):
        await starting
    await seen(lambda: not active_children(), 20)
