"""A folder of tenants' adapters keeps its base model, and a lack of memory names what a user of tinker can change."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from trinity.runtime.errors import InvalidInput, Unavailable
from trinity.tinker.commands.log import Command, Kind, canonical
from trinity.tinker.commands.wire import Datum, Forward, write_forward
from trinity.tinker.executor import service
from trinity.tinker.executor.executor import Executor
from trinity.tinker.executor.model import SharedModel
from trinity.tinker.executor.service import TenantsService
from trinity.tinker.executor.settings import TenantsSettings
from trinity.tinker.executor.states import States

pytestmark = pytest.mark.core


def _settings(model: Path, folder: Path, dtype: Any = "float32") -> TenantsSettings:
    return TenantsSettings(run="r", model_path=str(model), folder=folder, dtype=dtype, device="cpu")


def test_another_base_model_is_refused(repository: Path, quickstart_model: Path, tmp_path: Path) -> None:
    making = runpy.run_path(str(repository / "examples/quickstart/make_model.py"))
    tokenizer = making["make_tokenizer"]()
    other = tmp_path / "other"  # the same shapes, other values
    making["make_model"](tokenizer, 1, 128, 4).save_pretrained(other)
    tokenizer.save_pretrained(other)
    folder = tmp_path / "tenants"
    for dtype in ("float32", "bfloat16", "float32"):
        TenantsService(_settings(quickstart_model, folder, dtype))._load()
    with pytest.raises(InvalidInput, match=r"model_path: is .*other, .* are of another base model: .*give that one"):
        TenantsService(_settings(other, folder))._load()


def _out_of_memory(*given: Any) -> None:
    raise torch.OutOfMemoryError("tried to allocate 1 GiB")


def test_a_base_that_does_not_fit_names_keys_of_the_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "SharedModel", _out_of_memory)
    with pytest.raises(Unavailable, match=r"model_path: is m, which does not fit: .*; lower sampler_gpu_gib, or"):
        TenantsService(_settings(Path("m"), tmp_path))._load()


def test_a_pass_without_room_names_keys_of_the_yaml(
    quickstart_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SharedModel(str(quickstart_model), torch.float32, torch.device("cpu"), 64)
    executor = Executor(model, States(tmp_path))
    lora = {"lora_config": {"rank": 2, "seed": 0, "train_attn": True, "train_mlp": True}}
    executor.execute(Command(Kind.CREATE_MODEL, "t", "m", 0, canonical(lora), 0.0, 1))
    monkeypatch.setattr(model, "_logprobs", _out_of_memory)
    one = torch.ones(3).numpy()
    data = (Datum(one.astype(int), {"target_tokens": one.astype(int), "weights": one}),)
    body = write_forward(Forward("m", 1, data, "cross_entropy", {}, True))
    result = executor.execute(Command(Kind.FORWARD_BACKWARD, "t", "m", 1, body, 0.0, 2))
    assert result is not None
    told = json.loads(result.body)["error"]
    assert told.endswith("1 GiB; give shorter sequences, or lower micro_tokens or sampler_gpu_gib in the server's YAML")
