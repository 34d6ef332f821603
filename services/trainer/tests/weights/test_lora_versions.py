"""The training loop with adapters beside a real sync service: publish, resume and roll back."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.programs.forked_run import ForkedService
from support.programs.trainer.releases import JudgingExplorer, Sync, Trainer
from support.programs.trainer.training import make_model
from trinity.config.schema.model import LoraConfig, ModelConfig
from trinity.trainer.model.lora import write_adapters
from trinity.trainer.model.policy import load_policy
from trinity.weights.checkpoints import has_weights

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def sync(tmp_path: Path, nats_url: str) -> Iterator[ForkedService]:
    service = ForkedService("sync", tmp_path, NATS_URL=nats_url, CLAIM_SECONDS="3", LEASE_SECONDS="5").start()
    yield service
    service.kill()


def adapters_of(trainer: Trainer, version: int) -> dict[str, torch.Tensor]:
    return load_file(trainer.versions / f"v{version}/part-00000.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def go_back(trainer: Trainer, known: Sync, version: int, number: int) -> dict[str, torch.Tensor]:
    """The adapters in the checkpoint that the trainer makes at a rollback, after step 3."""
    known.roll_back(version)
    saved = trainer.job / "global_step_3"
    state = saved / "trainer_state.json"
    trainer.until(lambda: state.exists() and json.loads(state.read_text())["rollback"] == number, "the checkpoint")
    return load_file(saved / "actor/lora_adapter/adapter_model.safetensors")


def test_adapters_are_published_resumed_and_rolled_back(sync: ForkedService, nats_url: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    trainer = Trainer(
        tmp_path / "run", model, sync.address, nats_url, steps=4, lora={"lora_rank": 2, "target_modules": ["q_proj"]},
        trainer={"save_interval": 2},
    )  # fmt: skip
    known = Sync(sync.address, trainer.run)

    def advance(step: int) -> None:
        trainer.allow(step)
        trainer.until(lambda: known.states().get(step) == "LIVE", f"version {step} is LIVE")

    with JudgingExplorer(sync.address, trainer.run):
        trainer.start()
        advance(1)
        advance(2)
        saved = trainer.job / "global_step_2/actor"
        trainer.until(saved.exists, "the checkpoint of step 2")
        trainer.kill()
        trainer.start()
        advance(3)
        assert len(trainer.events("trainer.resumed")) == 1

        manifest = known.manifest(2)
        assert manifest.lora is not None
        assert [target.name for target in manifest.lora.targets] == [
            f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)
        ]
        assert manifest.delta is None
        assert manifest.size_bytes < 4096
        assert same(load_file(saved / "lora_adapter/adapter_model.safetensors"), adapters_of(trainer, 2))
        assert not has_weights(saved / "huggingface")

        older = adapters_of(trainer, 1)
        assert same(go_back(trainer, known, 1, 1), older)  # from its files: there is no checkpoint of its step
        begun = go_back(trainer, known, 0, 2)
        assert all(value.any() == (".lora_A." in name) for name, value in begun.items())
        trainer.allow(4)
        assert trainer.wait()["error"] == ""
    assert known.states() == {0: "RETIRED", 1: "REJECTED", 2: "REJECTED", 3: "REJECTED", 4: "LIVE"}
    assert has_weights(trainer.job / "global_step_4/actor/huggingface")


def test_version_0_is_the_adapters_that_the_run_begins_with(sync: ForkedService, nats_url: str, tmp_path: Path) -> None:
    model, given = make_model(tmp_path / "model"), tmp_path / "given"
    config = ModelConfig(model_path=str(model), lora_configs=[LoraConfig(lora_rank=2, target_modules=["q_proj"])])
    older = load_policy(config, torch.float32, 64)
    torch.manual_seed(3)
    for _, parameter in older.weights():
        parameter.data.normal_(std=0.1)
    assert older.lora is not None
    write_adapters(given, older.lora, str(model), older.weights())
    begun = load_file(given / "adapter_model.safetensors")

    trainer = Trainer(
        tmp_path / "run",
        model,
        sync.address,
        nats_url,
        steps=3,
        lora={"path": str(given)},
        trainer={"save_interval": 3},
    )
    known = Sync(sync.address, trainer.run)
    with JudgingExplorer(sync.address, trainer.run) as explorer:
        trainer.start()
        trainer.until(lambda: known.states().get(0) == "LIVE", "version 0 is LIVE")
        first = known.manifest(0)
        assert (first.lora, first.base_model) == (older.lora, str(model))
        assert same(adapters_of(trainer, 0), begun)
        assert [manifest.version for manifest in explorer.candidates][:1] == [0], "an explorer has judged it"

        trainer.kill()
        files = trainer.versions / "v0/part-00000.safetensors"
        content = files.read_bytes()
        files.unlink()
        trainer.start()
        trainer.until(files.exists, "its files are written again")
        assert files.read_bytes() == content

        trainer.allow(2)
        trainer.until(lambda: known.states().get(2) == "LIVE", "version 2 is LIVE")
        assert not same(adapters_of(trainer, 2), begun)
        known.roll_back(0)
        saved = trainer.job / "global_step_2/actor/lora_adapter/adapter_model.safetensors"
        trainer.until(saved.exists, "the checkpoint at the rollback")
        assert same(load_file(saved), begun)
        trainer.allow(3)
        assert trainer.wait()["error"] == ""
    assert known.states() == {0: "RETIRED", 1: "REJECTED", 2: "REJECTED", 3: "LIVE"}
