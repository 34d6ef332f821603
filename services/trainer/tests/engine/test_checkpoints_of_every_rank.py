"""Every rank knows which step has a checkpoint: before a bad step all of them save one, or none does."""

import json
import runpy
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from support.fakes.data.vision import EXAMPLE, make_files
from support.programs.trainer.training import BASE
from trinity.config import make_plan
from trinity.config.schema import Config
from trinity.data.vision import image_rules
from trinity.runtime.errors import InvalidInput
from trinity.trainer.engine.checkpoint_store import CheckpointStore, TrainerState
from trinity.trainer.engine.checkpoints import Checkpoints
from trinity.trainer.process.control import Control
from trinity.trainer.process.times import StepTimes
from trinity.weights.checkpoint_manifest import ManifestWriter, verify

pytestmark = pytest.mark.core


TOKENIZER = """
from transformers import PreTrainedTokenizer

class OwnTokenizer(PreTrainedTokenizer):
    vocab_size = 256

    def get_vocab(self):
        return {chr(i): i for i in range(256)}

    def _convert_token_to_id(self, token):
        return ord(token[0])

    def save_vocabulary(self, folder, filename_prefix=None):
        return ()
"""


class Exchange:
    """Of one of two ranks, without the other."""

    world_size = 2

    def __init__(self, is_first: bool) -> None:
        self.is_first = is_first
        self.rank = 0 if is_first else 1
        self.heard: list[Any] = []  # rank 0's values, in order; then this rank's own

    def share(self, value: Any) -> Any:
        return self.heard.pop(0) if self.heard else value

    def collect(self, value: Any) -> list[Any]:
        return [value]

    def collect_when_done(self, work: Callable[[], Any]) -> list[Any]:
        return [work()]

    def barrier(self) -> None: ...


class Engine:
    zero_stage, lora, image_rules, policy = 0, None, None, SimpleNamespace(model=None)

    def __init__(self) -> None:
        self.reserved = 0

    def reserve(self) -> list[Callable[[], None]]:
        def allocate() -> None:
            time.sleep(0.3)  # a save that did not wait would be over before
            self.reserved += 1

        return [allocate]

    def snapshot(self, folder: Path, state: dict[str, Any]) -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        return list

    def load(self, folder: Path) -> None:
        assert folder.is_dir()

    weights = SimpleNamespace(read=lambda: iter(()))


def checkpoints_of(
    folder: Path,
    is_first: bool,
    committed: list[tuple[int, int]],
    engine: Any = None,
    model: str = "",
    interval: int = 0,
    **changes: Any,
) -> tuple[Checkpoints, Control]:
    (folder / "model").mkdir(exist_ok=True)
    config = {**BASE, "model": {**BASE["model"], "model_path": model or str(folder / "model"), **changes}}
    config["trainer"] = {**BASE["trainer"], "save_interval": interval}
    plan = make_plan(Config.model_validate({**config, "checkpoint_root_dir": str(folder)}))
    engine = engine or Engine()
    exchange: Any = Exchange(is_first)
    control, store = Control(), CheckpointStore(folder)

    def commit(step: int, oldest: int) -> None:
        committed.append((step, oldest))

    checkpoints = Checkpoints(plan, "run", exchange, exchange, engine, control, store, StepTimes(), commit, lambda: 7)
    return checkpoints, control


@pytest.mark.parametrize("is_first", [True, False])
def test_it_is_known_after_a_save(tmp_path: Path, is_first: bool) -> None:
    committed: list[tuple[int, int]] = []
    checkpoints, control = checkpoints_of(tmp_path, is_first, committed)
    checkpoints.save(3)
    checkpoints.settle()
    assert control.progress.checkpoint_step == 3
    assert committed == ([(3, 3)] if is_first else []), "rank 0 alone talks to the buffer"


