"""Versions as files, with the checksums that were computed while they were written; and the probes of canaries."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file

from support.programs.trainer.training import BASE, fixed_batch
from trinity.config import make_plan
from trinity.config.schema import Config
from trinity.data.images import PlacedImage, placed
from trinity.data.vision import ImageRules
from trinity.runtime import files
from trinity.runtime.errors import InvalidInput, TrinityError
from trinity.trainer.weights import canary, read_version, write_huggingface_index, write_shards
from trinity.trainer.weights import shards as shards_module
from trinity.trainer.weights.shards import describe
from trinity.weights.manifest import Canary, Manifest, Probe, TensorInfo, check_files
from trinity.weights.wire import manifest_from_proto, manifest_to_proto

pytestmark = pytest.mark.core

SHAPES = [("embed", (7, 5)), ("layer.0", (4, 3)), ("layer.1", (4, 3)), ("norm", (5,)), ("scale", ()), ("none", (0, 4))]


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES}


def layout(weights: dict[str, torch.Tensor]) -> list[TensorInfo]:
    return [describe(name, tensor.dtype, tensor.shape) for name, tensor in weights.items()]


def overwritten(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor is valid until the next one is asked for, as with gathered parameters."""
    for name, tensor in weights.items():
        lent = tensor.clone()
        yield name, lent
        lent.fill_(math.nan)


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard_bytes", [1, 100, 10**6])
def test_files_hold_what_was_given_and_checksums_are_theirs(
    dtype: torch.dtype, shard_bytes: int, away: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards_module, "_is_away", lambda _: away)  # on a GPU
    monkeypatch.setattr(shards_module, "_HELD_BYTES", 200)
    weights = tensors(dtype)
    infos, shards = write_shards(
        overwritten(weights), layout(weights), tmp_path, "part-{:05d}.safetensors", shard_bytes
    )
    assert [info.name for info in infos] == list(weights)
    assert (len(shards) == 1) is (shard_bytes == 10**6)
    read = {name: value for shard in shards for name, value in load_file(tmp_path / shard.name).items()}
    for info in infos:
        raw = weights[info.name].reshape(-1).view(torch.uint8).numpy().tobytes()
        assert read[info.name].reshape(-1).view(torch.uint8).numpy().tobytes() == raw
        assert read[info.name].shape == weights[info.name].shape
        assert info.checksum == xxhash.xxh3_128_hexdigest(raw)
        assert info.size_bytes == len(raw)
    for shard in shards:
        assert shard.checksum == files.checksum(tmp_path / shard.name)
    manifest = Manifest("run", 1, 1, tuple(infos), tuple(shards), (), 0.0)
    check_files(manifest, tmp_path)
    assert [name for name, _ in read_version(manifest, tmp_path)] == list(weights)


def test_a_file_has_one_dtype_so_that_every_tensor_is_aligned(tmp_path: Path) -> None:
    weights = {"a": torch.zeros(3, dtype=torch.bfloat16), "b": torch.ones(5), "c": torch.ones(1, dtype=torch.bfloat16)}
    infos, _ = write_shards(weights.items(), layout(weights), tmp_path, "part-{}.safetensors")
    assert [info.file for info in infos] == ["part-0.safetensors", "part-1.safetensors", "part-2.safetensors"]


def test_a_file_may_hold_weights_of_both_devices(tmp_path: Path) -> None:
    """Of merged adapters: the base model's are on the host, and only what was merged is on the GPU."""

    class OnGpu(torch.Tensor):
        def cpu(self, *_: object) -> torch.Tensor:  # type: ignore[override]
            return self.as_subclass(torch.Tensor)

        def numpy(self, *_: object) -> np.ndarray:  # type: ignore[override]
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

    weights = tensors()
    given = {name: value.as_subclass(OnGpu) if name != "embed" else value for name, value in weights.items()}
    with pytest.raises(TypeError):
        given["norm"].numpy()
    write_shards(given.items(), layout(weights), tmp_path, "part-{}.safetensors")
    read = load_file(tmp_path / "part-0.safetensors")
    assert all(torch.equal(read[name], value) for name, value in weights.items())


def test_weights_that_are_not_those_announced_are_refused_by_name(tmp_path: Path) -> None:
    weights = tensors()
    announced = layout(weights)
    missing = {name: value for name, value in weights.items() if name != "layer.1"}
    with pytest.raises(InvalidInput, match=r"expected layer.1 \[4, 3\] F32, got norm \[5\] torch.float32"):
        write_shards(missing.items(), announced, tmp_path, "part-{}.safetensors")
    with pytest.raises(InvalidInput, match="got none after the last expected tensor"):
        write_shards(weights.items(), announced[:-1], tmp_path, "part-{}.safetensors")
    with pytest.raises(InvalidInput, match=r"expected none \[0, 4\] F32, got nothing"):
        write_shards(list(weights.items())[:-1], announced, tmp_path, "part-{}.safetensors")


@pytest.mark.parametrize("shard_bytes", [100, 10**6])
def test_transformers_finds_every_tensor(shard_bytes: int, tmp_path: Path) -> None:
    weights = tensors()
    found = write_shards(weights.items(), layout(weights), tmp_path, "model-{:05d}.safetensors", shard_bytes)
    write_huggingface_index(tmp_path, *found)
    if shard_bytes == 100:
        index = files.read_json(tmp_path / "model.safetensors.index.json")
        assert index is not None
        assert set(index["weight_map"]) == set(weights)
        assert all((tmp_path / name).exists() for name in index["weight_map"].values())
        return
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(weights)
        assert file.metadata() == {"format": "pt"}


