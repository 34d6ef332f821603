"""`trinity weights`, `explorers` and `status` on a real sync service, a real buffer and a real NATS."""

import asyncio
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from support.fakes.data.experience import make_group
from support.fakes.explorers.sync_member import FakeMember
from support.fakes.peers import FakeTrainer, explorer
from support.servers.buffer_run import BufferRun
from support.servers.nats import NatsServer
from trinity.cli.commands import status
from trinity.config import load
from trinity.data.experience import Outcome, Task
from trinity.inspect import explorers, rollback
from trinity.inspect import versions as weights
from trinity.inspect.rollback import RollbackRequest
from trinity.reading.errors import RunError
from trinity.reading.job import ProcessRecord, SupervisorRecord, make_folder
from trinity.reading.reader import JobStage, find_job_stage
from trinity.reading.status import collect
from trinity.runtime import files
from trinity.weights.manifest import Canary, Probe

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest-xdist tells its workers the width of its terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)


STEPS, INTERVAL = 8, 4
CANARY = Canary((Probe((1, 2, 3), (-1.5, -2.5)),), 0.01, 0.1)


class Live:
    """A live stage: its processes, its job folder, and the commands."""

    def __init__(self, run: BufferRun, trainer: FakeTrainer) -> None:
        self.run = run
        self.trainer = trainer
        config = load(run.config_file)
        self.folder = make_folder(config)
        files.write_json(self.folder / "config.json", json.loads(config.model_dump_json()))
        (self.folder / "log").mkdir(exist_ok=True)
        processes = [
            ProcessRecord(service.name, service.name, service.pid, service.address)
            for service in (run.sync, run.buffer)
        ]
        record = SupervisorRecord(os.getpid(), "both", run.run, "", run.nats.url, processes)
        files.write_json(self.folder / "run" / "main.json", {**record.__dict__, "processes": [
            process.__dict__ for process in processes
        ]})  # fmt: skip

    @property
    def job_stage(self) -> JobStage:
        return find_job_stage(None, self.folder, "")

    async def ask(self, command: Callable[..., str], *arguments: Any) -> Any:
        """What a command prints; parsed, if its last argument asks for JSON."""
        text = await asyncio.to_thread(command, self.job_stage, *arguments)
        return json.loads(text) if arguments[-1] is True else text

    async def state(self, version: int) -> str:
        listed = await self.ask(weights.list_versions, 100, True)
        return next(str(one["state"]) for one in listed if one["version"] == version)

    async def until(self, version: int, state: str) -> None:
        async with asyncio.timeout(30):
            while await self.state(version) != state:
                await asyncio.sleep(0.05)


