"""Every rank knows which step has a checkpoint: before a bad step all of them save one, or none does."""

import runpy
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from support.data.vision import EXAMPLE, make_files
from support.trainer.training import BASE
from trinity.config import make_plan
from trinity.config.schema import Config
from trinity.data.vision import image_rules
from trinity.trainer.engine.checkpoints import Checkpoints, CheckpointStore, TrainerState
from trinity.trainer.process.control import Control
from trinity.trainer.process.times import StepTimes
from trinity.weights.checkpoint_manifest import ManifestWriter, verify

pytestmark = pytest.mark.core


class Exchange:
    """Of one of two ranks, without the other."""

    world_size = 2

    def __init__(self, is_first: bool) -> None:
        self.is_first = is_first

    def share(self, value: Any) -> Any:
        return value

    def barrier(self) -> None: ...


class Engine:
    zero_stage, lora = 0, None

    def save(self, folder: Path, state: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def load(self, folder: Path) -> None:
        assert folder.is_dir()

    def weights(self) -> Any:
        return iter(())


def checkpoints_of(
    folder: Path, is_first: bool, committed: list[tuple[int, int]], engine: Any = None, model: str = ""
) -> tuple[Checkpoints, Control]:
    (folder / "model").mkdir(exist_ok=True)
    config = {**BASE, "model": {**BASE["model"], "model_path": model or str(folder / "model")}}
    plan = make_plan(Config.model_validate({**config, "checkpoint_root_dir": str(folder)}))
    engine = engine or Engine()
    exchange: Any = Exchange(is_first)
    control, store = Control(), CheckpointStore(folder)

    def commit(step: int, oldest: int) -> None:
        committed.append((step, oldest))

    return Checkpoints(plan, "run", exchange, engine, control, store, StepTimes(), commit, lambda: 7), control


@pytest.mark.parametrize("is_first", [True, False])
def test_it_is_known_after_a_save(tmp_path: Path, is_first: bool) -> None:
    committed: list[tuple[int, int]] = []
    checkpoints, control = checkpoints_of(tmp_path, is_first, committed)
    checkpoints.save(3)
    checkpoints.settle()
    assert control.progress.checkpoint_step == 3
    assert committed == ([(3, 3)] if is_first else []), "rank 0 alone talks to the buffer"


@pytest.mark.parametrize("sees", [True, False])
def test_files_of_a_model_with_a_hub_name_are_in_the_checkpoint(
    sees: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be served without the hub. Of a model that reads images that needs its processor."""
    source = tmp_path / "hub/models--owner--tiny/snapshots/1"
    for name, value in (("HF_HUB_CACHE", str(tmp_path / "hub")), ("HF_HUB_OFFLINE", True)):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    example = runpy.run_path(str(EXAMPLE / "make_model.py"))
    make_files(source)
    example["make_tokenizer"]().save_pretrained(source)
    (tmp_path / "hub/models--owner--tiny/refs").mkdir()
    (tmp_path / "hub/models--owner--tiny/refs/main").write_text("1")
    engine: Any = Engine()
    config = AutoConfig.for_model("qwen2_5_vl" if sees else "qwen2")
    engine.policy = SimpleNamespace(model=SimpleNamespace(config=config))
    engine.image_rules = image_rules(str(source)) if sees else None
    checkpoints, _ = checkpoints_of(tmp_path, True, [], engine, "owner/tiny")
    checkpoints.save(3)
    checkpoints.settle()
    names = {path.name for path in (checkpoints.store.path(3) / "actor/huggingface").iterdir()}
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= names
    assert ("preprocessor_config.json" in names) == sees


@pytest.mark.parametrize("is_first", [True, False])
def test_it_is_known_after_a_restart(tmp_path: Path, is_first: bool) -> None:
    store = CheckpointStore(tmp_path)
    store.begin(3)
    store.finish(TrainerState("run", 3, 50, 2, 0, 7), None)
    checkpoints, control = checkpoints_of(tmp_path, is_first, [])
    assert checkpoints.resume() == (3, 7)
    assert (control.progress.checkpoint_step, control.progress.tokens_trained) == (3, 50)


def test_training_goes_on_while_the_checksums_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step counts as saved, so that none saves it twice, and is no checkpoint before its manifest is complete."""
    may_hash, committed = threading.Event(), list[tuple[int, int]]()
    write = ManifestWriter.write

    def write_later(manifest: ManifestWriter) -> None:
        assert may_hash.wait(60)
        write(manifest)

    monkeypatch.setattr(ManifestWriter, "write", write_later)
    checkpoints, control = checkpoints_of(tmp_path, True, committed)
    checkpoints.save(3)
    checkpoints.save_if_due(4)
    assert (control.progress.saved_step, control.progress.checkpoint_step) == (3, 0)
    assert (checkpoints.store.steps(), committed) == ([], [])
    may_hash.set()
    checkpoints.settle()
    assert (control.progress.checkpoint_step, checkpoints.store.steps(), committed) == (3, [3], [(3, 3)])
    verify(checkpoints.store.path(3))


def test_a_checkpoint_that_cannot_be_finished_ends_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(manifest: ManifestWriter) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(ManifestWriter, "write", no_room)
    checkpoints, control = checkpoints_of(tmp_path, True, [])
    checkpoints.save(3)
    with pytest.raises(OSError, match="no space left"):
        checkpoints.settle()
    assert control.progress.checkpoint_step == 0
