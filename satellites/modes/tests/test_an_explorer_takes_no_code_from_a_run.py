"""The record of a run on NATS gives an explorer that joins neither code nor paths."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from trinity.config import Config
from trinity.config.checks.sections import check
from trinity.config.run_record import Addresses, RunRecord, announcement
from trinity.config.schema.model import ModelConfig
from trinity.modes import join, join_config
from trinity.modes.join_config import joined_config
from trinity.modes.serve import _plan
from trinity.reading import run_record
from trinity.reading.errors import RunError
from trinity.reading.job import Job, ProcessRecord, SupervisorRecord
from trinity.reading.run_record import local_addresses
from trinity.runtime import files, names
from trinity.runtime.broker import Broker, Bucket, connect
from trinity.runtime.errors import InvalidInput
from trinity.runtime.trust import identity
from trinity.runtime.trust.identity import Identity
from trinity.runtime.trust.roles import Role
from trinity.runtime.trust.tokens import make_tokens

pytestmark = pytest.mark.core

MODEL = {"model_path": "owner/policy", "max_model_len": 512, "temperature": 0.5}
FORGED = {
    "model_path": "/tmp/of-the-attacker", "trust_remote_code": True,
    "custom_chat_template": "{{ evil }}", "chat_template_path": "/etc/passwd",
}  # fmt: skip
FORGED_EXPLORER = {
    "env_vars": {"LD_PRELOAD": "/tmp/evil.so"},
    "auxiliary_models": [{"model_path": "/tmp/evil", "trust_remote_code": True}],
    "environments": [{"name": "arithmetic", "address": "evil:1"}],
}


def config(root: Path, model: dict[str, Any] | None = None, **sections: Any) -> Config:
    about = {"project": "p", "name": "n", "mode": "explore", "checkpoint_root_dir": str(root)}
    return Config.model_validate({**about, "model": model or {}, **sections})


def record(root: Path, model: dict[str, Any], name: str = "n", **sections: Any) -> RunRecord:
    """Of a run whose folder may be elsewhere."""
    theirs = config(root, model, **sections).model_copy(update={"name": name, "mode": "train"})
    run = names.run_id("p", name, "")
    return RunRecord(version=run_record.this_version(), run=run, stage=name, online=True, last=True,
                     addresses=Addresses(buffer="evil:1"), config=theirs)  # fmt: skip


@pytest.mark.parametrize("key", FORGED)
def test_each_key_that_decides_about_code_or_paths_is_refused_with_both_values(key: str, tmp_path: Path) -> None:
    ours = config(tmp_path, MODEL)
    with pytest.raises(RunError) as caught:
        joined_config(ours, record(tmp_path, {**MODEL, key: FORGED[key]}))
    said = str(caught.value)
    own = repr(value) if (value := getattr(ours.model, key)) not in (None, "") else "not set"
    assert f"model.{key} is {own} here, and {FORGED[key]!r} in the record" in said
    assert f"set model.{key} in this YAML" in said
    with pytest.raises(RunError, match=f"model.{key} is"):
        _plan(ours.model_copy(update={"mode": "serve"}), record(tmp_path, {**MODEL, key: FORGED[key]}))


def test_a_yaml_without_a_model_does_not_join_elsewhere(tmp_path: Path) -> None:
    ours = config(tmp_path)
    with pytest.raises(RunError, match=r"model.model_path is not set here, and 'owner/policy' in the record of run"):
        joined_config(ours, record(tmp_path, MODEL))


def test_lengths_sampling_and_workflows_come_from_the_run_and_nothing_else_does(tmp_path: Path) -> None:
    explorer_input = {"taskset": {"path": "/secret/data", "default_workflow_type": "multi", "workflow_args": {"a": 1}}}
    forged = record(
        tmp_path / "elsewhere", MODEL, buffer={"explorer_input": explorer_input}, explorer=FORGED_EXPLORER,
        synchronizer={"storage": ["s3://evil/bucket"], "collective_timeout": 7.0},
        monitor={"monitor_type": "wandb", "monitor_args": {"base_url": "http://evil"}},
    )  # fmt: skip
    ours = config(tmp_path, {"model_path": "owner/policy"})
    merged = joined_config(ours, forged)
    assert (merged.model.max_model_len, merged.model.temperature) == (512, 0.5)
    assert merged.synchronizer.collective_timeout == 7
    (taskset,) = merged.buffer.explorer_input.tasksets
    assert (taskset.default_workflow_type, taskset.workflow_args) == ("multi", {"a": 1})
    text = merged.model_dump_json()
    assert "evil" not in text
    assert "/secret/data" not in text
    assert (merged.explorer, merged.monitor) == (ours.explorer, ours.monitor)
    assert merged.checkpoint_root_dir == str(tmp_path)


@pytest.mark.parametrize(
    ("lora", "taken"),
    [
        ({"lora_rank": 64, "merged": False}, True),
        ({"lora_rank": 64, "path": "/evil/adapters", "merged": False}, True),
        ({"path": "/evil/adapters", "merged": False}, False),
    ],
)
def test_older_versions_play_as_the_run_says(lora: dict[str, Any], taken: bool, tmp_path: Path) -> None:
    args = {"environment": "nim", "seats": {"second": "older"}}
    taskset = {"path": "/t", "default_workflow_type": "players_workflow", "workflow_args": args}
    theirs = record(
        tmp_path / "elsewhere", {**MODEL, "lora_configs": [lora]}, buffer={"explorer_input": {"taskset": taskset}},
        explorer={"older_versions": {"every": 5, "keep": 2}},
    )  # fmt: skip
    about = RunRecord.model_validate_json(announcement(theirs))
    joined = joined_config(config(tmp_path, {"model_path": "owner/policy"}), about)
    assert (joined.explorer.older_versions.every, joined.explorer.older_versions.keep) == (5, 2)
    found = joined.model.lora
    assert (found is not None) == taken
    assert found is None or (found.lora_rank, found.merged, found.path) == (64, False, None)
    problems = [problem.path for problem in check(joined)]
    assert problems == ([] if taken else ["model.lora_configs"])


def test_every_key_of_the_model_is_decided() -> None:
    decided = [*join_config._OWN, *join_config._SHARED, *join_config._UNUSED]
    assert sorted(decided) == sorted(ModelConfig.model_fields)


@pytest.mark.parametrize("stage", ["n", "n/rft"])
def test_on_the_runs_machine_the_job_folder_decides(stage: str, tmp_path: Path) -> None:
    ours, about = config(tmp_path), record(tmp_path, {**MODEL, "trust_remote_code": True}, name=stage)
    path = tmp_path / "p" / stage / "config.json"
    files.write_json(path, json.loads(about.config.model_dump_json()))
    assert joined_config(ours, about).model == about.config.model
    forged = record(tmp_path, {**MODEL, **FORGED}, name=stage)
    with pytest.raises(RunError, match=r"model.model_path is 'owner/policy' here, and '/tmp/of-the-attacker' in"):
        joined_config(ours, forged)


def others_write_the_file(path: Path) -> None:
    path.chmod(0o666)


def others_write_the_folder(path: Path) -> None:
    path.parent.chmod(0o777)


def it_is_a_link(path: Path) -> None:
    path.rename(path.parent / "other.json")
    path.symlink_to(path.parent / "other.json")


def it_is_no_config(path: Path) -> None:
    path.write_text('{"model": {"model_path": 3}}')


@pytest.mark.parametrize(
    "change", [others_write_the_file, others_write_the_folder, it_is_a_link, it_is_no_config], ids=lambda f: f.__name__
)
def test_a_job_folder_that_others_may_write_decides_nothing(change: Any, tmp_path: Path) -> None:
    ours, about = config(tmp_path), record(tmp_path, MODEL)
    path = tmp_path / "p/n/config.json"
    files.write_json(path, json.loads(about.config.model_dump_json()))
    change(path)
    with pytest.raises(RunError, match="model_path is not set here"):
        joined_config(ours, about)


def test_a_job_folder_of_another_user_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, about = config(tmp_path), record(tmp_path, MODEL)
    files.write_json(tmp_path / "p/n/config.json", json.loads(about.config.model_dump_json()))
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_001)
    with pytest.raises(RunError, match="model_path is not set here"):
        joined_config(ours, about)


@pytest.mark.parametrize("change", [{"project": "other"}, {"group": "g"}, {"name": "nn"}, {"name": "other/n"}], ids=str)
def test_a_record_of_another_run_is_refused(change: dict[str, str], tmp_path: Path) -> None:
    ours, about = config(tmp_path, MODEL), record(tmp_path, MODEL)
    other = about.model_copy(update={"config": about.config.model_copy(update=change)})
    with pytest.raises(RunError, match="the record of the run has project, group, name ="):
        joined_config(ours, other)
    with pytest.raises(RunError, match="the record of the run has project, group, name ="):
        joined_config(ours, about.model_copy(update={"run": "another"}))


def test_a_run_that_lives_here_is_found_where_its_job_folder_says(tmp_path: Path) -> None:
    ours, about = config(tmp_path, MODEL), record(tmp_path, MODEL)
    assert local_addresses(Job(ours), about).buffer == "evil:1"
    listens = [ProcessRecord("buffer", "buffer", 1, "127.0.0.1:7001"), ProcessRecord("nats", "nats", 2, "127.0.0.1:2")]
    Job(ours).write_record("main", SupervisorRecord(os.getpid(), "train", about.run, "n", "", listens))
    assert local_addresses(Job(ours), about) == Addresses(buffer="127.0.0.1:7001")


def test_a_record_does_not_choose_where_a_token_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, about = config(tmp_path, MODEL), record(tmp_path, MODEL)
    make_tokens(tmp_path / "identity")
    monkeypatch.setattr(identity, "_own", Identity(Role.OPERATOR, tmp_path / "identity"))
    with pytest.raises(InvalidInput, match="address of buffer in the run's record: is 'evil:1', where a token would"):
        local_addresses(Job(ours), about)
    here = about.model_copy(update={"addresses": Addresses(buffer="127.0.0.1:1", sync="127.0.0.1:2")})
    assert local_addresses(Job(ours), here) == here.addresses


class Display:
    def say(self, _: str) -> None: ...


async def test_a_run_without_a_supervisor_is_joined_by_its_announcement(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the record of an earlier supervisor is still there, whose buffer does not answer."""
    monkeypatch.setenv("TRINITY_NATS_URL", nats_url)

    async def answers(_: Job, about: RunRecord) -> bool:
        return about.addresses.buffer == "evil:1"

    monkeypatch.setattr(run_record, "_answers", answers)
    about, ours = record(tmp_path, MODEL), config(tmp_path, {"model_path": "owner/policy"})
    async with await connect(nats_url, "test") as broker:
        await write(broker, about.model_copy(update={"addresses": Addresses(buffer="gone:1")}))
        assert (await join.look_for_run(Job(ours)))[1] is None
        await announce(broker, about)
    nats, found = await join.look_for_run(Job(ours))
    assert nats.url == nats_url
    assert found is not None
    assert joined_config(ours, found) == joined_config(ours, about)


