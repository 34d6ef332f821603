"""Reproducible runs: tasks begin with the version of their gate alone."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.fakes.explorers.follower import Explorer
from trinity.explorer.weights.choice import ExactGates
from trinity.weights.wire import VersionState

pytestmark = pytest.mark.core


@pytest_asyncio.fixture
async def explorer(tmp_path: Path) -> AsyncIterator[Explorer]:
    """At version 2, which is LIVE; 1 is RETIRED."""
    made = Explorer(tmp_path, exact=ExactGates())
    await made.start()
    for version in (1, 2):
        made.sync.manifests[version] = made.version(version)
        await made.sync.show(made.version(version))
        await made.serves(version)
    made.sync.states |= {1: VersionState.RETIRED, 2: VersionState.LIVE}
    yield made
    await made.stop()


async def begins(explorer: Explorer, gate: int, seconds: float = 5.0) -> int | None:
    """The version with which a task of this gate begins; None: it does not."""
    try:
        async with asyncio.timeout(seconds):
            assert await explorer.follower.gates.reaches_step(gate)
    except TimeoutError:
        return None
    return explorer.follower.version


async def test_a_task_of_the_live_version_begins_at_once(explorer: Explorer) -> None:
    assert await begins(explorer, 2) == 2
    assert explorer.engines.versions == [1, 2]


async def test_a_task_of_an_older_version_has_it_loaded_again(explorer: Explorer) -> None:
    assert await begins(explorer, 1) == 1
    assert explorer.engines.versions == [1, 2, 1]
    await explorer.serves(2)  # once no task waits
    assert explorer.engines.versions == [1, 2, 1, 2]


async def test_a_task_does_not_begin_with_newer_weights(explorer: Explorer) -> None:
    del explorer.sync.states[1]  # the service does not say what version 1 is
    assert await begins(explorer, 1, seconds=0.5) is None
    assert explorer.engines.versions == [1, 2]


async def test_the_lowest_gate_comes_first(explorer: Explorer) -> None:
    begun: list[int] = []

    async def task(gate: int) -> None:
        await explorer.follower.gates.reaches_step(gate)
        begun.append(gate)
        assert explorer.follower.version == gate

    del explorer.sync.states[1]
    older = asyncio.create_task(task(1))
    await asyncio.sleep(0.1)
    newer = asyncio.create_task(task(2))
    await asyncio.sleep(0.3)
    assert begun == []
    explorer.sync.states[1] = VersionState.RETIRED
    async with asyncio.timeout(10):
        await asyncio.gather(older, newer)
    assert begun == [1, 2]


async def test_no_weights_come_while_a_task_runs(explorer: Explorer) -> None:
    explorer.evaluating = True
    older = asyncio.create_task(begins(explorer, 1, seconds=0.5))
    await explorer.sync.show(explorer.version(3))
    assert await older is None
    assert explorer.engines.versions == [1, 2]
    explorer.evaluating = False
    await explorer.follower.notify()
    await explorer.serves(3)


async def test_a_gate_whose_version_was_withdrawn_is_met_by_the_live_one(explorer: Explorer) -> None:
    explorer.sync.states[2] = VersionState.REJECTED
    await explorer.sync.show(explorer.version(1), rejected=[2], gate_step=2)
    await explorer.serves(1)
    assert await begins(explorer, 2) == 1


async def test_an_explorer_that_is_late_loads_the_version_of_its_task(explorer: Explorer) -> None:
    explorer.evaluating = True
    explorer.sync.manifests[3] = explorer.version(3)
    explorer.sync.states[3] = VersionState.RETIRED
    await explorer.sync.show(explorer.version(4))
    late = asyncio.create_task(begins(explorer, 3))
    await asyncio.sleep(0.1)
    explorer.evaluating = False
    await explorer.follower.notify()
    assert await late == 3
    assert explorer.engines.versions[:3] == [1, 2, 3]