def test_the_probe_is_the_first_different_beginnings_of_a_batch() -> None:
    batch = fixed_batch(1)
    probe = canary.probe_of_batch(batch)
    assert len(probe) == canary.SEQUENCES
    assert probe[0] == tuple(batch.sequences[0].token_ids[: canary.TOKENS])
    assert probe == canary.probe_of_batch(fixed_batch(1))
    one = batch.sequences[0]
    long = np.arange(200, dtype=np.int32)
    same = replace(batch, sequences=tuple(replace(one, token_ids=long) for _ in range(9)))
    assert canary.probe_of_batch(same) == (tuple(range(canary.TOKENS)),)
    assert canary.probe_of_batch(replace(batch, sequences=(replace(one, token_ids=long[:1]),))) == ()


def test_the_first_probe_is_the_same_everywhere_and_within_the_vocabulary() -> None:
    probe = canary.pseudo_random_probe(97)
    assert probe == canary.pseudo_random_probe(97)
    assert all(0 <= token < 97 for tokens in probe for token in tokens)
    assert [len(tokens) for tokens in probe] == [canary.TOKENS] * canary.SEQUENCES


def test_a_model_that_reads_images_has_a_probe_with_a_picture() -> None:
    rules = ImageRules(token=5, patch=14, merge=2, least_pixels=3136, most_pixels=12_845_056)
    tokens, picture = canary.picture_probe(50, rules)
    assert (tokens, picture) == canary.picture_probe(50, rules)
    assert placed(tokens, [picture], rules) == (PlacedImage(1, picture),)
    assert all(0 <= token < 50 for token in tokens)
    made = canary.make_canary((tokens, (1, 2)), [[-1.0] * (len(tokens) - 1), [-2.0]], (1e-3, 1e-2), 1, [(picture,)])
    version = Manifest("run", 1, 1, (), (), (), 0.0, canary=made)
    assert manifest_from_proto(manifest_to_proto(version)).canary == made
    assert canary.probe_of_versions([version]) == ((1, 2),)
    large = replace(made, probes=(replace(made.probes[0], images=(b"x" * 65_537,)),))
    with pytest.raises(InvalidInput, match=r"canary\.probes\[0\]\.images: have 65537 bytes, at most 65536"):
        replace(version, canary=large).check()


def test_the_newest_version_but_the_base_model_says_what_the_probe_is() -> None:
    def version(number: int, tokens: tuple[int, ...] | None) -> Manifest:
        found = Canary((Probe(tokens, (-1.0,)),), 1.0, 1.0) if tokens else None
        return Manifest("run", number, number, (), (), (), 0.0, canary=found)

    assert canary.probe_of_versions([version(3, None), version(2, (5, 6)), version(0, (1, 2))]) == ((5, 6),)
    assert canary.probe_of_versions([version(0, (1, 2))]) == ()


@pytest.mark.parametrize(
    ("engines", "trains_in_float32", "on_gpu", "given", "expected"),
    [
        ("float32", True, False, None, (1e-3, 1e-2)),
        ("auto", True, False, None, (1e-3, 1e-2)),
        ("auto", True, True, None, (0.05, 1.5)),
        ("bfloat16", True, False, None, (0.05, 1.5)),
        ("float32", False, False, None, (0.05, 1.5)),
        ("bfloat16", False, True, 0.2, (0.2, 6.0)),
    ],
)
def test_tolerances_follow_the_dtypes_unless_they_are_given(
    engines: str, trains_in_float32: bool, on_gpu: bool, given: float | None, expected: tuple[float, float]
) -> None:
    config = BASE | {
        "model": {**BASE["model"], "model_path": "m"},
        "explorer": {"rollout_model": {"dtype": engines}},
        "synchronizer": {"canary_tolerance": given},
    }
    plan = make_plan(Config.model_validate(config))
    assert canary.tolerances(plan, trains_in_float32, on_gpu) == expected


@pytest.mark.parametrize(
    ("given", "allowed", "largest"), [(None, (1e-3, 1e-2), 0.8), (None, (0.1, 3.0), 1.6), (0.02, (0.02, 0.6), 0.02)]
)
def test_tolerances_of_engines_that_quantize_are_those_of_half_precision_times_16(
    given: float | None, allowed: tuple[float, float], largest: float
) -> None:
    config = BASE | {"model": {**BASE["model"], "model_path": "m"}, "synchronizer": {"canary_tolerance": given}}
    plan = make_plan(Config.model_validate(config))
    made = Canary((), *allowed, canary.quantized_factor(plan, allowed))
    assert made.allowed("fp8")[0] == pytest.approx(largest)
    assert made.allowed("bfloat16") == allowed


def test_engines_of_delta_networks_round_to_bfloat16_on_cpus(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"linear_conv_kernel_dim": 4}}))
    plan = make_plan(Config.model_validate(BASE | {"model": {**BASE["model"], "model_path": str(tmp_path)}}))
    assert canary.tolerances(plan, True, on_gpu=False) == (0.05, 1.5)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"layer_types": ["full_attention"]}}))
    assert canary.tolerances(plan, True, on_gpu=False) == (1e-3, 1e-2)


def test_weights_that_give_no_numbers_are_refused_with_what_to_do() -> None:
    with pytest.raises(TrinityError, match=r"step 7 .* not finite: training has diverged.*rollback"):
        canary.make_canary(((1, 2, 3),), [[-1.0, math.nan]], (1.0, 1.0), 7)
    made = canary.make_canary(((1, 2, 3),), [[-1.0, -2.0]], (1e-3, 1e-2), 7)
    assert made == Canary((Probe((1, 2, 3), (-1.0, -2.0)),), 1e-3, 1e-2)
