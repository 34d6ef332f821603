"""Which results are there, which will come, and which were there once."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from trinity.tinker.commands.log import Told, now
from trinity.tinker.gateway.results import Results
from trinity.tinker.gateway.saves import Saved

pytestmark = pytest.mark.core


class _Log:
    """Three results are kept: of the commands 4 and 5, and a later one."""

    def __init__(self) -> None:
        self.more = asyncio.Event()

    async def kept_results(self) -> tuple[int, int]:
        return 1, 2

    async def results(self, after: int) -> AsyncIterator[Told]:
        yield Told(1, "m:1", "alice", 4, 0.0, failed=False)
        await self.more.wait()
        yield Told(2, "m:2", "alice", 5, 0.0, failed=True)


async def test_a_result_is_gone_only_if_it_was_there() -> None:
    log = _Log()
    results = Results(log, 60.0)  # type: ignore[arg-type]
    following = asyncio.create_task(results.follow())
    await asyncio.sleep(0)
    assert not results.known.is_set(), "one from before the start is missing"
    log.more.set()
    await asyncio.wait_for(results.known.wait(), 5)
    await following
    old = now() - 61
    saved = [Saved("alice", f"m:{number}", 3 + number, now(), 0.0) for number in range(4)]
    assert [results.has_worked(one) for one in saved] == [True, True, False, False]
    assert not results.is_gone("m:1", "alice", 4, old), "its result is there"
    assert results.is_gone("m:0", "alice", 3, now()), "a later command of the tenant has a result"
    assert not results.is_gone("m:3", "alice", 6, old), "it waits"
    assert not results.is_gone("m:0", "bob", 1, now())
    assert results.is_gone("m:0", "bob", 1, old)