async def announce(broker: Broker, about: RunRecord) -> None:
    bucket = await Bucket.open(broker, names.ANNOUNCEMENTS_BUCKET, ttl_seconds=600, in_memory=True)
    await bucket.put(names.RunNames(about.run).announcement_key, announcement(about))


async def write(broker: Broker, about: RunRecord) -> None:
    await run_record.write(broker, about.run, about)


@pytest.mark.parametrize("say", [write, announce])
async def test_a_forged_record_in_nats_starts_no_process(
    say: Any, nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_NATS_URL", nats_url)

    async def answers(*_: Any) -> bool:  # an attacker's buffer would
        return True

    monkeypatch.setattr(run_record, "_answers", answers)
    ours = config(tmp_path, MODEL)
    job = Job(ours)
    async with await connect(nats_url, "test") as broker:
        await say(broker, record(tmp_path, {**MODEL, **FORGED}))
    url, about = await join.find_run(job, Display(), asyncio.Event(), 20.0)  # type: ignore[arg-type]
    assert about is not None
    with pytest.raises(RunError, match="'/tmp/of-the-attacker' in the record"):
        await join._explore(ours, "explorer.yaml", job, url, about, Display(), asyncio.Event())  # type: ignore[arg-type]
    assert not list(tmp_path.glob("**/*.config.json"))
