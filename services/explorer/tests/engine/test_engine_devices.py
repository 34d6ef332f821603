"""Engines report GPUs that are too few, in use, or unusable by torch before vLLM starts."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from trinity.explorer.engine import devices
from trinity.explorer.types import EngineFailed, EngineOptions
from trinity.runtime.devices import Gpu
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core


def card(index: int, free: float) -> Gpu:
    return Gpu(str(index), "NVIDIA Some", 100.0, free, "580.65")


def options(parallel: int = 1, part: float = 0.9) -> EngineOptions:
    return EngineOptions("m", "cuda", 64, tensor_parallel_size=parallel, gpu_memory_utilization=part)


def test_memory_that_other_processes_hold_is_reported_with_what_is_left() -> None:
    devices.check_cards(options(2), [card(0, 95), card(1, 91)], "0,1", 0.9)
    with pytest.raises(EngineFailed, match=r"90.0 GiB of GPU 1 .* 71.5 GiB are free.*set it to 0.71 at most"):
        devices.check_cards(options(2), [card(0, 95), card(1, 71.5), card(2, 1)], "0,1,2", 0.9)
    tenants = replace(options(), memory_key="sampler_gpu_gib", gpu_memory_gib=80.0)
    with pytest.raises(EngineFailed, match=r"^sampler_gpu_gib: is 80: .* 71.5 GiB are free.*set it to 71.5 at most"):
        devices.check_cards(tenants, [card(1, 71.5)], None, 0.8)
    all_of_it = replace(tenants, gpu_memory_gib=0.0)
    with pytest.raises(EngineFailed, match=r"^sampler_gpu_gib: is 0, which is 0.9 of a GPU: .* what else runs there$"):
        devices.check_cards(all_of_it, [card(1, 0.04)], None, 0.9)
    assert not EngineFailed.for_good, "a process that is ending gives its memory back"


def test_fewer_gpus_than_an_engine_takes_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"tensor_parallel_size: is 4; there are 2 GPU\(s\) \(of '0,1'\)"):
        devices.check_cards(options(4), [card(0, 95), card(1, 95)], "0,1", 0.9)


def test_what_cannot_be_seen_is_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    devices.check_cards(options(), [], "MIG-1", 0.9)
    asked: list[object] = []
    monkeypatch.setattr(devices, "detect_gpus", lambda *given: asked.append(given) or [])
    assert devices.room_of(EngineOptions("m", "cpu", 64), None) == {}
    assert asked == []
    assert devices.room_of(options(), "3") == {"gpu_memory_utilization": 0.9}
    assert devices.room_of(options(), None) == {"gpu_memory_utilization": 0.9}
    assert asked == [({"CUDA_VISIBLE_DEVICES": "3"},), ()]


def test_an_engine_that_shares_its_gpu_has_a_cache_of_a_fixed_size(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").open("wb").truncate(6 * 2**30)
    shared = replace(options(), model=str(tmp_path), gpu_memory_gib=30.0)
    found = devices.memory_arguments(shared, [card(0, 95)])
    assert found == {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 20 * 2**30}
    assert devices.memory_arguments(replace(shared, model="owner/unknown"), [card(0, 95)]) == {
        "gpu_memory_utilization": 0.3
    }


def test_what_the_bits_of_samples_depend_on_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import vllm.platforms

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3})
    monkeypatch.setattr(vllm, "__version__", "0.1")
    monkeypatch.setattr(vllm.platforms, "current_platform", SimpleNamespace(get_device_name=lambda: "NVIDIA Some"))
    cpu, cuda = devices.platform_of(EngineOptions("m", "cpu", 64)), devices.platform_of(options(2))
    assert cpu == f"cpu with AVX512, 2 cores, float32, torch {torch.__version__}, vllm 0.1"
    assert cuda == f"2 x NVIDIA Some, bfloat16, torch {torch.__version__}, vllm 0.1"
