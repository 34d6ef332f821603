"""What another version of Trinity began, and what no Trinity wrote, is refused in one sentence, and not half-read."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trinity.config import Config
from trinity.config.run_record import Addresses, RunRecord
from trinity.reading import job as jobs
from trinity.reading import run_record
from trinity.reading.errors import RunError
from trinity.reading.job import read_records
from trinity.reading.run_record import check_folder, mark_folder, parse
from trinity.runtime import names
from trinity.runtime.broker import Bucket, StreamSpec, connect, ensure_streams

pytestmark = pytest.mark.core

RECORDED = Path(__file__).parent / "data" / "job_of_0_2_0"
RECORD = RunRecord(
    version=run_record.this_version(), run="r", stage="rft", online=True, last=True, addresses=Addresses(buffer="b:1"),
    config=Config(),
)  # fmt: skip
OLD_RECORD = json.loads(RECORD.model_dump_json(exclude={"version"}))


def trinity(*arguments: str, **environment: str) -> tuple[int, str]:
    """The exit code and the one sentence on stderr, beside notes."""
    given = {key: value for key, value in os.environ.items() if key != "TRINITY_NATS_URL"}
    command = [sys.executable, "-m", "trinity.cli.main", *arguments]
    done = subprocess.run(command, env={**given, **environment}, capture_output=True, text=True, timeout=90)
    (sentence,) = (line for line in done.stderr.splitlines() if not line.startswith("note: "))
    return done.returncode, sentence


@pytest.fixture
def run_yaml(tmp_path: Path, quickstart_model: Path, quickstart_data: Path, repository: Path) -> Path:
    text = (repository / "examples/quickstart/arithmetic.yaml").read_text()
    text = text.replace("${oc.env:TRINITY_MODEL_PATH,build/quickstart/model}", str(quickstart_model))
    text = text.replace("${oc.env:TRINITY_TASKSET_PATH,build/quickstart/data}", str(quickstart_data))
    values = {**yaml.safe_load(text), "checkpoint_root_dir": str(tmp_path / "jobs")}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def test_a_folder_of_an_older_version_is_refused_and_left_as_it_was(run_yaml: Path, tmp_path: Path) -> None:
    job = tmp_path / "jobs/quickstart/arithmetic"
    shutil.copytree(RECORDED, job / "rft")
    before = sorted(job.rglob("*"))
    code, said = trinity("run", str(run_yaml))
    assert code == 2
    assert f"the run in {job} was begun with Trinity 0.2.0 or older" in said
    assert f"this is {run_record.this_version()}: use that version to continue it, or begin again under another" in said
    assert sorted(job.rglob("*")) == before


@pytest.mark.parametrize(
    ("begun", "ours", "continues"),
    [("0.3.0", "0.3.4", True), ("0.3.9", "0.3.0", True), ("0.3.0", "0.4.0", False), ("1.0.0", "0.3.0", False)],
)
def test_versions_that_differ_in_the_last_number_continue(
    begun: str, ours: str, continues: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(RECORDED, tmp_path / "job")
    monkeypatch.setattr(run_record, "this_version", lambda: begun)
    mark_folder(tmp_path / "job")
    monkeypatch.setattr(run_record, "this_version", lambda: ours)
    mark_folder(tmp_path / "job")  # the version that began it stays
    if continues:
        check_folder(tmp_path / "job")
        return
    with pytest.raises(RunError, match=f"begun with Trinity {begun}, and this is {ours}"):
        check_folder(tmp_path / "job")


def test_an_empty_folder_is_begun(tmp_path: Path) -> None:
    check_folder(tmp_path)
    mark_folder(tmp_path)
    check_folder(tmp_path)


@given(st.binary(max_size=200))
def test_any_bytes_are_one_sentence(value: bytes) -> None:
    with pytest.raises(RunError) as caught:
        parse(value, "entry")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "value",
    [
        *("null", "[]", "{}", "[" * 10_000, '{"run": 3}', json.dumps(OLD_RECORD), '{"run": 1, "version": "\\u001b"}'),
        *(
            json.dumps({**OLD_RECORD, "version": RECORD.version, key: wrong})
            for key, wrong in (("addresses", 3), ("addresses", {"buffer": []}), ("config", {"\x1b": 1}), ("run", None))
        ),
    ],
    ids=range(11),
)
def test_json_that_is_no_record_is_one_sentence(value: str) -> None:
    with pytest.raises(RunError) as caught:
        parse(value.encode(), "entry")
    assert str(caught.value).isprintable()


def test_a_record_survives_the_way_without_keys_of_the_monitor() -> None:
    assert parse(RECORD.model_dump_json().encode(), "entry") == RECORD


async def test_a_record_in_nats_has_no_keys(nats_url: str) -> None:
    """Of monitor, environment and data: every explorer may read it."""
    secret = "secret-of-the-run"
    given = {
        "monitor": {"monitor_type": "wandb", "monitor_args": {"api_key": secret}},
        "explorer": {"env_vars": {"HF_TOKEN": secret}, "environments": [{"name": "e", "address": "h:1"}]},
        "buffer": {"explorer_input": {"taskset": {"name": "sums", "path": f"/data/{secret}"}}},
    }
    config = Config.model_validate(given)
    async with await connect(nats_url, "test") as broker:
        await run_record.write(broker, "token", RECORD.model_copy(update={"config": config}))
        bucket = await Bucket.open(broker, names.RUNS_BUCKET)
        assert b"secret-of-the-run" not in (await bucket.get(names.RunNames("token").job_key)).value
        found = await run_record.read(broker, "token")
        await run_record.check(broker, "token")
    assert found is not None
    assert (found.config.explorer.environments[0].name, found.addresses) == ("e", RECORD.addresses)


async def put(url: str, value: bytes) -> None:
    async with await connect(url, "test") as broker:
        bucket = await Bucket.open(broker, names.RUNS_BUCKET)
        await bucket.update(names.RunNames(names.run_id("quickstart", "arithmetic")).job_key, lambda _: value)


@pytest.mark.parametrize(
    ("value", "code", "said"),
    [
        (b"\xff\x00 garbage", 1, "is no record of a run"),
        (json.dumps(OLD_RECORD).encode(), 2, "the run was begun with Trinity 0.2.0 or older"),
    ],
    ids=["garbage", "older"],
)
async def test_an_explorer_that_joins_says_what_it_found(
    value: bytes, code: int, said: str, nats_url: str, tmp_path: Path
) -> None:
    await put(nats_url, value)
    joining = tmp_path / "explorer.yaml"
    about: dict[str, Any] = {"project": "quickstart", "name": "arithmetic", "mode": "explore"}
    joining.write_text(yaml.safe_dump({**about, "checkpoint_root_dir": str(tmp_path / "jobs")}))
    found, text = trinity("run", str(joining), TRINITY_NATS_URL=nats_url)
    assert (found, said in text) == (code, True), text
    assert "KV entry trinity_runs/" in text


async def test_a_run_does_not_continue_what_an_older_version_began_on_its_nats(run_yaml: Path, nats_url: str) -> None:
    await put(nats_url, json.dumps(OLD_RECORD).encode())
    code, text = trinity("run", str(run_yaml), TRINITY_NATS_URL=nats_url)
    assert code == 2
    assert "0.2.0 or older" in text


async def test_a_run_does_not_train_on_the_steps_of_another_folder(run_yaml: Path, nats_url: str) -> None:
    """The folder was removed, or a colleague's run has the same name on the same NATS."""
    run = names.RunNames(names.run_id("quickstart", "arithmetic/rft"))
    async with await connect(nats_url, "test") as broker:
        await ensure_streams(broker, [StreamSpec(run.batches_stream, (run.batch(1),))])
        await broker.publish(run.batch(1), b"", message_id="1")
    for _ in range(2):
        code, text = trinity("run", str(run_yaml), TRINITY_NATS_URL=nats_url)
        assert code == 2
        assert "NATS has steps of quickstart/arithmetic/rft, and" in text and "another name by name=..." in text


def test_a_live_process_of_another_version_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/main.json").write_text(json.dumps({"pid": os.getpid(), "kind": "both"}))
    with pytest.raises(RunError, match=r"main\.json: mode: Field required; process .* another version"):
        read_records(tmp_path)
    (tmp_path / "run/main.json").write_text('{"pid": "many"}')
    assert read_records(tmp_path) == {}


@pytest.mark.parametrize("damaged", [False, True])
def test_a_live_process_of_another_version_hides_no_other_run(damaged: bool, tmp_path: Path) -> None:
    for name in ("other", "own"):
        (tmp_path / name / "run").mkdir(parents=True)
        (tmp_path / name / ".lock").touch()
        (tmp_path / name / "summary.json").write_text("{}")
    record = tmp_path / "other/run/main.json"
    if damaged:
        record.mkdir()
    else:
        record.write_text(json.dumps({"pid": os.getpid(), "kind": "both"}))
    assert jobs.live_jobs(tmp_path) == ([] if damaged else [tmp_path / "other"])
    assert sorted(jobs.known_jobs(tmp_path)) == [tmp_path / "other", tmp_path / "own"]