@pytest.mark.parametrize(("interval", "reserved"), [(3, 1), (0, 0)])
def test_memory_for_copies_is_reserved_once_and_before_the_first_save(
    tmp_path: Path, interval: int, reserved: int
) -> None:
    engine = Engine()
    checkpoints, control = checkpoints_of(tmp_path, True, [], engine, interval=interval)
    control.update(last_step=9)
    for step in (1, 2):
        checkpoints.save_if_due(step)
    checkpoints.save(3)
    assert engine.reserved == reserved
    checkpoints.settle()


def hub_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the hub's cache has owner/tiny, without weights."""
    commit = "0" * 40
    source = folder / "hub/models--owner--tiny/snapshots" / commit
    for name, value in (("HF_HUB_CACHE", str(folder / "hub")), ("HF_HUB_OFFLINE", True)):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    example = runpy.run_path(str(EXAMPLE / "make_model.py"))
    make_files(source)
    example["make_tokenizer"]().save_pretrained(source)
    (folder / "hub/models--owner--tiny/refs").mkdir()
    (folder / "hub/models--owner--tiny/refs/main").write_text(commit)
    return source


def engine_of(model: str) -> Any:
    engine: Any = Engine()
    ends = GenerationConfig(eos_token_id=[1, 7], temperature=0.5)  # a temperature without sampling, as hubs have it
    engine.policy = SimpleNamespace(model=SimpleNamespace(config=AutoConfig.for_model(model), generation_config=ends))
    return engine


@pytest.mark.parametrize("sees", [True, False])
def test_files_of_a_model_with_a_hub_name_are_in_the_checkpoint(
    sees: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be served without the hub. Of a model that reads images that needs its processor."""
    source = hub_model(tmp_path, monkeypatch)
    engine = engine_of("qwen2_5_vl" if sees else "qwen2")
    engine.image_rules = image_rules(str(source)) if sees else None
    checkpoints, _ = checkpoints_of(tmp_path, True, [], engine, "owner/tiny")
    checkpoints.save(3)
    checkpoints.settle()
    folder = checkpoints.store.path(3) / "actor/huggingface"
    names = {path.name for path in folder.iterdir()}
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [1, 7]
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= names
    assert ("preprocessor_config.json" in names) == sees


def test_the_template_of_the_yaml_is_the_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = hub_model(tmp_path, monkeypatch)
    (tmp_path / "own.jinja").write_text("from a file, {{ messages[0].content }}")
    path = str(tmp_path / "own.jinja")
    given = {str(source): {"custom_chat_template": "own"}, "owner/tiny": {"chat_template_path": path}}
    for model, keys in given.items():
        (tmp_path / str(len(model))).mkdir()
        checkpoints, _ = checkpoints_of(tmp_path / str(len(model)), True, [], engine_of("qwen2"), model, **keys)
        checkpoints.save(3)
        checkpoints.settle()
        saved = AutoTokenizer.from_pretrained(checkpoints.store.path(3) / "actor/huggingface")
        assert saved.chat_template == keys.get("custom_chat_template", "from a file, {{ messages[0].content }}")


def test_a_hub_tokenizer_of_remote_code_is_refused_at_the_start_or_in_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not refused after the last step, which a run without a save_interval saves alone."""
    source = hub_model(tmp_path, monkeypatch)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    (source / "tok.py").write_text(TOKENIZER)
    (source / "tokenizer.json").unlink()  # transformers would read it without the code
    config = json.loads((source / "tokenizer_config.json").read_text())
    remote = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["tok.OwnTokenizer", None]}}
    (source / "tokenizer_config.json").write_text(json.dumps(config | remote))
    with pytest.raises(InvalidInput, match=r"model.model_path: 'owner/tiny': its tokenizer"):
        checkpoints_of(tmp_path, True, [], engine_of("qwen2"), "owner/tiny")
    checkpoints, _ = checkpoints_of(tmp_path, True, [], engine_of("qwen2"), "owner/tiny", trust_remote_code=True)
    checkpoints.save(3)
    checkpoints.settle()
    folder = checkpoints.store.path(3) / "actor/huggingface"
    assert type(AutoTokenizer.from_pretrained(folder, trust_remote_code=True)).__name__ == "OwnTokenizer"


