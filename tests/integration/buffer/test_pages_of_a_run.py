"""The pages of trinity.ui on a real buffer, sync and NATS: of a live run, and when its processes are gone."""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from pathlib import Path

import httpx
import pytest

from support.fakes.explorers.sync_member import FakeMember
from support.fakes.peers import a_failure, a_group, explorer
from support.servers.buffer_run import BufferRun
from support.servers.nats import NatsServer
from trinity.config import load
from trinity.config.run_record import announcement
from trinity.data.experience import Outcome, Task
from trinity.reading.find import AnnouncedRun, find_run
from trinity.reading.job import ProcessRecord, SupervisorRecord, make_folder
from trinity.runtime import files, names
from trinity.runtime.broker import Bucket, connect
from trinity.ui.app import make_app
from trinity.ui.places import Places
from trinity.weights.manifest import Canary, Probe

pytestmark = pytest.mark.core

DEAD = 2  # the task that always fails, by ordinal
CANARY = Canary((Probe((1, 2, 3), (-1.5, -2.5)),), 0.01, 0.1)


def answer(task: Task, deliveries: int) -> Outcome:
    return a_failure(task, deliveries) if task.ordinal == DEAD else a_group(task, deliveries)


def make_job(run: BufferRun) -> Path:
    """The job folder as `trinity run` would keep it, with a record of the live processes."""
    config = load(run.config_file)
    folder = make_folder(config)
    files.write_json(folder / "config.json", json.loads(config.model_dump_json()))
    (folder / "log").mkdir(exist_ok=True)
    processes = [
        ProcessRecord(service.name, service.name, service.pid, service.address) for service in (run.sync, run.buffer)
    ]
    record = SupervisorRecord(os.getpid(), "both", run.run, "", run.nats.url, processes)
    files.write_json(folder / "run" / "main.json", asdict(record))
    return folder


