"""A rank without a usable GPU, or with one that is too small, reports a clear error."""

import os

import pytest
import torch

from trinity.config import Plan, make_plan
from trinity.config.load import parse
from trinity.runtime import devices as probes
from trinity.runtime.devices import Gpu, TorchBuild
from trinity.runtime.errors import InvalidInput, Unavailable
from trinity.trainer.process import devices
from trinity.trainer.process.ranks import Ranks

pytestmark = pytest.mark.core

YAML = """
mode: train
model: {{model_path: a/{name}, max_model_len: 64}}
algorithm: {{algorithm_type: sft}}
buffer: {{train_batch_size: 8, trainer_input: {{experience_buffer: {{path: d.jsonl}}}}}}
"""
ONE = Ranks(0, 1, 0)


def plan_of(name: str) -> Plan:
    return make_plan(parse(YAML.format(name=name)))


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(probes, "detect_gpus", list)
    return monkeypatch


def test_without_gpus_the_cpu_is_taken_unless_gpus_were_asked_for(no_cuda: pytest.MonkeyPatch) -> None:
    assert devices.choose("auto", ONE) == devices.choose("cpu", ONE) == "cpu"
    with pytest.raises(InvalidInput, match="TRINITY_TRAINER_DEVICE: is cuda, but this machine shows no GPU"):
        devices.choose("cuda", ONE)


def test_a_torch_that_cannot_use_the_gpus_here_is_an_error_and_no_slow_run(no_cuda: pytest.MonkeyPatch) -> None:
    no_cuda.setattr(probes, "detect_gpus", lambda: [Gpu("0", "NVIDIA Some", 80.0, 80.0, "550.54")])
    no_cuda.setattr(probes, "torch_build", lambda: TorchBuild("2.11.0+cu130", "13.0"))
    with pytest.raises(InvalidInput, match="needs driver 580 or newer, and this machine has 1 GPU"):
        devices.choose("auto", ONE)


def test_a_rank_without_a_gpu_of_its_own_is_refused() -> None:
    devices.check_rank(Ranks(1, 2, 1), 2, nccl=True)
    with pytest.raises(InvalidInput, match=r"trainer.num_ranks: rank 2 .* which shows 2 GPU.*at most 2 ranks fit"):
        devices.check_rank(Ranks(2, 3, 2), 2, nccl=True)
    with pytest.raises(InvalidInput, match=r"built without NCCL.*TRINITY_TRAINER_DEVICE=cpu"):
        devices.check_rank(ONE, 1, nccl=False)


def test_states_that_cannot_fit_name_the_next_best_choice() -> None:
    card = Gpu("0", "NVIDIA Some", 80.0, 1.0, "")
    refused = devices.no_room(plan_of("model-7B"), ONE, card, 500.0, RuntimeError("tried"))
    assert isinstance(refused, InvalidInput)
    assert "by estimate 117.3 GiB on each of 1 rank(s) under ZeRO 2; with trainer.deepspeed.offload_optimizer" in str(
        refused
    )


def test_states_that_could_fit_may_be_tried_again() -> None:
    card = Gpu("0", "NVIDIA Some", 80.0, 1.0, "")
    for name in ("model-1B", "model"):
        refused = devices.no_room(plan_of(name), ONE, card, 500.0, RuntimeError("tried"))
        assert isinstance(refused, Unavailable)
        assert not refused.for_good


def test_a_reproducible_rank_takes_deterministic_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # and back afterwards
    monkeypatch.setattr("torch.utils.deterministic.fill_uninitialized_memory", True)
    try:
        devices.only_deterministic_kernels()
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
