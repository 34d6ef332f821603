"""An executor that ends anywhere and starts again tells each result once, and counts its seconds once."""

import asyncio
import contextlib
import copy
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from trinity.runtime.broker import connect
from trinity.runtime.names import RunNames
from trinity.tinker.commands.account import Account
from trinity.tinker.commands.log import Command, CommandLog, Kind, Result
from trinity.tinker.executor.model import Parts
from trinity.tinker.executor.service import TenantsService
from trinity.tinker.executor.settings import TenantsSettings

pytestmark = pytest.mark.core

_SECONDS = {"alice": 1.0, "bob": 8.0}


class _Executor:
    """Numbers the commands of each tenant, by parts of a second. `disk` has what its snapshot wrote."""

    shares = False

    def __init__(self, disk: dict[str, Any]) -> None:
        self.position = self.commands = self.results = 0
        self.executed, self.numbers, self.account = dict[str, int](), dict.fromkeys(_SECONDS, 0), Account()
        self.saving: dict[int, Future[None]] = {}
        self.snapshots = 0
        self.clock = map(float, itertools.count()).__next__
        self._disk = disk
        vars(self).update(copy.deepcopy(disk))

    def work(self, commands: Sequence[Command]) -> Parts[list[Result | None]]:
        (one,) = commands
        for _ in range(int(_SECONDS[one.tenant])):
            yield
        assert one.position > self.executed.get(one.tenant, 0)
        self.executed[one.tenant] = one.position
        self.commands += 1
        self.numbers[one.tenant] += 1
        body = b"%d" % self.numbers[one.tenant]
        return [Result(one.request_id, one.kind, body, one.position, _SECONDS[one.tenant])]

    def snapshot(self, position: int, time: float) -> int:
        self.snapshots += 1
        kept = {name: value for name, value in vars(self).items() if name not in ("_disk", "clock", "saving")}
        self._disk.update(copy.deepcopy({**kept, "position": position}))
        return position


class _Place:
    """A log with commands of alice, each of a second, and of bob, each of eight; and an executor that ends often."""

    def __init__(self, log: CommandLog, settings: TenantsSettings, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log, self._settings = log, settings
        self.disk: dict[str, Any] = {}
        self.saving: dict[int, Future[None]] = {}  # what the next executor begins with
        self.executor = _Executor(self.disk)
        monkeypatch.setattr(TenantsService, "_load", lambda _: self._load())

    def _load(self) -> _Executor:
        self.executor = _Executor(self.disk)
        self.executor.saving = self.saving
        return self.executor

    async def append(self, tenants: Sequence[str]) -> None:
        counts = dict.fromkeys(_SECONDS, 0)
        for position, tenant in enumerate(tenants):
            command = Command(Kind.OPTIM_STEP, tenant, f"{tenant}:train:0", counts[tenant], b"{}", 1.0)
            counts[tenant] += 1
            await self.log.append(command, position)

    async def run(self, until: Callable[[], bool]) -> None:
        """Runs an executor until the condition holds, and cuts it off."""
        service = TenantsService(self._settings)
        working = asyncio.create_task(service.work(asyncio.Event(), ""))
        try:
            async with asyncio.timeout(20):
                while not until():
                    assert not working.done(), working.exception()
                    await asyncio.sleep(0.001)
        finally:
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working


@pytest.fixture
async def place(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[_Place]:
    settings = TenantsSettings(run="once", nats_url=nats_url, model_path="m", folder=tmp_path, snapshot_commands=4,
                               result_hours=request.param / 3600, log_gib=0.01)  # fmt: skip
    async with await connect(nats_url, "test") as broker:
        log = CommandLog(broker, RunNames("once"))
        await log.open(10**7, request.param)
        yield _Place(log, settings, monkeypatch)


@pytest.mark.parametrize("place", [3600.0], indirect=True)
async def test_each_result_is_told_once_however_often_an_executor_ends(place: _Place) -> None:
    await place.append(["bob"] * 6 + ["alice"] * 30)
    for count in range(1, 37, 5):
        await place.run(lambda count=count: place.executor.results >= count)  # type: ignore[misc]
    await place.run(lambda: sum(use["optim_step"]["requests"] for use in place.executor.account.uses.values()) == 36)
    last, told = await place.log.told(0)
    assert (last, len(told)) == (36, 36)
    results = [await place.log.result(sequence) for sequence in range(1, 37)]
    for tenant, count in (("alice", 30), ("bob", 6)):
        own = [result for result in results if result.request_id.startswith(tenant)]
        assert [int(result.body) for result in own] == [*range(1, count + 1)]
        assert [result.request_id for result in own] == [f"{tenant}:train:0:{number}" for number in range(count)]
        assert place.executor.account.uses[tenant]["optim_step"] == {
            "requests": count, "seconds": count * _SECONDS[tenant],
        }  # fmt: skip
    order = [one.tenant for one in sorted(told.values(), key=lambda one: one.sequence)]
    assert order[0] == "alice", "between parts of bob's first command"
    assert "bob" in order[1:8]


@pytest.mark.parametrize("place", [3600.0], indirect=True)
async def test_a_result_waits_until_what_the_command_saves_is_durable(place: _Place) -> None:
    await place.append(["alice"])
    saving, looks = Future[None](), list[int]()
    place.saving[1] = saving

    def told() -> bool:
        if place.executor.commands and not saving.done():
            looks.append(place.executor.results)
            if len(looks) == 100:
                saving.set_result(None)
        return place.executor.results == 1

    await place.run(told)
    assert looks == [0] * 100


@pytest.mark.parametrize("place", [3600.0], indirect=True)
async def test_slow_snapshots_are_rare(place: _Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot that takes a second is not followed by another one for 20 seconds. Bodies before it are released."""
    write, released = _Executor.snapshot, list[int]()

    async def release(log: CommandLog, position: int) -> None:
        released.append(position)

    monkeypatch.setattr(CommandLog, "release", release)
    monkeypatch.setattr(_Executor, "snapshot", lambda *given: time.sleep(1) or write(*given))
    await place.append(["alice"] * 30)
    await place.run(lambda: place.executor.results == 30)
    assert place.executor.snapshots == 1
    assert released == [place.disk["position"]]


@pytest.mark.parametrize("place", [1.0], indirect=True)
async def test_seconds_of_results_that_are_gone_count_once(place: _Place) -> None:
    await place.append(["alice"] * 6)
    await place.run(lambda: place.executor.results == 6)
    assert place.disk["results"] == 4
    async with asyncio.timeout(10):
        while (await place.log.told(0))[1]:
            await asyncio.sleep(0.05)
    await place.run(lambda: place.executor.results == 8)
    assert place.executor.account.uses == {"alice": {"optim_step": {"requests": 6, "seconds": 6.0}}}