@pytest.fixture
async def run(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[BufferRun]:
    """A run that trained two steps, has one dead letter, one explorer, and version 1 LIVE."""
    started = BufferRun(tmp_path, nats_server, synchronizer={"sync_interval": 1}).start()
    trainer = started.trainer()
    try:
        await trainer.begin()
        async with (
            FakeMember(started.sync.address, started.run, "one") as member,
            explorer(started.nats.url, started.run, answer),
        ):
            await trainer.batch(1)
            await trainer.publish(1, tmp_path / "w1", CANARY)
            await trainer.batch(2)
            async with asyncio.timeout(30):
                while member.version != 1:
                    await asyncio.sleep(0.05)
            yield started
    finally:
        await trainer.close()
        started.stop()


class Reader:
    """Reads pages of the only run of `places`."""

    def __init__(self, places: Places) -> None:
        self._places = places
        (self._key,) = places.find()
        app = httpx.ASGITransport(make_app(places, "k", writes=True))
        self._client = httpx.AsyncClient(transport=app, base_url="http://127.0.0.1", cookies={"trinity_ui": "k"})

    async def page(self, path: str = "", status: int = 200) -> str:
        found = await self._client.get(f"/run/{self._key}{path}")
        assert found.status_code == status, found.text
        return found.text

    async def send(self, path: str, page: str) -> None:
        """Send the form of a page to its own path."""
        (form,) = re.findall(f'action="[^"]*{path}">(.*?)</form>', await self.page(page))
        fields = dict(re.findall(r'name="([a-z]+)" value="([^"]*)"', form))
        found = await self._client.post(f"/run/{self._key}{path}", data=fields)
        assert found.status_code == 303, found.text

    async def runs(self) -> str:
        return (await self._client.get("/")).text

    async def __aenter__(self) -> "Reader":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._places.close()
        await self._client.aclose()


async def test_a_live_run_and_the_same_run_without_its_processes(
    run: BufferRun, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(run)
    async with Reader(Places(job)) as reader:
        overview = await reader.page()
        assert '<span class="state live">' in overview
        assert 'class="ledger sound"' in overview
        assert "1 task died" in overview
        assert "step 2" in await reader.page("/step/2")
        assert "it always fails" in await reader.page("/dead")
        assert f"<h1>Dead letter {DEAD}" in await reader.page(f"/dead/{DEAD}")
        assert '<span class="state live">LIVE</span>' in await reader.page("/versions")
        assert "Measured by one" in await reader.page("/versions/1")
        assert "weights rollback" not in await reader.page("/versions/1")
        older = await reader.page("/versions/0")
        assert "<th>versions it withdraws</th>\n<td>1: 1 - 1</td>" in older
        assert "<th>stored groups it drops</th>\n<td>0</td>" in older
        assert "no version 77" in await reader.page("/versions/77", 404)
        fleet = await reader.page("/fleet")
        assert '<span class="state serving">SERVING</span>' in fleet
        assert "<td>one</td>" in fleet

        (job / "run/main.json").unlink()
        run.stop()
        monkeypatch.setenv("TRINITY_NATS_URL", nats_server.url)
        overview = await reader.page()
        assert '<span class="state stopped">' in overview
        assert 'class="ledger sound"' in overview
        assert "it always fails" in await reader.page("/dead")
        for path in ("/versions", "/fleet"):
            assert "does not" in await reader.page(path, 404)


async def test_a_run_that_its_nats_alone_knows(run: BufferRun, nats_server: NatsServer) -> None:
    place = await asyncio.to_thread(find_run, None, None, nats_server.url, "")
    assert isinstance(place, AnnouncedRun)
    async with Reader(Places(place)) as reader:
        assert '<span class="state live">' in await reader.runs()
        assert 'class="ledger sound"' in await reader.page()
        assert "step 2" in await reader.page("/step/2")
        assert '<span class="state live">LIVE</span>' in await reader.page("/versions")
        assert "<td>one</td>" in await reader.page("/fleet")
        group = await reader.page("/step/1/group/1")
        assert "../sample/0" in group
        sample = await reader.page("/step/1/sample/0")
        assert f"--run {run.run}" in sample
        assert "Tokens</h2>" not in sample, "NATS has no arrays of what was trained"
        assert "it always fails" in await reader.page("/dead")
        await reader.send("/dead/retry", "/dead")
        assert "it always fails" not in await reader.page("/dead")


async def test_pages_follow_a_run_that_stops_moves_and_begins_its_next_stage(
    run: BufferRun, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity.ui.places._LOOK_SECONDS", 0.0)
    place = await asyncio.to_thread(find_run, None, None, nats_server.url, "")
    assert isinstance(place, AnnouncedRun)
    about, places = place.about, Places(place)
    async with Reader(places) as reader, await connect(nats_server.url, "test") as broker:
        bucket = await Bucket.find(broker, names.ANNOUNCEMENTS_BUCKET)
        assert bucket is not None
        assert '<span class="state live">' in await reader.page()
        run.stop()
        await bucket.delete(names.RunNames(about.run).announcement_key)
        overview = await reader.page()
        assert '<span class="state ended">' in overview
        assert 'class="ledger sound"' in overview, "a read-only buffer reads it from NATS"
        assert "does not run" in await reader.page("/versions", 404)

        after = about.config.model_copy(update={"name": f"{about.config.name}/next"})
        run_of_next = names.run_id(after.project, after.name, after.group)
        moved = about.model_copy(update={"addresses": replace(about.addresses, sync="127.0.0.1:9")})
        for one in (moved, about.model_copy(update={"run": run_of_next, "stage": "next", "config": after})):
            await bucket.put(names.RunNames(one.run).announcement_key, announcement(one))
            await reader.runs()
            source = places.find()[one.run]
            assert source.is_live
            assert source.job_stage.about is not None
            assert source.job_stage.about.addresses == one.addresses
            await bucket.delete(names.RunNames(one.run).announcement_key)
        assert list(places.find()) == [run_of_next, about.run]
        assert [one.is_live for one in places.find().values()] == [True, False]
