"""What goes through stages is what safetensors reads, bit for bit, in the order that was asked for; a failure leaves
nothing behind. On a GPU the stages are pinned; all else is the same here."""

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from vllm.config.load import LoadConfig

from trinity.explorer.engine.staging import Found, Staging, find
from trinity.explorer.engine.worker import FourBitLoader, TrinityTransferEngine, UpdateInfo, _one_by_one
from trinity.explorer.types import FOUR_BIT
from trinity.runtime.errors import InvalidInput
from trinity.weights.four_bit import rounded
from trinity.weights.lora import Lora, LoraTarget

pytestmark = pytest.mark.core

CPU = torch.device("cpu")
SHARE = 256  # bytes; a stage has eight of them
SHAPES = [(3, 5), (1,), (), (0, 4), (700,), (16, 16), (2, 3, 7), (2048,), (0,), (129,), (33, 61), (5,), (2049,), (1, 1)]
DTYPES = [
    torch.bfloat16, torch.float32, torch.uint8, torch.int64, torch.float16, torch.bool, torch.float64, torch.int16,
    torch.float8_e4m3fn,
]  # fmt: skip


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    raw = raw % 2 if dtype is torch.bool else raw
    return raw.to(torch.uint8).view(dtype).reshape(shape)


def version(folder: Path, files: int = 3) -> tuple[list[str], list[list[Any]]]:
    """Files of every dtype, and all their tensors, those of a file not together."""
    paths, tensors = [], []
    for index in range(files):
        held = {
            f"{index}.{number}": random(shape, DTYPES[(index + number) % len(DTYPES)], 100 * index + number)
            for number, shape in enumerate(SHAPES)
        }
        paths.append(str(folder / f"part-{index}.safetensors"))
        save_file(held, paths[-1], {"about": "x" * index})
        tensors += [[name, index] for name in held]
    order = torch.randperm(len(tensors), generator=torch.Generator().manual_seed(files)).tolist()
    return paths, [tensors[at] for at in order]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def expect(found: Iterable[tuple[str, torch.Tensor]], paths: list[str], tensors: list[list[Any]]) -> None:
    files = [safe_open(path, framework="pt") for path in paths]
    found = list(found)
    assert [name for name, _ in found] == [name for name, _ in tensors]
    for (name, index), (_, tensor) in zip(tensors, found, strict=True):
        expected = files[index].get_tensor(name)
        assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype), name
        assert tensor.is_contiguous() and raw(tensor) == raw(expected), name


def read(staging: Staging, found: list[Found]) -> list[tuple[str, torch.Tensor]]:
    return [named for bucket in staging.read(found) for named in bucket]


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("staging")]


@pytest.mark.parametrize("share", [16, SHARE, 4096, 1024**2])
def test_all_tensors_come_as_safetensors_reads_them(tmp_path: Path, share: int) -> None:
    paths, tensors = version(tmp_path)
    staging = Staging(CPU, share)
    for _ in range(2):
        expect(read(staging, find(paths, tensors)), paths, tensors)
    expect(read(staging, find(paths, tensors[5:9])), paths, tensors[5:9])
    assert read(staging, []) == []
    assert threads() == []


