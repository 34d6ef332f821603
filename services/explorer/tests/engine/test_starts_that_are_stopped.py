"""A start of engines that is stopped is no error in the log."""

import asyncio
import gc
import threading
from typing import Any

import pytest

from trinity.explorer.engine import engine
from trinity.explorer.types import EngineFailed

pytestmark = pytest.mark.core


def test_the_failure_of_a_stopped_start_is_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    started, killed = threading.Event(), threading.Event()

    class Core:
        kill = staticmethod(killed.set)

    def start(options: Any, devices: Any) -> list[Any]:
        started.set()
        assert killed.wait(30)
        raise EngineFailed("vLLM did not start: the core was killed")

    monkeypatch.setattr(engine, "start_vllm", start)
    monkeypatch.setattr(engine, "active_children", lambda: [Core])
    said: list[Any] = []

    async def stop_a_start() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
        options: Any = None
        starting = asyncio.create_task(engine.start_engines(options, [None]))
        assert await asyncio.to_thread(started.wait, 30)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        del starting
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(stop_a_start())
    failures = [one.get("exception") for one in said]  # garbage of other tests may be among them
    assert not any(isinstance(one, EngineFailed) for one in failures), failures
