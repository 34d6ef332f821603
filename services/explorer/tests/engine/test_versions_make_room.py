"""An explorer holds a bounded number of versions, and samples by none whose canary fails."""

import asyncio
import contextlib
from pathlib import Path

import numpy as np
import pytest

from trinity.explorer.engine.engine import Using
from trinity.explorer.engine.versions import Versions
from trinity.runtime.errors import DataLoss
from trinity.weights.manifest import Canary, Probe

pytestmark = pytest.mark.core


class _Adapters:
    """Counts the requests that use each name."""

    def __init__(self) -> None:
        self.named: dict[str, int] = {}
        self.loads: list[str] = []

    @property
    def names(self) -> list[str]:
        return list(self.named)

    async def load(self, name: str, folder: Path, serial: int) -> None:
        assert len(self.named) < 2
        await asyncio.sleep(0)
        self.named[name] = 0
        self.loads.append(name)

    async def drop(self, name: str) -> None:
        assert not self.named[name], "its slot would stay occupied"
        del self.named[name]


class _Options:
    precision, max_model_len = "float32", 64


class _Engine:
    """Computes -1 for each token, and -3 with adapters 13; nothing with adapters 14, until it may."""

    options = _Options()

    def __init__(self) -> None:
        self.adapters, self.may = _Adapters(), asyncio.Event()

    @contextlib.asynccontextmanager
    async def using(self, name: str = ""):
        if name:
            self.adapters.named[name] += 1
        yield Using(name, [0], 0)
        if name:
            self.adapters.named[name] -= 1

    async def logprobs(self, token_ids: tuple[int, ...], images: tuple[bytes, ...], adapter: str) -> np.ndarray:
        if adapter == "14":
            await self.may.wait()
        return np.full(len(token_ids) - 1, -3.0 if adapter == "13" else -1.0, np.float32)


@contextlib.asynccontextmanager
async def _source(version: int):
    yield Path(str(version)), Canary((Probe((1, 2, 3), (-1.0, -1.0)),), 0.1, 0.2)


def _versions() -> tuple[_Engine, Versions]:
    engine = _Engine()
    return engine, Versions(engine, _source, 2)


async def _use(versions: Versions, position: int) -> str:
    async with versions.using(position) as weights:
        return weights.salt


async def test_the_least_recently_used_idle_one_makes_room() -> None:
    engine, versions = _versions()
    assert await asyncio.gather(*(_use(versions, 1) for _ in range(5))) == ["1"] * 5
    assert engine.adapters.loads == ["1"]  # together
    assert await _use(versions, 0) == ""
    await _use(versions, 2)
    await _use(versions, 1)
    await _use(versions, 3)
    assert list(engine.adapters.named) == ["1", "3"]
    async with versions.using(1):
        await _use(versions, 4)
        assert list(engine.adapters.named) == ["1", "4"], "3 was used later than 1, but is idle"
    await _use(versions, 3)
    assert engine.adapters.loads == ["1", "2", "3", "4", "3"]


async def test_a_request_that_is_cut_off_stops_no_load_of_another() -> None:
    engine, versions = _versions()
    cut, other = (asyncio.create_task(_use(versions, 1)) for _ in range(2))
    await asyncio.sleep(0)
    cut.cancel()
    assert await other == "1"
    assert engine.adapters.loads == ["1"]


async def test_no_load_waits_for_the_canary_of_another() -> None:
    engine, versions = _versions()
    slow = asyncio.create_task(_use(versions, 14))
    for position in (15, 16, 15):
        assert await asyncio.wait_for(_use(versions, position), 10) == str(position)
    engine.may.set()
    assert await slow == "14"


async def test_a_load_takes_the_room_that_comes_first() -> None:
    engine, versions = _versions()
    async with contextlib.AsyncExitStack() as long:
        await long.enter_async_context(versions.using(1))
        async with versions.using(2):
            third = asyncio.create_task(_use(versions, 3))
            while not versions._ending:  # 1, which was used first, takes no more requests
                await asyncio.sleep(0.001)
            first = asyncio.create_task(_use(versions, 1))
            await asyncio.sleep(0.01)
            assert not third.done() and not first.done()
        assert await asyncio.wait_for(third, 10) == "3", "2 made room"
        assert await asyncio.wait_for(first, 10) == "1", "so 1 takes requests again"
        assert engine.adapters.loads == ["1", "2", "3"]
        async with versions.using(3):
            fourth = asyncio.create_task(_use(versions, 4))
            await asyncio.sleep(0.01)
            await long.aclose()
            assert await asyncio.wait_for(fourth, 10) == "4"
    assert list(engine.adapters.named) == ["3", "4"]


async def test_a_load_that_fails_gives_its_room_back() -> None:
    _, versions = _versions()
    for position in (1, 13, 2, 1):
        with contextlib.suppress(DataLoss):
            assert await asyncio.wait_for(_use(versions, position), 10) == str(position)


async def test_adapters_with_another_canary_are_refused_and_dropped() -> None:
    engine, versions = _versions()
    for _ in range(2):
        with pytest.raises(DataLoss, match="computes other log-probabilities than the trainer"):
            await _use(versions, 13)
    assert (engine.adapters.loads, engine.adapters.named) == (["13"], {})


async def test_a_version_that_was_loaded_serves_before_it_makes_room() -> None:
    engine, versions = _versions()
    load = engine.adapters.load

    async def slow(name: str, folder: Path, serial: int) -> None:
        await asyncio.sleep(0.05)
        await load(name, folder, serial)

    engine.adapters.load = slow
    async with versions.using(1):
        others = [asyncio.create_task(_use(versions, position)) for position in (2, 3)]
        assert await asyncio.wait_for(asyncio.gather(*others), 5) == ["2", "3"]
    assert sorted(engine.adapters.loads) == ["1", "2", "3"]
