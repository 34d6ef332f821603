"""A kill while an old checkpoint is removed leaves whole ones, and one at least; what is left is removed later."""

from pathlib import Path
from typing import Any

import pytest

from trinity.trainer.engine import checkpoint_store
from trinity.trainer.engine.checkpoint_store import CheckpointStore, TrainerState

pytestmark = pytest.mark.core


class Killed(BaseException):
    pass


def saved(store: CheckpointStore, step: int, rollback: int = 0) -> None:
    folder = store.begin(step)
    (folder / "actor/weights").write_text(f"{step}, {rollback}")
    store.finish(TrainerState("run", step, 0, 1, 0, rollback), 1)


@pytest.fixture
def killed_by_removing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a folder with files the process removes one, and is killed."""

    def rmtree(folder: Path, **_: Any) -> None:
        if (weights := folder / "actor/weights").exists():
            weights.unlink()
            raise Killed

    monkeypatch.setattr(checkpoint_store.shutil, "rmtree", rmtree)


def whole(store: CheckpointStore) -> list[tuple[int, str]]:
    return [(step, (store.path(step) / "actor/weights").read_text()) for step in store.steps()]


@pytest.mark.parametrize("step", [4, 5])
def test_a_kill_leaves_whole_ones(tmp_path: Path, step: int, request: pytest.FixtureRequest) -> None:
    """Step 4 is saved again after a rollback; that of step 5 takes its place."""
    store = CheckpointStore(tmp_path)
    saved(store, 4)
    request.getfixturevalue("killed_by_removing")
    with pytest.raises(Killed):
        saved(store, step, rollback=1)
    assert whole(store) == [(step, f"{step}, 1")]


def test_what_a_kill_left_is_removed_by_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    saved(store, 4)
    store.begin(5)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_store.shutil, "rmtree", lambda folder, **_: None)
        saved(store, 4, rollback=1)
    saved(store, 6)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["global_step_6"]