@pytest.mark.parametrize("is_first", [True, False])
def test_it_is_known_after_a_restart(tmp_path: Path, is_first: bool) -> None:
    store = CheckpointStore(tmp_path)
    store.begin(3)
    state = TrainerState("run", 3, 50, 2, 0, 7)
    store.finish(state, None)
    checkpoints, control = checkpoints_of(tmp_path, is_first, [])
    if not is_first:
        (tmp_path / ".seen").touch()
        checkpoints.exchange.heard = [".seen", asdict(state)]  # type: ignore[attr-defined]
    assert checkpoints.resume() == (3, 7)
    assert (control.progress.checkpoint_step, control.progress.tokens_trained) == (3, 50)


@pytest.mark.parametrize(
    ("saved", "now", "problem"),
    [
        ((0, 2), (0, 1), ""),
        ((1, 2), (2, 2), ""),
        ((2, 2), (1, 2), ""),
        ((0, 2), (1, 2), "trainer.deepspeed.zero_stage: is 1, but the checkpoint of step 3 is of ZeRO 0; set it to 0"),
        ((2, 2), (0, 2), "trainer.deepspeed.zero_stage: is 0, but the checkpoint of step 3 is of ZeRO 2; set it to 2"),
        ((2, 2), (3, 2), "trainer.deepspeed.zero_stage: is 3, but the checkpoint of step 3 is of ZeRO 2; set it to 2"),
        ((2, 1), (2, 2), r"trainer.num_ranks: is 2, but 1 rank\(s\) saved the checkpoint of step 3; set it to 1"),
        ((3, 4), (3, 2), r"trainer.num_ranks: is 2, but 4 rank\(s\) saved the checkpoint of step 3; set it to 4"),
    ],
)
def test_shards_of_other_ranks_or_another_zero_stage_are_refused_for_good(
    saved: tuple[int, int], now: tuple[int, int], problem: str, tmp_path: Path
) -> None:
    """DeepSpeed's own, of former versions, which would end each start by an error of its own. Slices fit any ranks."""
    engine, exchange, store = Engine(), Exchange(True), CheckpointStore(tmp_path)
    engine.zero_stage, exchange.world_size = now
    (store.begin(3) / "actor").mkdir(exist_ok=True)
    store.finish(TrainerState("run", 3, 50, saved[1], saved[0]), None)
    with pytest.raises(InvalidInput, match=problem) if problem else nullcontext() as found:
        store.load(3, engine, exchange, unverified=True)  # type: ignore[arg-type]
    assert found is None or found.value.for_good
    (store.path(3) / "actor/slices").mkdir()
    store.load(3, engine, exchange, unverified=True)  # type: ignore[arg-type]


def test_ranks_that_do_not_see_the_folder_of_rank_0_need_a_bucket(tmp_path: Path) -> None:
    checkpoints, _ = checkpoints_of(tmp_path, False, [])
    checkpoints.exchange.heard = [".of_another_machine"]  # type: ignore[attr-defined]
    with pytest.raises(InvalidInput, match=r"checkpoint_storage: has no bucket, and ranks .0. do not see .* add s3:"):
        checkpoints.resume()


def test_training_goes_on_while_the_checksums_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step counts as saved, so that none saves it twice, and is no checkpoint before its manifest is complete."""
    may_hash, committed = threading.Event(), list[tuple[int, int]]()
    write = ManifestWriter.write

    def write_later(manifest: ManifestWriter, others: Any) -> None:
        assert may_hash.wait(60)
        write(manifest, others)

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
    def no_room(manifest: ManifestWriter, others: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(ManifestWriter, "write", no_room)
    checkpoints, control = checkpoints_of(tmp_path, True, [])
    checkpoints.save(3)
    with pytest.raises(OSError, match="no space left"):
        checkpoints.settle()
    assert control.progress.checkpoint_step == 0
