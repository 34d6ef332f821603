"""Commands find a live run by --nats and --run, without a job folder; what reads one says so."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.fakes.peers import explorer
from support.servers.buffer_run import BufferRun
from support.servers.nats import NatsServer
from trinity.cli.commands import status
from trinity.config import Config, ConfigError
from trinity.config.run_record import Addresses, RunRecord, announcement
from trinity.inspect import batch, explorers
from trinity.inspect import dead_letters as letters
from trinity.inspect import versions as weights
from trinity.inspect.view import find_rows, view
from trinity.lineage import replay, replay_step
from trinity.lineage.replay import find_trained
from trinity.reading import find, run_record
from trinity.reading.errors import RunError
from trinity.reading.find import AnnouncedRun, find_run
from trinity.reading.reader import JobStage, find_job_stage
from trinity.reading.status import collect_announced
from trinity.runtime import names
from trinity.runtime.broker import Bucket, connect
from trinity.runtime.errors import Unavailable
from trinity.runtime.process import free_port
from trinity.runtime.trust import nats_users
from trinity.runtime.trust.roles import Role

pytestmark = pytest.mark.core

STEPS = 3


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without job folders, and without a NATS of its own."""
    for variable in ("COLUMNS", "TRINITY_NATS_URL", "TRINITY_CHECKPOINT_ROOT_DIR"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def record(name: str, **changes: object) -> RunRecord:
    config = Config.model_validate({"project": "p", "name": name, **changes})
    run = names.run_id(config.project, config.name, config.group)
    stage = config.name.rpartition("/")[2]
    return RunRecord(version=run_record.this_version(), run=run, stage=stage, online=True, last=True,
                     addresses=Addresses(buffer="b:1"), config=config)  # fmt: skip


async def announce(url: str, *records: RunRecord, key: str = "") -> None:
    async with await connect(url, "test") as broker:
        bucket = await Bucket.open(broker, names.ANNOUNCEMENTS_BUCKET, ttl_seconds=600, in_memory=True)
        for about in records:
            await bucket.put(key or names.RunNames(about.run).announcement_key, announcement(about))


async def found(url: str, run: str = "") -> RunRecord:
    place = await asyncio.to_thread(find_run, None, None, url, run)
    assert isinstance(place, AnnouncedRun)
    return place.about


@pytest.fixture
async def live(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[BufferRun]:
    trainer_address = f"127.0.0.1:{free_port()}"
    run = BufferRun(tmp_path, nats_server, steps=STEPS, settings={"TRAINER_ADDRESS": trainer_address}).start()
    trainer = run.trainer()
    try:
        await trainer.begin()
        await until_announced(nats_server.url, run.run)
        yield run
    finally:
        await trainer.close()
        run.stop()


async def until_announced(url: str, run: str) -> None:
    async with asyncio.timeout(60), await connect(url, "test") as broker:
        while await run_record.read_announced(broker, run) is None:
            await asyncio.sleep(0.05)


async def test_commands_are_answered_without_a_job_folder(live: BufferRun, monkeypatch: pytest.MonkeyPatch) -> None:
    assert live.nats.users is not None
    reader = nats_users.user_file(live.nats.users, Role.READER, "reader", live.run)
    monkeypatch.setenv("TRINITY_NATS_CREDS", str(reader))  # a role that may not make what is missing
    place = await asyncio.to_thread(find_run, None, None, live.nats.url, "")
    assert isinstance(place, AnnouncedRun)
    seen = await collect_announced(place)
    assert {one["name"]: one["health"] for one in seen["processes"]} == {
        "buffer": "SERVING", "sync": "SERVING", "trainer": "UNAVAILABLE"
    }  # fmt: skip
    assert (seen["job"], seen["run"], seen["weights"]["live"], seen["processes"][0]["pid"]) == (None, live.run, 0, None)
    assert f"{live.run} ({live.folder.name})" in status.render(seen)
    stage = await asyncio.to_thread(find_job_stage, None, None, "", live.nats.url, live.folder.name)
    versions = json.loads(await asyncio.to_thread(weights.list_versions, stage, 20, True))
    assert [one["version"] for one in versions] == [0]
    assert "no explorers" in await asyncio.to_thread(explorers.list_explorers, stage)
    assert "no dead letters" in await asyncio.to_thread(letters.list_letters, stage)
    for asks_the_buffer in (lambda: batch.show_batch(stage, 1), lambda: batch.skip_batch(stage, 1, "a test")):
        with pytest.raises(RunError, match=r"^step: 1 has no ledger entry"):
            await asyncio.to_thread(asks_the_buffer)
    with pytest.raises(RunError, match=f"--stage other: tests/{live.folder.name} is in stage '{live.folder.name}'"):
        await asyncio.to_thread(find_job_stage, None, None, "other", live.nats.url, "")


async def test_experience_and_batches_are_shown_without_a_job_folder(live: BufferRun) -> None:
    stage = await asyncio.to_thread(find_rows, nats=live.nats.url)
    trainer = live.trainer()
    async with explorer(live.nats.url, live.run):
        await trainer.batch(STEPS)
    entry = await trainer.entry(STEPS)
    await trainer.close()
    rows = json.loads(await asyncio.to_thread(view, stage, None, None, "", True))
    assert len(rows) == sum(group.num_experiences for group in entry.groups)
    assert {(one["task_id"], one["ordinal"], one["log_sequence"]) for one in rows} == {
        (group.task_id, group.ordinal, group.log_sequence) for group in entry.groups
    }
    assert {"rollout", "turn", "reward", "versions", "prompt_tokens", "response_tokens"} <= rows[0].keys()
    assert isinstance(stage, JobStage)
    shown = await asyncio.to_thread(batch.show_batch, stage, STEPS, 1)
    assert shown.count("--- response 0: ") == len(entry.groups)


async def test_training_again_says_what_nats_does_not_have(live: BufferRun, tmp_path: Path) -> None:
    found = await asyncio.to_thread(find_trained, None, None, "", live.nats.url, "")
    for again in (lambda: replay.replay(found, 1), lambda: replay_step.replay_step(found, 1)):
        with pytest.raises(RunError, match=r"give the run's YAML by --config; .* model\.model_path=.* by --job"):
            again()
    yaml, job = live.config_file, tmp_path / "elsewhere" / "tests" / live.folder.name
    found = await asyncio.to_thread(find_trained, yaml, job, "", live.nats.url, "")
    with pytest.raises(RunError, match=r"none in .*elsewhere.*; --job names the job folder of the trainer"):
        replay_step.replay_step(found, 1)
    with pytest.raises(RunError, match="has trained no step yet"):
        await asyncio.to_thread(replay.replay, found, 1)
    trainer = live.trainer()
    async with explorer(live.nats.url, live.run):
        await trainer.batch(2)
    await trainer.close()
    with pytest.raises(RunError, match=r"no checkpoint of a step before it in .*elsewhere"):
        await asyncio.to_thread(replay.replay, found, 2)
    with pytest.raises(ConfigError, match=r"model\.model_path"):
        await asyncio.to_thread(replay.replay, found, 1, ["model.model_path=/no/model"])
    other = tmp_path / "other.yaml"
    other.write_text(yaml.read_text().replace("tests", "others"))
    with pytest.raises(RunError, match=r"other\.yaml is of run .*, and NATS says"):
        await asyncio.to_thread(find_trained, other, None, "", live.nats.url, "")


async def test_a_run_is_announced_again_after_its_nats_lost_the_record(live: BufferRun) -> None:
    """The bucket is in memory: a NATS that starts again has none until the buffer renews its entry."""
    live.nats.kill()
    live.nats.start()
    await until_announced(live.nats.url, live.run)


async def test_a_name_chooses_among_several_runs_and_none_is_an_error_that_lists_them(nats_url: str) -> None:
    with pytest.raises(RunError, match=r"^no run lives at nats://127"):
        await found(nats_url)
    one, two = record("one"), record("two/rft")
    await announce(nats_url, one)
    assert (await found(nats_url)).run == one.run
    await announce(nats_url, two)
    with pytest.raises(RunError) as caught:
        await found(nats_url)
    assert str(caught.value).endswith(f": p/one ({one.run}), p/two/rft ({two.run}); name one by --run")
    with pytest.raises(RunError, match=r"no run three lives at .*; there are: p/one \("):
        await found(nats_url, "three")
    for name in ("two", "two/rft", "p/two", "p/two/rft", two.run):
        assert (await found(nats_url, name)).run == two.run


async def test_what_no_run_wrote_is_told_and_does_not_hide_the_others(nats_url: str) -> None:
    one, newer = record("one"), record("two").model_copy(update={"version": "9.0.0"})
    await announce(nats_url, newer)
    with pytest.raises(RunError, match=r"begun with Trinity 9\.0\.0"):
        await found(nats_url)
    await announce(nats_url, one, key=names.RunNames("another").announcement_key)
    with pytest.raises(RunError, match=r"KV entry trinity_announcements/live\.another is the record of another run"):
        await found(nats_url)
    await announce(nats_url, one)
    assert (await found(nats_url)).run == one.run


def test_an_announcement_says_nothing_of_data_and_environment() -> None:
    secret = "of-the-run-alone"
    about = record(
        "n",
        monitor={"monitor_type": "wandb", "monitor_args": {"api_key": secret}},
        explorer={"env_vars": {"HF_TOKEN": secret}, "environments": [{"name": "e", "address": "h:1"}]},
        buffer={"explorer_input": {"taskset": {"name": "sums", "path": f"/data/{secret}"}}},
        checkpoint_root_dir=f"/{secret}",
    )
    said = announcement(about)
    assert secret not in said.decode()
    again = run_record.parse(said, "entry")
    assert (again.run, again.addresses, again.config.model) == (about.run, about.addresses, about.config.model)
    assert again.config.explorer.environments == about.config.explorer.environments
    assert [one.name for one in again.config.buffer.explorer_input.tasksets] == ["sums"]


def test_options_that_contradict_each_other_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match="--run x: name the run's NATS by --nats or TRINITY_NATS_URL"):
        find_run(run="x")
    with pytest.raises(RunError, match="not both"):
        find_run(job=tmp_path, nats="nats://127.0.0.1:1")
    with pytest.raises(RunError, match=f"--config x.yaml and --job {tmp_path} each name a run: give one") as refused:
        find_run(config=Path("x.yaml"), job=tmp_path)
    assert refused.value.code == 2
    with pytest.raises(RunError, match="no run below"):
        find_run()
    monkeypatch.setattr(find, "_CONNECT_SECONDS", 0.2)
    monkeypatch.setenv("TRINITY_NATS_URL", f"nats://127.0.0.1:{free_port()}")
    with pytest.raises(Unavailable):  # it is asked where no folder is found
        find_run()


@pytest.mark.parametrize(
    "url", ["http://x", "nats://", "nats://h:99999", "nats://h:x", "nats://[::1", "nats://a,ws://b"]
)
def test_a_url_that_is_not_of_nats_is_refused_without_waiting_for_an_answer(url: str) -> None:
    with pytest.raises(RunError, match=r"must be nats://host:port or tls://host:port"):
        find_run(nats=url)


def test_the_command_line_has_the_options() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trinity.cli.main", "view", "--run", "x"],
        env=dict(os.environ), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("trinity: --run x: name the run's NATS by --nats")
