"""`trinity fork`: what the new job folder shares with its parent, and what is refused before anything is made."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.config import dump, load
from trinity.config.parents import parent_of
from trinity.lineage import fork as command
from trinity.reading.errors import RunError
from trinity.reading.run_record import this_version
from trinity.runtime.errors import DataLoss, InvalidInput
from trinity.weights.checkpoint_manifest import ManifestWriter, verify
from trinity.weights.checkpoints import checkpoint_folder

pytestmark = pytest.mark.core

NEWEST, KEPT = 8, (4, 6)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stopped job whose model lies in it, with a buffer that answers without NATS."""
    job = tmp_path / "jobs/p/n"
    (job / "log").mkdir(parents=True)
    (job / "monitor").mkdir()
    (job / "before/model").mkdir(parents=True)
    (job / "before/model/config.json").write_text("{}")
    values = {
        "project": "p", "name": "n", "checkpoint_root_dir": str(tmp_path / "jobs"),
        "model": {"model_path": str(job / "before/model"), "max_prompt_tokens": 8, "max_response_tokens": 8},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
        "buffer": {"batch_size": 2, "total_steps": 9, "explorer_input": {"taskset": {"name": "t", "path": "d"}}},
        "synchronizer": {"sync_offset": 1},
    }  # fmt: skip
    (job / "config.json").write_text(json.dumps(values))
    (job / "version.json").write_text(json.dumps({"version": this_version()}))
    lines = "".join(json.dumps({"step": step, "actor/loss": 1.0}) + "\n" for step in range(1, NEWEST + 1))
    (job / "monitor/trainer.jsonl").write_text(lines)
    for step in KEPT:
        make_checkpoint(job, step)
    monkeypatch.setattr(command, "ask", lambda _, stage, question: answer(question))
    return job


def make_checkpoint(job: Path, step: int) -> None:
    folder = checkpoint_folder(job, step)
    (folder / "actor/slices").mkdir(parents=True)
    (folder / "actor/slices/rank_0.safetensors").write_bytes(bytes([step]) * 1000)
    state = {"run": "parent", "step": step, "tokens_trained": 9, "world_size": 1, "zero_stage": 0, "rollback": 2}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    ManifestWriter(folder).write()
    (folder / ".full_checkpoint").touch()


def answer(question: Any) -> Any:
    import asyncio
    from types import SimpleNamespace

    class Buffer:
        async def newest_step(self) -> int:
            return NEWEST

        async def fork_parts(self, step: int, through: int) -> Any:
            for entry in range(1, step + 3):
                yield pb.BatchPart(entry=pb.LedgerEntry(step=entry)).SerializeToString()
            for ordinal in (1, 2, 3):
                yield pb.BatchPart(group=pb.BatchGroup(ordinal=ordinal)).SerializeToString()

    return asyncio.run(question(SimpleNamespace(buffer=Buffer())))


def make(job: Path, *overrides: str, at: int = 4, **options: Any) -> Path:
    assert command.fork(str(job), list(overrides), at, **options) == 0
    return max(job.parent.iterdir(), key=lambda path: path.stat().st_mtime_ns)


