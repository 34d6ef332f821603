"""A buffer with a stand-in for its trainer, which a test starts with its own settings."""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from support.fakes.peers import FakeTrainer
from support.servers.buffer_run import BufferRun
from support.servers.nats import NatsServer

Started = Callable[..., "contextlib.AbstractAsyncContextManager[tuple[BufferRun, FakeTrainer]]"]


@pytest.fixture
def started(tmp_path: Path, nats_server: NatsServer) -> Started:
    @contextlib.asynccontextmanager
    async def start(**changes: Any) -> AsyncIterator[tuple[BufferRun, FakeTrainer]]:
        run = BufferRun(tmp_path, nats_server, **changes).start()
        trainer = run.trainer()
        try:
            await trainer.begin()
            yield run, trainer
        finally:
            await trainer.close()
            run.stop()

    return start
