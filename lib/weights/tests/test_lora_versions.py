"""Versions of LoRA adapters: their manifests, and their merge with the base model."""

from dataclasses import replace

import pytest
import torch

from trinity.runtime.errors import InvalidInput
from trinity.weights import (
    FileInfo,
    FolderOffer,
    Lora,
    LoraTarget,
    Manifest,
    TensorInfo,
    manifest_from_proto,
    manifest_to_proto,
)
from trinity.weights.lora import adapter_names, merged

pytestmark = pytest.mark.core

WEIGHT = "model.layers.0.self_attn.q_proj.weight"
A, B = adapter_names(WEIGHT)
LORA = Lora(2, 8.0, (LoraTarget(WEIGHT, (6, 4)),))


def tensor(name: str, *shape: int) -> TensorInfo:
    return TensorInfo(name, "F32", shape, 4 * torch.Size(shape).numel(), "part")


MANIFEST = Manifest(
    run="r",
    version=3,
    step=3,
    tensors=(tensor(A, 2, 4), tensor(B, 6, 2)),
    files=(FileInfo("part", 100, "c"),),
    offers=(FolderOffer("/there"),),
    created_at_seconds=1.0,
    lora=LORA,
)


def test_names_are_those_of_pefts_files() -> None:
    assert A == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert B == "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


def test_a_manifest_survives_its_way() -> None:
    MANIFEST.check()
    assert manifest_from_proto(manifest_to_proto(MANIFEST)) == MANIFEST
    assert manifest_from_proto(manifest_to_proto(replace(MANIFEST, lora=None))).lora is None


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (replace(MANIFEST, tensors=(tensor(A, 2, 4),)), B),
        (replace(MANIFEST, tensors=(tensor(A, 3, 4), tensor(B, 6, 2))), A),
        (replace(MANIFEST, tensors=(*MANIFEST.tensors, tensor(WEIGHT, 6, 4))), WEIGHT),
        (replace(MANIFEST, lora=replace(LORA, rank=0)), "manifest.lora.rank"),
        (replace(MANIFEST, lora=replace(LORA, alpha=float("nan"))), "manifest.lora.rank"),
        (replace(MANIFEST, lora=replace(LORA, targets=())), "manifest.lora.targets"),
        (replace(MANIFEST, lora=replace(LORA, targets=(LoraTarget(WEIGHT, (6,)),))), WEIGHT),
    ],
)
def test_adapters_that_do_not_fit_their_targets_are_refused_by_name(changed: Manifest, named: str) -> None:
    with pytest.raises(InvalidInput, match=named.replace(".", r"\.")):
        changed.check()


def test_a_base_model_of_another_shape_is_refused_by_name() -> None:
    LORA.check_base({WEIGHT: (6, 4), "other": (1,)})
    for shapes in ({WEIGHT: (6, 5)}, {"other": (6, 4)}):
        with pytest.raises(InvalidInput, match=r"model\.model_path: .*q_proj"):
            LORA.check_base(shapes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapted_matrices_are_sums_in_float32_and_all_others_stay_as_they_are(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    base = {"model.embed_tokens.weight": torch.randn(9, 4, dtype=dtype), WEIGHT: torch.randn(6, 4, dtype=dtype)}
    before = {name: value.clone() for name, value in base.items()}
    adapters = {A: torch.randn(2, 4, dtype=dtype), B: torch.randn(6, 2, dtype=dtype)}
    found = dict(merged(base.items(), adapters, LORA.scale, "cpu"))
    assert list(found) == list(base)
    assert found["model.embed_tokens.weight"] is base["model.embed_tokens.weight"]
    expected = before[WEIGHT].double() + 4.0 * adapters[B].double() @ adapters[A].double()
    torch.testing.assert_close(found[WEIGHT].double(), expected, rtol=1e-5, atol=1e-5)
    assert found[WEIGHT].dtype is torch.float32
    assert torch.equal(base[WEIGHT], before[WEIGHT])


def test_an_adapter_of_no_matrix_is_an_error() -> None:
    adapters = {A: torch.zeros(2, 4), B: torch.zeros(6, 2)}
    with pytest.raises(InvalidInput, match="lora_A"):
        list(merged([("other.weight", torch.zeros(6, 4))], adapters, 1.0, "cpu"))
