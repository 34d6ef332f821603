"""Checkpoints on S3: complete or absent, resumed by a machine with an empty disk and other ranks."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.programs.trainer.engine_actions import run_module
from support.programs.trainer.training import BASE, make_model
from support.servers.s3 import S3Server
from trinity.runtime.errors import InvalidInput, Unavailable
from trinity.trainer.engine.checkpoint_store import CheckpointStore, TrainerState
from trinity.weights.checkpoint_buckets import CheckpointBucket
from trinity.weights.checkpoint_manifest import verify
from trinity.weights.stores.s3 import Bucket

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]
ATTEMPT = "a" * 32


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3")).start()
    yield server
    server.kill()


@pytest.fixture
def url(s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://checkpoints/{tmp_path.name.replace('[', '-').replace(']', '')}"


class Rank:
    """One of several ranks, without the others."""

    world_size, is_first = 1, True

    def share(self, value: Any) -> Any:
        return value

    def collect(self, value: Any) -> list[Any]:
        return [value]

    def collect_when_done(self, work: Callable[[], Any]) -> list[Any]:
        return [work()]


class Engine:
    zero_stage = 3
    loaded: Path | None = None

    def load(self, folder: Path) -> None:
        assert all(path.is_file() for path in (folder / "slices/a", folder / "slices/b"))
        self.loaded = folder


def save(store: CheckpointStore, step: int, *, content: bytes = b"x" * 1000, keep: int | None = None) -> int:
    """What two ranks do, the second of which has a folder of its own."""
    own = CheckpointStore(store.job_dir.with_name("other_machine"), store.buckets)
    parts = []
    for place, name, seen in ((store, "a", True), (own, "b", False)):
        place.begin(step)
        path = place.temporary(step) / "actor/slices" / name
        path.parent.mkdir()
        path.write_bytes(content + name.encode())
        parts.append(place.put(step, ATTEMPT + str(len(content)), [path], seen))
        assert path.exists() == seen
    return store.finish(TrainerState("run", step, 10 * step, 2, 3), keep, parts, ATTEMPT + str(len(content)))


def files_of(url: str) -> set[str]:
    root = url.removeprefix("s3://checkpoints/")
    return set(Bucket("checkpoints", root).names("run/checkpoints"))


def test_a_machine_with_an_empty_disk_resumes(url: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "job", [CheckpointBucket(url, "run")], in_folder=False)
    assert [save(store, step, keep=2) for step in (2, 4, 6)] == [2, 2, 4]
    assert store.buckets[0].steps() == [4, 6]
    assert not list((tmp_path / "job").rglob("slices/*")), "they are only in the bucket"
    assert not any("global_step_2/" in name for name in files_of(url))
    for job in ("job", "new_machine"):
        store = CheckpointStore(tmp_path / job, [CheckpointBucket(url, "run")])
        state, engine = store.newest(), Engine()
        assert state == TrainerState("run", 6, 60, 2, 3)
        store.load(6, engine, Rank(), unverified=False)  # type: ignore[arg-type]
        assert engine.loaded == store.path(6) / "actor"
        verify(store.path(6))


def test_a_bucket_that_is_made_by_the_first_object_has_no_checkpoints(url: str, tmp_path: Path) -> None:
    bucket = CheckpointBucket(url.replace("s3://checkpoints", "s3://not-made-yet"), "run")
    store = CheckpointStore(tmp_path / "job", [bucket])
    assert store.newest() is None
    save(store, 2)
    assert bucket.steps() == [2]


def test_what_was_not_finished_is_no_checkpoint_and_goes(url: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "job", [CheckpointBucket(url, "run")])
    save(store, 2)
    path = store.begin(3) / "actor/slices/a"
    path.parent.mkdir()
    path.write_bytes(b"of a crash")
    store.put(3, ATTEMPT, [path], True)
    again = CheckpointStore(tmp_path / "new", [CheckpointBucket(url, "run")])
    newest = again.newest()
    assert newest is not None and newest.step == 2
    assert any("global_step_3/" in name for name in files_of(url))
    save(again, 4)
    assert again.buckets[0].steps() == [2, 4]
    assert not any("global_step_3/" in name for name in files_of(url))


def test_a_step_that_is_saved_again_replaces_the_former(url: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "job", [CheckpointBucket(url, "run")])
    save(store, 2)
    save(store, 2, content=b"y" * 2000)
    assert sum(name.endswith("slices/a") for name in files_of(url)) == 1
    new = CheckpointStore(tmp_path / "new", [CheckpointBucket(url, "run")])
    new.bring(2)
    assert (new.path(2) / "actor/slices/b").read_bytes() == b"y" * 2000 + b"b"
    # A machine that has the former one takes the one of rank 0.
    old = CheckpointStore(tmp_path / "old", [CheckpointBucket(url, "run")])
    shutil.copytree(new.path(2), old.path(2))
    (old.path(2) / "manifest.json").write_text('{"files": {}}')
    heard: list[Any] = [[], ".not_here", new._content(2)]
    values: list[Any] = [True, []]  # of rank 0

    def collect(value: Any) -> list[Any]:
        return [values.pop(0), value]

    rank = SimpleNamespace(
        is_first=False,
        world_size=2,
        share=lambda _: heard.pop(0),
        collect=collect,
        collect_when_done=lambda work: collect(work()),
    )
    engine = Engine()
    old.load(2, engine, rank, unverified=False)  # type: ignore[arg-type]
    assert old._content(2) == new._content(2)
    assert engine.loaded is not None


def test_damaged_and_foreign_objects_are_refused(url: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "job", [CheckpointBucket(url, "run")])
    save(store, 2)
    bucket = Bucket("checkpoints", url.removeprefix("s3://checkpoints/"))
    place = "run/checkpoints/global_step_2"
    bucket.write(f"{place}/{ATTEMPT}1000/actor/slices/b", b"z" * 1001)
    new, engine = CheckpointStore(tmp_path / "new", [CheckpointBucket(url, "run")]), Engine()
    with pytest.raises(InvalidInput, match=r"actor/slices/b: has .*, manifest.json says"):
        new.load(2, engine, Rank(), unverified=False)  # type: ignore[arg-type]
    assert engine.loaded is None
    for name in ("../../evil", "/evil", ""):
        content = {"attempt": ATTEMPT + "1000", "files": {name: {"size": 1, "sha256": ""}}}
        bucket.write(f"{place}/manifest.json", json.dumps(content).encode())
        with pytest.raises(InvalidInput, match=r"manifest.json: is no manifest"):
            CheckpointStore(tmp_path / "evil", [CheckpointBucket(url, "run")]).bring(2)
    assert not (tmp_path / "evil/global_step_2").exists()


def test_a_bucket_that_does_not_answer_stops_only_those_without_a_folder(
    url: str, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise Unavailable("s3 does not answer")

    monkeypatch.setattr(Bucket, "upload", refuse)
    store = CheckpointStore(tmp_path / "job", [CheckpointBucket(url, "run")])
    folder = store.begin(2)
    (folder / "actor/slices").mkdir()
    (folder / "actor/slices/a").write_bytes(b"a")
    part = store.put(2, ATTEMPT, [folder / "actor/slices/a"], True)
    assert part.failed == [store.buckets[0].where]
    monkeypatch.undo()
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    store.finish(TrainerState("run", 2, 20, 1, 3), None, [part], ATTEMPT)
    verify(store.path(2))
    assert store.buckets[0].steps() == [], "it has not all files of all ranks"
    monkeypatch.setattr(Bucket, "upload", refuse)
    only = CheckpointStore(tmp_path / "only", [CheckpointBucket(url, "run")], in_folder=False)
    (only.begin(2) / "actor/slices").mkdir()
    path = only.temporary(2) / "actor/slices/a"
    path.write_bytes(b"a")
    with pytest.raises(Unavailable):
        only.put(2, ATTEMPT, [path], True)
    assert only.steps() == []


def run_apart(folder: Path, model: Path, url: str, *, ranks: int, zero: int, steps: int) -> tuple[list[Any], Any]:
    """What each rank found, and weights and moments of the whole model."""
    folder.mkdir()
    config = json.loads(json.dumps(BASE))
    config["model"]["model_path"] = str(model)
    config["trainer"] |= {"deepspeed": {"zero_stage": zero, "dtype": "float32"}, "checkpoint_storage": ["folder", url]}
    config["trainer"] |= {"save_hf_checkpoint": "never"}
    (folder / "job.json").write_text(json.dumps({"config": config, "folder": str(folder), "steps": steps}))
    run_module("support.programs.trainer.apart_ranks", folder / "job.json", ranks, 250)
    found = [json.loads((folder / f"found{rank}.json").read_text()) for rank in range(ranks)]
    return found, dict(np.load(folder / "state.npz"))


@pytest.mark.slow
def test_machines_that_share_no_folder_save_and_others_resume(url: str, tmp_path: Path) -> None:
    """Two machines train and go; one of three resumes what each of the two wrote. The step after is not in it."""
    model = make_model(tmp_path / "model")
    found, before = run_apart(tmp_path / "two", model, url, ranks=2, zero=3, steps=2)
    assert [one["apart"] for one in found] == [[1], [1]]
    assert found[0]["steps"] == [2] and not found[1]["slices"], "the other machine keeps none"
    assert all(name.startswith(("rank_00000", "slices")) for name in found[0]["slices"])
    found, after = run_apart(tmp_path / "three", model, url, ranks=3, zero=2, steps=0)
    assert [one["begin"] for one in found] == [2, 2, 2]
    assert [one["apart"] for one in found] == [[1, 2]] * 3
    assert len({len(one["slices"]) for one in found}) == 1, "each machine fetched all"
    assert before.keys() == after.keys()
    assert all(value.tobytes() == after[name].tobytes() for name, value in before.items())
