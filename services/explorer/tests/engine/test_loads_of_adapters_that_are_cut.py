"""A load of an adapter that is cut off may have reached the engine: its slot counts until the engine has removed it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from trinity.explorer.engine.adapters import HeldAdapters

pytestmark = pytest.mark.extended


class Vllm:
    """Has the adapters that it was given, and answers when it may."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.has: set[int] = set()
        self.most = 0

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[bool]:
        return [True]

    async def add_lora(self, request: Any) -> bool:
        self.has.add(request.lora_int_id)
        self.most = max(self.most, len(self.has))
        await self.answers.wait()
        return True

    async def remove_lora(self, number: int) -> bool:
        self.has.discard(number)
        return True


async def test_a_load_that_is_cut_frees_its_slot_before_the_next(tmp_path: Path) -> None:
    vllm = Vllm()
    adapters = HeldAdapters(vllm, 1)
    cut = asyncio.create_task(adapters.load("policy", tmp_path))
    await asyncio.sleep(0.05)
    cut.cancel()
    await asyncio.wait([cut])
    assert (adapters.held, adapters.names, len(vllm.has)) == (1, [""], 1)
    vllm.answers.set()
    await asyncio.wait_for(adapters.load("policy", tmp_path), 5)
    assert (adapters.held, adapters.names, vllm.has) == (1, ["", "policy"], {2})
    assert vllm.most == 1, "never more than it has slots for"
