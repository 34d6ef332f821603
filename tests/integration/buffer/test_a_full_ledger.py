"""Every stream of a run has a size; where the ledger's is reached, the run ends and names the setting."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace

import pytest

from support.fakes.peers import FakeTrainer, explorer
from support.servers.buffer_run import BufferRun
from trinity.runtime import names
from trinity.runtime.broker import connect

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(300)]

Started = Callable[..., "contextlib.AbstractAsyncContextManager[tuple[BufferRun, FakeTrainer]]"]


async def test_a_full_ledger_names_the_setting(started: Started) -> None:
    async with started(steps=40) as (run, trainer), await connect(run.nats.url, "look") as broker:
        infos = {info.config.name or "": info for info in await broker.js.streams_info()}
        sizes = {stream: info.config.max_bytes or -1 for stream, info in infos.items() if stream.endswith(run.run)}
        assert len(sizes) > 8 and all(size > 0 for size in sizes.values()), sizes
        async with explorer(run.nats.url, run.run):
            await trainer.batch(1)
            ledger = infos[names.RunNames(run.run).batches_stream].config
            await broker.js.update_stream(replace(ledger, max_bytes=4096))
            for step in range(2, 40):
                if not run.buffer.is_running():
                    break
                with contextlib.suppress(TimeoutError, AssertionError):
                    await trainer.batch(step, seconds=10)
            assert await asyncio.to_thread(run.buffer.wait, 90) == 1
        (reason,) = [str(event["reason"]) for event in run.buffer.events() if event["event"] == "service.failed"]
        assert "batches" in reason and "raise TRINITY_BUFFER_LOG_GIB" in reason
