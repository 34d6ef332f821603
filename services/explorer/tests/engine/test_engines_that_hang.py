"""A vLLM that does not answer counts as failed after a limit; so does one that cannot enter a collective group."""

import asyncio
from typing import Any

import pytest

from trinity.explorer.engine import engine
from trinity.explorer.engine.engine import Engine
from trinity.explorer.types import EngineFailed, EngineOptions
from trinity.explorer.weights import member as members
from trinity.explorer.weights.member import CollectiveMember
from trinity.weights.pointer import Epoch, EpochMember

pytestmark = pytest.mark.core


class Vllm:
    """Answers at once, except the call or worker method that `hangs`. Its core is itself."""

    def __init__(self, hangs: str) -> None:
        self._hangs = hangs
        self.asked: list[str] = []
        self.engine_core = self

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: object, **options: object) -> None:
            self.asked.append(str(arguments[0]) if name == "collective_rpc" else name)
            if self.asked[-1] == self._hangs:
                await asyncio.Event().wait()

        return call


@pytest.mark.parametrize(
    ("hangs", "message"),
    [
        ("pause_scheduler_async", "pausing took longer than 0.1 s"),
        ("load_version", "the update took longer than 0.1 s"),
        ("resume_generation", "resuming took longer than 0.1 s"),
    ],
)
async def test_a_load_that_hangs_fails(monkeypatch: pytest.MonkeyPatch, hangs: str, message: str) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setattr(engine, "_CALL_SECONDS", 0.1)
    monkeypatch.setattr(engine, "_LOAD_SECONDS", 0.1)
    vllm = Vllm(hangs)
    hung = Engine(vllm, EngineOptions("m", "cpu", 64))
    with pytest.raises(EngineFailed, match=message):
        await asyncio.wait_for(hung.load(1, {"files": [], "tensors": []}), 20)
    assert vllm.asked[-1] == "abandon_weight_update", "the next load would find the update under way"


async def test_entering_a_group_that_hangs_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setattr(engine, "_CALL_SECONDS", 0.1)
    hung = Engine(Vllm("init_weight_transfer_engine"), EngineOptions("m", "cpu", 64))
    with pytest.raises(EngineFailed, match=r"entering a collective group failed: .* took longer than 0.1 s"):
        await asyncio.wait_for(hung.enter_group({}), 20)


async def test_engines_that_cannot_enter_a_group_leave_the_explorer_to_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store:
        @classmethod
        def connect(cls, address: str, secret: str, timeout_seconds: float) -> "Store":
            return cls()

        def say(self, key: str, yes: bool = True) -> None: ...

        def wait(self, key: str, timeout_seconds: float) -> bool:
            return True

    entered = asyncio.Event()

    async def enter(info: dict[str, Any], first_rank: int) -> None:
        entered.set()
        raise EngineFailed("its core is gone")

    monkeypatch.setattr(members, "Store", Store)
    member = CollectiveMember("a", enter, 5.0)
    member.epoch(Epoch(1, "gloo", "127.0.0.1:1", (EpochMember("a", 1, 1),)))
    await asyncio.wait_for(entered.wait(), 10)
    member.epoch(Epoch(2, "gloo", "127.0.0.1:1"))
    await asyncio.sleep(0.1)
    await member.close()