@pytest.fixture
async def live(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[Live]:
    run = BufferRun(tmp_path, nats_server, steps=STEPS, synchronizer={"sync_interval": INTERVAL}).start()
    trainer = run.trainer()
    try:
        await trainer.begin()
        yield Live(run, trainer)
    finally:
        await trainer.close()
        run.stop()


@pytest.fixture
async def three(live: Live, tmp_path: Path) -> AsyncIterator[tuple[Live, FakeMember, FakeMember]]:
    """Version 4 is LIVE, version 5 was rejected by its canary; two explorers."""
    address, run = live.run.sync.address, live.run.run
    async with FakeMember(address, run, "one") as one, FakeMember(address, run, "two") as two:
        await live.trainer.publish(INTERVAL, tmp_path / "v4", CANARY)
        await live.until(INTERVAL, "LIVE")
        one.error = two.error = 0.7
        await live.trainer.publish(5, tmp_path / "v5", CANARY)
        await live.until(5, "REJECTED")
        one.error = two.error = 0.001
        yield live, one, two


async def test_a_list_of_versions_says_what_became_of_each(three: tuple[Live, FakeMember, FakeMember]) -> None:
    live, *_ = three
    newest, served, base = await live.ask(weights.list_versions, 20, True)
    assert [one["version"] for one in (newest, served, base)] == [5, 4, 0]
    assert (newest["state"], newest["explorers"], newest["canary_max_error"]) == ("REJECTED", 0, pytest.approx(0.7))
    assert "0.7" in newest["reason"] or "-2.2" in newest["reason"], newest["reason"]
    assert (served["state"], served["explorers"], served["transports"]) == ("LIVE", 2, ["folder"])
    assert served["size_bytes"] > 4
    assert (base["state"], base["transports"], base["canary"]) == ("RETIRED", [], False)
    text = await live.ask(weights.list_versions, 20, False)
    title, head, *lines, why = text.splitlines()
    assert title.endswith("3 version(s)")
    assert head.split()[:3] == ["version", "step", "state"]
    assert [line.split()[:4] for line in lines] == [
        ["5", "5", "REJECTED", "0"],
        ["4", "4", "LIVE", "2"],
        ["0", "0", "RETIRED", "0"],
    ]
    assert "base model" in lines[2]
    assert why == f"5: {newest['reason']}"
    assert "--limit 4 shows more" in await live.ask(weights.list_versions, 2, False)


async def test_a_version_is_shown_with_what_its_canary_measured(three: tuple[Live, FakeMember, FakeMember]) -> None:
    live, *_ = three
    shown = await live.ask(weights.show_version, 5, True)
    assert shown["canary"]["mean_tolerance"] == pytest.approx(0.01)
    measured = shown["canary"]["measured"]
    assert measured["explorer"] in ("one", "two")
    assert (measured["expected"], measured["computed"]) == (pytest.approx(-1.5), pytest.approx(-2.2))
    assert shown["dtypes"] == {"F32": {"tensors": 1, "bytes": 4}}
    text = await live.ask(weights.show_version, 5, False)
    assert "-1.5000 expected, -2.2000 computed" in text
    assert "1 in 1 file(s): 1 F32, 4 B" in text
    assert str(shown["offers"][0]["where"]) in text
    assert "one, two" in await live.ask(weights.show_version, INTERVAL, False)
    with pytest.raises(RunError, match="no version 77"):
        await live.ask(weights.show_version, 77, False)


async def test_a_pinned_version_says_so_until_it_is_unpinned(three: tuple[Live, FakeMember, FakeMember]) -> None:
    live, *_ = three
    assert await live.ask(weights.pin_version, INTERVAL, True) == {"version": INTERVAL, "pinned": True}
    assert "pinned     yes" in await live.ask(weights.show_version, INTERVAL, False)
    assert "not pinned" in await live.ask(weights.unpin_version, INTERVAL, False)
    assert "pinned     no" in await live.ask(weights.show_version, INTERVAL, False)


async def test_explorers_are_listed_with_what_they_serve(three: tuple[Live, FakeMember, FakeMember]) -> None:
    live, *_ = three
    one, two = await live.ask(explorers.list_explorers, True)
    assert (one["name"], two["name"]) == ("one", "two")
    assert (one["state"], one["version"], one["lag"], one["transport"]) == ("running", INTERVAL, 0, "folder")
    assert (one["tokens_per_second"], one["last_pause_seconds"]) == (123.0, 0.025)
    text = await live.ask(explorers.list_explorers, False)
    assert "2 explorer(s)" in text
    assert "25 ms" in text
    assert f"here (process {os.getpid()})" in text


async def test_an_explorer_that_starts_is_said_with_what_it_does(live: Live) -> None:
    assert "mode explore of the same YAML starts one" in await live.ask(explorers.list_explorers, False)
    log, record = live.folder / "log/explorer.log", files.read_json(live.folder / "run/main.json")
    process = ProcessRecord("explorer", "explorer", os.getpid(), "", log=str(log))
    files.write_json(
        live.folder / "run/main.json",
        {**record, "processes": [*record["processes"], dataclasses.asdict(process)]},
    )
    started, phase = '{"event": "service.started"}\n', '{"phase": "loads it", "event": "service.phase.began"}\n'
    for lines, does in ((None, "starts"), (phase + started, "starts"), (started + phase + "{}\n", "loads it")):
        if lines is not None:
            log.write_text(lines)
        text = await live.ask(explorers.list_explorers, False)
        assert text.endswith(f": no explorer serves yet: explorer {does}")


async def test_status_says_the_same_in_short(three: tuple[Live, FakeMember, FakeMember]) -> None:
    live, *_ = three
    found = await collect(live.folder)
    assert found["weights"]["live"] == INTERVAL
    assert [one["version"] for one in found["weights"]["newer"]] == [5]
    text = status.render(found)
    assert "weights: version 4 LIVE; 5 REJECTED" in text
    assert "one: running, version 4 by folder" in text
    assert "continued by another explorer" not in text
    moved = status.render({**found, "groups": {"moved_episodes": 2}})
    assert "2 episodes were continued by another explorer" in moved


async def store_groups_of(live: Live, version: int) -> None:
    """Batches 0 to 3 by version 0, and perhaps more; the others by `version`."""

    def by(sampled: int) -> Callable[[Task, int], Outcome]:
        return lambda task, deliveries: make_group(task, version=sampled, attempt=deliveries)

    run = live.run
    async with explorer(run.nats.url, run.run, by(0), drains=True):
        await live.trainer.batch(INTERVAL)
    async with explorer(run.nats.url, run.run, by(version)), asyncio.timeout(30):
        while (await live.trainer.stats()).stored < STEPS * run.groups:
            await asyncio.sleep(0.05)


async def test_a_rollback_waits_for_explorers_and_the_fence(three: tuple[Live, FakeMember, FakeMember]) -> None:
    live, one, two = three
    await store_groups_of(live, INTERVAL)
    text = await live.ask(rollback.roll_back, RollbackRequest(0, yes=True, reason="worse", wait_seconds=30))
    # The buffer makes entries ahead of the trainer until the fence stands, and of what it fences none.
    free = (STEPS - (await live.trainer.stats()).ledger_step) * live.run.groups
    assert free > 0
    assert f"the fence keeps {free} stored group(s) out of later batches" in text
    assert "2 explorer(s)" in text
    assert one.served == two.served == [0, INTERVAL, 0]
    assert "LIVE already" in await live.ask(rollback.roll_back, RollbackRequest(0, yes=True))
    listed = await live.ask(weights.list_versions, 20, True)
    assert [(v["version"], v["state"]) for v in listed] == [(5, "REJECTED"), (4, "REJECTED"), (0, "LIVE")]
    with pytest.raises(RunError, match="REJECTED"):
        await live.ask(rollback.roll_back, RollbackRequest(INTERVAL, yes=True))


async def test_a_version_without_files_is_marked_and_refused(
    three: tuple[Live, FakeMember, FakeMember], tmp_path: Path
) -> None:
    live, *_ = three
    for version in (6, 7):
        await live.trainer.publish(version, tmp_path / f"v{version}", CANARY)
        await live.until(version, "LIVE")
    shutil.rmtree(tmp_path / f"v{INTERVAL}")
    listed = await live.ask(weights.list_versions, 20, True)
    assert {one["version"]: one["files_gone"] for one in listed if one["state"] != "REJECTED"} == {
        0: False, INTERVAL: True, 6: False, 7: False
    }  # fmt: skip
    assert (await live.ask(weights.list_versions, 20, False)).count(" gone ") == 1
    assert "files      gone" in await live.ask(weights.show_version, INTERVAL, False)
    with pytest.raises(RunError, match=r"files of version 4 are gone; .* have files: 0, 6, 7 "):
        await live.ask(rollback.roll_back, RollbackRequest(INTERVAL, yes=True))
    assert "LIVE again" in await live.ask(rollback.roll_back, RollbackRequest(6, yes=True, wait_seconds=30))


async def test_a_rollback_may_keep_the_experience(three: tuple[Live, FakeMember, FakeMember]) -> None:
    live, *_ = three
    await store_groups_of(live, INTERVAL)
    request = RollbackRequest(0, keep_experience=True, yes=True, wait_seconds=30, as_json=True)
    said = json.loads(await live.ask(rollback.roll_back, request))
    assert (said["rollback"]["version"], said["rollback"]["number"], said["dropped_groups"]) == (0, 1, 0)
    assert said["explorers"] == ["one", "two"]
    assert (await live.trainer.stats()).dropped.get("fenced", 0) == 0


async def test_who_does_not_follow_a_rollback_is_named(three: tuple[Live, FakeMember, FakeMember]) -> None:
    live, _, two = three
    two.follows = False
    with pytest.raises(RunError, match=r"rollback 1 was made, but not all have followed: two serves 4"):
        await live.ask(rollback.roll_back, RollbackRequest(0, yes=True, wait_seconds=3))
    assert await live.state(0) == "LIVE"


async def test_nothing_is_done_without_a_yes(three: tuple[Live, FakeMember, FakeMember]) -> None:
    """As a user meets it: what would be done is said, exit code 2, and nothing has changed."""
    live, *_ = three
    await store_groups_of(live, INTERVAL)
    async with asyncio.timeout(20):  # the buffer makes its entries ahead of the trainer
        while (await live.trainer.stats()).ledger_step < INTERVAL + 2:
            await asyncio.sleep(0.05)
    waiting = (STEPS - (await live.trainer.stats()).ledger_step) * live.run.groups
    assert waiting > 0
    command = [sys.executable, "-m", "trinity.cli.main", "weights", "rollback", "0", "--job", str(live.folder)]
    done = await asyncio.to_thread(
        subprocess.run, command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert "version 0 becomes LIVE again in place of 4; withdrawn: 4, whose experience enters no later" in done.stdout
    assert f"({waiting} stored group(s) wait for one)" in done.stdout
    assert "one, two" in done.stdout
    assert done.stderr == "trinity: nothing was done; --yes does it without asking\n"
    assert await live.state(INTERVAL) == "LIVE"


async def test_without_a_live_run_every_command_says_what_to_do(tmp_path: Path, live: Live) -> None:
    (live.folder / "run" / "main.json").unlink()
    for command, arguments in (
        (weights.list_versions, (20, False)),
        (explorers.list_explorers, (False,)),
        (rollback.roll_back, (RollbackRequest(0, yes=True),)),
    ):
        with pytest.raises(RunError, match="does not run, and only its running services know this"):
            await live.ask(command, *arguments)  # type: ignore[operator]