def test_what_a_full_device_has_no_room_for_comes_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, tensors = version(tmp_path)
    staging, empty, refused = Staging(CPU, SHARE), torch.empty, 0

    def full(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal refused
        if kwargs["device"] is CPU and args[0] > 1000:
            refused += 1
            raise torch.OutOfMemoryError
        return empty(*args, **kwargs)

    assert staging._stages
    monkeypatch.setattr(torch, "empty", full)
    expect(read(staging, find(paths, tensors)), paths, tensors)
    assert refused


def test_files_that_do_not_hold_what_they_should(tmp_path: Path) -> None:
    paths, tensors = version(tmp_path)
    with pytest.raises(InvalidInput, match=r"part-1.* does not hold a tensor '0\.4'"):
        find(paths, [*tensors, ["0.4", 1]])
    os.truncate(paths[2], os.path.getsize(paths[2]) - 1)
    with pytest.raises(InvalidInput, match=r"part-2.* is no whole safetensors file"):
        find(paths, tensors)
    os.remove(paths[2])
    with pytest.raises(InvalidInput, match=r"part-2.* is no whole safetensors file"):
        find(paths, tensors)


def test_a_read_that_fails_raises_and_the_next_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, tensors = version(tmp_path)
    staging, found = Staging(CPU, SHARE), find(paths, tensors)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fails_at(7))
        with pytest.raises(OSError, match="the disk is gone"):
            read(staging, found)
    assert threads() == []
    expect(read(staging, found), paths, tensors)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", a_few_bytes)
        expect(read(staging, found), paths, tensors)
    os.truncate(paths[1], 2000)
    with pytest.raises(InvalidInput, match=r"part-1.* ends at byte 2000"):
        read(staging, found)
    assert threads() == []


def fails_at(call: int) -> Any:
    calls, really = iter(range(call)), os.preadv

    def preadv(*args: Any) -> int:
        if next(calls, None) is None:
            raise OSError("the disk is gone")
        return really(*args)

    return preadv


def a_few_bytes(file: int, buffers: list[memoryview], offset: int, really: Any = os.preadv) -> int:
    return int(really(file, [buffers[0][:100]], offset))


def test_an_iteration_that_is_closed_early_leaves_no_thread(tmp_path: Path) -> None:
    paths, tensors = version(tmp_path)
    buckets = Staging(CPU, SHARE).read(find(paths, tensors))
    next(buckets)
    assert threads()
    buckets.close()
    assert threads() == []


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(40, 3)), nn.Parameter(torch.zeros(2000))
        self.loads = 0
        self.fails = False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loads += 1
        for name, tensor in weights:
            if self.fails:
                raise ValueError("not mine")
            getattr(self, name).data.copy_(tensor)


def engine_of(model: Model, in_place: bool, load_format: str = "auto") -> Any:
    class Worker(TrinityTransferEngine):
        pass

    Worker.in_place = in_place  # type: ignore[assignment, method-assign]
    of_model, of_load = SimpleNamespace(dtype=torch.float32), SimpleNamespace(load_format=load_format)
    everything: Any = SimpleNamespace(parallel_config=None, model_config=of_model, load_config=of_load)
    engine = Worker(everything, everything, CPU, model)
    engine._staging = Staging(CPU, SHARE)
    return engine


def update(folder: Path, seed: int) -> tuple[dict[str, torch.Tensor], UpdateInfo]:
    """A version of its own, in two files."""
    weights = {"b": random((2000,), torch.bfloat16, seed).nan_to_num(), "a": random((40, 3), torch.int16, seed).float()}
    paths = [str(folder / f"{seed}-{name}.safetensors") for name in weights]
    for path, (name, tensor) in zip(paths, weights.items(), strict=True):
        save_file({name: tensor}, path)
    return weights, UpdateInfo(files=paths, tensors=[["b", 0], ["a", 1]])


def test_a_whole_version_is_loaded_in_place_by_the_copies_of_the_first(tmp_path: Path) -> None:
    model = Model()
    engine = engine_of(model, in_place=True)
    for seed in range(3):
        weights, info = update(tmp_path, seed)
        engine.receive_weights(info)
        for name, tensor in weights.items():
            assert torch.equal(getattr(model, name), tensor.float())
    assert model.loads == 1
    assert threads() == []


def test_a_load_that_fails_leaves_no_thread_and_the_next_one_is_whole(tmp_path: Path) -> None:
    model = Model()
    engine = engine_of(model, in_place=True)
    model.fails = True
    with pytest.raises(ValueError, match="not mine") as caught:
        engine.receive_weights(update(tmp_path, 1)[1])
    assert caught.value.__traceback__ is not None and threads() == []
    model.fails = False
    for seed in (2, 3):
        weights, info = update(tmp_path, seed)
        engine.receive_weights(info)
        assert torch.equal(model.a, weights["a"])
    _, info = update(tmp_path, 4)
    os.truncate(info.files[1], 100)
    with pytest.raises(InvalidInput, match="is no whole safetensors file"):
        engine.receive_weights(info)
    assert threads() == []