def test_a_fork_has_links_and_needs_its_parent_no_more(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(job, "algorithm.optimizer.lr=0.5")
    assert folder.name == "n-fork"
    assert "with 3 groups that it had sampled" in capsys.readouterr().out
    slices = "global_step_4/actor/slices/rank_0.safetensors"
    assert os.path.samefile(folder / slices, job / slices)
    config = load(folder / "fork.yaml", plugins_loaded=False)
    assert (config.name, config.algorithm.optimizer.lr, config.buffer.total_steps) == ("n-fork", 0.5, 9)
    assert config.model.model_path.startswith(str(folder))
    shutil.rmtree(job)
    verify(folder / "global_step_4")
    state = json.loads((folder / "global_step_4/trainer_state.json").read_text())
    assert (state["step"], state["rollback"]) == (4, 0)
    assert state["run"] != "parent"
    assert (Path(config.model.model_path) / "config.json").is_file()
    parent = parent_of(folder)
    assert parent is not None
    assert (parent.job, parent.step, parent.changes) == (str(job), 4, ("algorithm.optimizer.lr=0.5",))


def test_a_fork_continues_though_its_parent_began_anew(job: Path) -> None:
    config = json.loads((job / "config.json").read_text())
    (job / "config.json").write_text(json.dumps({**config, "continue_from_checkpoint": False}))
    assert load(make(job) / "fork.yaml", plugins_loaded=False).continue_from_checkpoint


@pytest.mark.parametrize("way", ["dots", "link", "moved"])
def test_models_of_the_parent_are_found_by_any_path(job: Path, tmp_path: Path, way: str) -> None:
    config = json.loads((job / "config.json").read_text())
    (tmp_path / "link").symlink_to(tmp_path / "jobs")
    paths = {"dots": job.parent / "../p/n/before/model", "link": tmp_path / "link/p/n/before/model"}
    config["model"]["model_path"] = str(paths.get(way, job / "before/model"))
    (job / "config.json").write_text(json.dumps(config))
    if way == "moved":
        (tmp_path / "elsewhere/p").mkdir(parents=True)
        job = job.rename(tmp_path / "elsewhere/p/n")
    folder = make(job)
    model = load(folder / "fork.yaml", plugins_loaded=False).model.model_path
    assert model == str(folder / "models/model_path")
    assert (Path(model) / "config.json").is_file()


def test_the_checkpoint_of_the_parent_stays_as_it_was(job: Path) -> None:
    make(job, name="other/deeper")
    verify(job / "global_step_4")
    assert json.loads((job / "global_step_4/trainer_state.json").read_text())["run"] == "parent"
    assert (job.parent / "other/deeper/fork.json").exists()


def test_defaults_of_the_parent_do_not_become_choices_of_the_fork(job: Path) -> None:
    """config.json has every key. A given gpu_memory_utilization would take the memory of a trainer on the same GPU."""
    values = dump(load(job / "config.json", plugins_loaded=False))
    (job / "config.json").write_text(json.dumps(values))
    config = load(make(job) / "fork.yaml", plugins_loaded=False)
    assert not [note for note in config.notices if "has no effect" in str(note)]
    assert "gpu_memory_utilization" not in config.explorer.rollout_model.model_fields_set
    chosen = load(make(job, "explorer.rollout_model.gpu_memory_utilization=0.5") / "fork.yaml", plugins_loaded=False)
    assert chosen.explorer.rollout_model.gpu_memory_utilization == 0.5


def test_the_replay_of_a_missing_checkpoint_is_of_its_stage(job: Path) -> None:
    (job / "rft").mkdir()
    for name in ("config.json", "monitor", "log", *(checkpoint_folder(job, step).name for step in KEPT)):
        (job / name).rename(job / "rft" / name)
    with pytest.raises(RunError, match=r"`trinity replay --job \S+ --stage rft --from-step 5 --to-step 5`"):
        make(job, at=5)


def test_names_are_found_and_given_ones_are_not_taken(job: Path) -> None:
    assert [make(job).name for _ in range(3)] == ["n-fork", "n-fork-2", "n-fork-3"]
    with pytest.raises(RunError, match=r"n-fork-2 exists; choose another name"):
        make(job, name="n-fork-2")


@pytest.mark.parametrize(
    ("at", "overrides", "options", "said"),
    [
        (5, [], {}, r"no checkpoint of this step, the run keeps 4, 6: begin at 4, or make one by `trinity replay .*"
                    r"--from-step 5 --to-step 5`"),
        (2, [], {}, r"no checkpoint of this step, the run keeps 4, 6: make one by .*--from-step 1 --to-step 2`"),
        (9, [], {}, r"has trained 8 steps; of checkpoints the run keeps 4, 6"),
        (4, ["buffer.total_steps=4"], {}, r"would end at step 4; add buffer.total_steps=5"),
        (4, ["buffer.batch_size=3"], {}, r"has 2 groups, and a fork keeps that"),
        (4, ["name=x"], {}, r"name=x: give --name"),
        (4, ["mode=bench"], {}, r"mode=bench"),
        (4, [], {"name": "../x"}, r"must be a name without empty parts"),
        (4, [], {"name": "n/deeper/x"}, r"--name n/deeper/x: .*/p/n is the job folder of another run"),
        (0, [], {}, r"give --at STEP"),
    ],
)  # fmt: skip
def test_bad_input_makes_nothing(job: Path, at: int, overrides: list[str], options: dict[str, str], said: str) -> None:
    with pytest.raises(RunError, match=said):
        make(job, *overrides, at=at, **options)
    assert [path.name for path in job.parent.iterdir()] == ["n"]


def test_the_next_fork_removes_what_a_killed_one_left(job: Path) -> None:
    left, stays = job.parent / ".a.fork-12345678", job.parent / ".n.fork-23456789"  # which another command makes
    for folder in (left, stays):
        (folder / "fork").mkdir(parents=True)
    os.utime(left, (time.time() - 25 * 3600,) * 2)
    make(job)
    assert [path for path in job.parent.iterdir() if path.name.startswith(".")] == [stays]


def test_an_identical_replay_lends_its_checkpoint(job: Path) -> None:
    replayed = job / "replay/from_5"
    make_checkpoint(replayed, 5)
    (replayed / "replay.json").write_text('{"identical": false}')
    with pytest.raises(RunError, match="no checkpoint of this step"):
        make(job, at=5)
    (replayed / "replay.json").write_text('{"identical": true}')
    assert (make(job, at=5) / "global_step_5/.full_checkpoint").exists()


def test_another_version_and_another_place_are_refused(job: Path, tmp_path: Path) -> None:
    (job / "version.json").write_text('{"version": "0.1.7"}')
    with pytest.raises(RunError, match=r"was begun with Trinity 0\.1\.7"):
        make(job)
    with pytest.raises(RunError, match="is no job folder"):
        make(tmp_path / "nothing")
    with pytest.raises(RunError, match="is no job but holds jobs"):
        make(tmp_path)


def test_a_checkpoint_that_goes_while_it_is_linked(job: Path) -> None:
    (job / "global_step_4/manifest.json").unlink()
    with pytest.raises(RunError, match="is not whole"):
        make(job)
    assert [path.name for path in job.parent.iterdir()] == ["n"]


def test_a_damaged_checkpoint_is_refused(job: Path) -> None:
    slices = job / "global_step_4/actor/slices/rank_0.safetensors"
    slices.write_bytes(bytes([5]) * 1000)
    with pytest.raises(RunError, match=rf"step 4: {slices}: has BLAKE3 "):
        make(job)
    assert [path.name for path in job.parent.iterdir()] == ["n"]
    assert (make(job, "allow_unverified_checkpoint=true") / slices.relative_to(job)).exists()


def test_slices_that_only_a_bucket_has_are_named(job: Path) -> None:
    config = json.loads((job / "config.json").read_text())
    (job / "config.json").write_text(json.dumps({**config, "trainer": {"checkpoint_storage": ["s3://bucket/p"]}}))
    (job / "global_step_4/actor/slices/rank_0.safetensors").unlink()
    said = r"has no actor/slices/rank_0\.safetensors; the run keeps such files in s3://bucket/p, below "
    with pytest.raises(RunError, match=rf"step 4: .*{said}\S+/checkpoints/global_step_4: download them"):
        make(job)


def test_a_damaged_record_of_the_parent_is_no_missing_one(job: Path) -> None:
    folder = make(job)
    (folder / "fork.json").write_text('{"step": "four"}')
    with pytest.raises(DataLoss, match="does not name the parent"):
        parent_of(folder)
    (folder / "global_step_4/actor/slices/rank_0.safetensors").unlink()
    with pytest.raises(InvalidInput):
        verify(folder / "global_step_4")
