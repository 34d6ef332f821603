"""Agents that call the gateway from threads: as many as there are rollouts, beside the explorer's own work."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from trinity.explorer import service
from trinity.explorer.service import ExplorerService

pytestmark = pytest.mark.core


async def test_threads_of_agents_leave_some_for_the_explorer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loading(Exception):
        pass

    def tokenizer(_: object) -> None:
        raise Loading

    monkeypatch.setattr(service, "ChatTokenizer", tokenizer)
    monkeypatch.setattr(service.process, "guard_group", lambda: None)
    explorer: Any = ExplorerService.__new__(ExplorerService)
    explorer._running = SimpleNamespace(only_serves=True)
    explorer._plan = SimpleNamespace(config=SimpleNamespace(model=None))
    with pytest.raises(Loading):
        await explorer.work(asyncio.Event(), "")
    everyone = threading.Barrier(128)  # threads that all wait for one another
    await asyncio.gather(*(asyncio.to_thread(everyone.wait, 20) for _ in range(128)))