def test_adapters_are_merged_with_a_base_model_that_goes_through_stages(tmp_path: Path) -> None:
    base = {"m.weight": torch.randn(40, 30), "n.weight": torch.randn(30)}
    names = [f"base_model.model.m.lora_{part}.weight" for part in "AB"]
    adapters = dict(zip(names, (torch.randn(4, 30), torch.randn(40, 4)), strict=True))
    save_file(base, tmp_path / "base")
    save_file(adapters, tmp_path / "adapters")
    info = UpdateInfo([str(tmp_path / "adapters")], [[name, 0] for name in names])
    info.base_files, info.base_tensors = [str(tmp_path / "base")], [[name, 0] for name in base]
    info.lora = Lora(4, 2.0, (LoraTarget("m.weight", (40, 30)),)).plain()
    mapped, staged = engine_of(Model(), in_place=False), engine_of(Model(), in_place=False)
    staged._read = lambda paths, tensors: _one_by_one(staged._staging.read(find(paths, tensors)))
    for (name, expected), (other, tensor) in zip(mapped._tensors(info), staged._tensors(info), strict=True):
        assert name == other and torch.equal(tensor, expected)
    broken = staged._tensors(info)
    next(broken)
    assert threads()
    broken.close()
    assert threads() == []


@pytest.mark.parametrize("in_place", [True, False])
def test_an_engine_on_a_base_of_four_bits_loads_rounded_matrices(tmp_path: Path, in_place: bool) -> None:
    pytest.importorskip("bitsandbytes")
    base = {"m.weight": torch.randn(40, 64), "n.weight": torch.randn(30), "embed_tokens.weight": torch.randn(40, 64)}
    names = [f"base_model.model.m.lora_{part}.weight" for part in "AB"]
    a, b = torch.randn(4, 64), torch.randn(40, 4)
    save_file(base, tmp_path / "base")
    save_file(dict(zip(names, (a, b), strict=True)), tmp_path / "adapters")
    engine = engine_of(Recording(), in_place, FOUR_BIT)
    engine.receive_weights(UpdateInfo([str(tmp_path / "base")], [[name, 0] for name in base]))
    rounded_ones = base | {"m.weight": rounded(base["m.weight"])}
    assert not torch.equal(rounded_ones["m.weight"], base["m.weight"])
    assert all(torch.equal(engine.model.found[name], tensor) for name, tensor in rounded_ones.items())
    info = UpdateInfo([str(tmp_path / "adapters")], [[name, 0] for name in names])
    info.base_files, info.base_tensors = [str(tmp_path / "base")], [[name, 0] for name in base]
    info.lora = Lora(4, 2.0, (LoraTarget("m.weight", (40, 64)),)).plain()
    engine.receive_weights(info)
    torch.testing.assert_close(engine.model.found["m.weight"], rounded_ones["m.weight"] + 0.5 * b @ a)
    assert torch.equal(engine.model.found["embed_tokens.weight"], base["embed_tokens.weight"])


class Recording(nn.Module):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.found = dict(weights)


def test_the_model_of_the_start_is_rounded_too(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    base = {"m.weight": torch.randn(40, 64).bfloat16(), "lm_head.weight": torch.randn(40, 64).bfloat16()}
    save_file(base, tmp_path / "model.safetensors")
    model: Any = SimpleNamespace(model=str(tmp_path), revision=None, dtype=torch.float32)
    found = dict(FourBitLoader(LoadConfig(load_format=FOUR_BIT)).get_all_weights(model, nn.Module()))
    assert torch.equal(found["m.weight"], rounded(base["m.weight"].float()))
    assert torch.equal(found["lm_head.weight"], base["lm_head.weight"])
