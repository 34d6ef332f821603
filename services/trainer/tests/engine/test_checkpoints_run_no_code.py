"""A replaced checkpoint is refused before it is loaded, and what is loaded runs no code of the file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.fakes.evil import Evil
from trinity.runtime.errors import InvalidInput
from trinity.trainer.engine.checkpoint_store import CheckpointStore, TrainerState
from trinity.trainer.engine.deepspeed import import_deepspeed, load_state
from trinity.weights.checkpoints import COMPLETE

pytestmark = pytest.mark.core

SHARD = "actor/slices/rank_00000_00000.safetensors"


def test_deepspeeds_own_classes_are_read(tmp_path: Path) -> None:
    import_deepspeed(torch.device("cpu"))
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    scaler = DynamicLossScaler(2.0**16, 1000, 1.0, 1, False)
    state = {
        "zero": ZeroStageEnum.weights, "loss": LossScaler(3), "dynamic": scaler, "state": {"step": 7},
        "address": fragment_address(numel=3, start=1), "tensor": torch.arange(3),
    }  # fmt: skip
    torch.save(state, tmp_path / "state.pt")
    found = load_state(str(tmp_path / "state.pt"))
    assert found["zero"] is ZeroStageEnum.weights
    assert found["loss"].loss_scale == 3
    assert vars(found["dynamic"]) == vars(scaler)
    assert (found["address"], found["state"]) == (state["address"], {"step": 7})
    assert torch.equal(found["tensor"], torch.arange(3))


@pytest.mark.parametrize("new_format", [True, False])
def test_a_file_with_code_is_refused_and_the_code_not_run(new_format: bool, tmp_path: Path) -> None:
    import_deepspeed(torch.device("cpu"))
    path, made = tmp_path / "state.pt", tmp_path / "made"
    torch.save({"module": {}, "more": Evil(made)}, path, _use_new_zipfile_serialization=new_format)
    with pytest.raises(InvalidInput, match=r"state.pt: asks for (posix|nt).system, which no checkpoint needs"):
        load_state(str(path))
    assert not made.exists()
    torch.load(path, weights_only=False)
    assert made.exists(), "the file's code does run where it is unpickled"


class Attribute:
    """Pickled as what `getattr` finds."""

    def __init__(self, owner: object, name: str) -> None:
        self.found = owner, name

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return getattr, self.found


def test_members_of_enums_are_read_as_the_first_pythons_3_11_write_them(tmp_path: Path) -> None:
    import_deepspeed(torch.device("cpu"))
    from deepspeed.runtime.zero.config import ZeroStageEnum

    torch.save({"zero": Attribute(ZeroStageEnum, "gradients")}, tmp_path / "state.pt")
    assert load_state(str(tmp_path / "state.pt"))["zero"] is ZeroStageEnum.gradients


@pytest.mark.parametrize("name", ["__init__", "mro", "__class__", "_missing_", "no_member"])
def test_getattr_gives_nothing_else(name: str, tmp_path: Path) -> None:
    import_deepspeed(torch.device("cpu"))
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    for owner in (ZeroStageEnum, LossScaler):
        torch.save({"other": Attribute(owner, name)}, tmp_path / "state.pt")
        with pytest.raises(InvalidInput, match=r"asks for getattr"):
            load_state(str(tmp_path / "state.pt"))


class Engine:
    zero_stage = 2
    loaded: Path | None = None

    def load(self, folder: Path) -> None:
        self.loaded = folder


class Exchange:
    """Of rank 0, or of a rank that hears what rank 0 found."""

    world_size = 1

    def __init__(self, heard: list[str] | None = None) -> None:
        self.is_first = heard is None
        self._heard = heard

    rank = 0

    def collect(self, value: Any) -> list[Any]:
        return [value]

    def collect_when_done(self, work: Callable[[], Any]) -> list[Any]:
        return [work()]

    def share(self, value: Any) -> Any:
        return value if self._heard is None else self._heard


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path)
    folder = store.begin(3)
    for name in (SHARD, "actor/huggingface/config.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"as saved")
    store.finish(TrainerState("run", 3, 50, 1, 2), None)
    return store


def load(store: CheckpointStore, exchange: Exchange | None = None, *, unverified: bool = False) -> Path | None:
    engine = Engine()
    store.load(3, engine, exchange or Exchange(), unverified=unverified)  # type: ignore[arg-type]
    return engine.loaded


def test_every_file_is_in_the_manifest_of_a_complete_checkpoint(store: CheckpointStore) -> None:
    listed = json.loads((store.path(3) / "manifest.json").read_text())["files"]
    assert set(listed) == {SHARD, "actor/huggingface/config.json", "trainer_state.json"}
    assert (store.path(3) / COMPLETE).exists()
    assert load(store) == store.path(3) / "actor"


@pytest.mark.parametrize("name", [SHARD, "trainer_state.json", "manifest.json", "actor/deepspeed/more.pt"])
def test_a_replaced_file_is_refused_on_every_rank_and_taken_by_intention(name: str, store: CheckpointStore) -> None:
    (store.path(3) / name).parent.mkdir(exist_ok=True)
    (store.path(3) / name).write_bytes(b"replaced")
    engine = Engine()
    with pytest.raises(InvalidInput, match=name) as caught:
        store.load(3, engine, Exchange(), unverified=False)  # type: ignore[arg-type]
    assert engine.loaded is None
    said = [caught.value.field, str(caught.value).removeprefix(f"{caught.value.field}: ")]
    with pytest.raises(InvalidInput) as elsewhere:
        store.load(3, engine, Exchange(said), unverified=False)  # type: ignore[arg-type]
    assert str(elsewhere.value) == str(caught.value)
    assert engine.loaded is None
    assert load(store, unverified=True) == store.path(3) / "actor"


def test_what_the_trainer_does_not_load_may_change(store: CheckpointStore) -> None:
    (store.path(3) / "actor/huggingface/model.safetensors").write_bytes(b"converted later")
    assert load(store) == store.path(3) / "actor"
