"""Versions of LoRA adapters: their manifests, their merge with the base model, and folders of peft to begin with."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trinity.runtime.errors import InvalidInput
from trinity.weights.adapters import CONFIG, WEIGHTS, read_adapters
from trinity.weights.lora import Lora, LoraTarget, adapter_names, fused, merged
from trinity.weights.manifest import FileInfo, FolderOffer, Manifest, TensorInfo
from trinity.weights.wire import manifest_from_proto, manifest_to_proto

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
        (replace(MANIFEST, version=0, step=0), "manifest.base_model"),
        (replace(MANIFEST, version=0, step=0, base_model="m", lora=None), "manifest.lora"),
        (replace(MANIFEST, version=0, step=0, base_model="m", tensors=MANIFEST.tensors[:1]), B),
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
    found = dict(merged(base.items(), adapters, LORA, "cpu"))
    assert list(found) == list(base)
    assert found["model.embed_tokens.weight"] is base["model.embed_tokens.weight"]
    expected = before[WEIGHT].double() + 4.0 * adapters[B].double() @ adapters[A].double()
    torch.testing.assert_close(found[WEIGHT].double(), expected, rtol=1e-5, atol=1e-5)
    assert found[WEIGHT].dtype is torch.float32
    assert torch.equal(base[WEIGHT], before[WEIGHT])


def test_an_adapter_of_no_matrix_is_an_error() -> None:
    adapters = {A: torch.zeros(2, 4), B: torch.zeros(6, 2)}
    with pytest.raises(InvalidInput, match="lora_A"):
        list(merged([("other.weight", torch.zeros(6, 4))], adapters, LORA, "cpu"))


LAYER = "model.layers.1.mlp.experts"
UP, DOWN = LoraTarget(f"{LAYER}.gate_up_proj", (3, 8, 6)), LoraTarget(f"{LAYER}.down_proj", (3, 6, 4))
TRANSPOSED = tuple(LoraTarget(one.name, (3, *reversed(one.shape[1:])), True) for one in (UP, DOWN))


def product_of(expert: int, a: torch.Tensor, b: torch.Tensor, rank: int, experts: int) -> torch.Tensor:
    """B A of one expert by peft's layout, float64 [out, in]: a loop over the rank."""
    rows = [torch.outer(b[:, k * experts + expert].double(), a[expert * rank + k].double()) for k in range(rank)]
    return torch.stack(rows).sum(0)


def expert_files(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The files of a checkpoint with the matrices of each expert."""
    found = {}
    for expert in range(3):
        gate, up = whole[UP.name][expert].chunk(2)
        found |= {f"{LAYER}.{expert}.gate_proj.weight": gate, f"{LAYER}.{expert}.up_proj.weight": up}
        found[f"{LAYER}.{expert}.down_proj.weight"] = whole[DOWN.name][expert]
    return found


@pytest.mark.parametrize("in_tower", [False, True])
@pytest.mark.parametrize("kind", ["one by one", "fused", "transposed"])
def test_experts_are_merged_in_every_form_of_files(kind: str, in_tower: bool) -> None:
    torch.manual_seed(0)
    lora = Lora(2, 3.0, TRANSPOSED if kind == "transposed" else (UP, DOWN))
    adapters = {name: torch.randn(shape) for name, shape in lora.shapes.items()}
    assert {name.removeprefix(f"base_model.model.{LAYER}."): tuple(one.shape) for name, one in adapters.items()} == {
        "base_layer.lora_A.weight": (6, 6), "base_layer.lora_B.weight": (8, 6),
        "lora_A.weight": (6, 4), "lora_B.weight": (6, 6),
    }  # fmt: skip
    whole = {one.name: torch.randn(one.shape) for one in (UP, DOWN)}
    expected = {}
    for (target, (a, b)), one in zip(lora.adapters, (UP, DOWN), strict=True):
        sums = [product_of(expert, adapters[a], adapters[b], 2, 3) for expert in range(3)]
        expected[target.name] = whole[one.name].double() + 1.5 * torch.stack(sums)
    if kind == "one by one":
        base, expected = expert_files(whole), expert_files(expected)
    else:
        turn = (lambda one: one.mT) if kind == "transposed" else (lambda one: one)
        base, expected = ({name: turn(one).contiguous() for name, one in each.items()} for each in (whole, expected))
    if in_tower:  # a model with a tower has other names in memory than in its files
        adapters = {in_memory(name): one for name, one in adapters.items()}
        lora = replace(lora, targets=tuple(replace(one, name=in_memory(one.name)) for one in lora.targets))
    lora.check_base({name: tuple(one.shape) for name, one in base.items()})
    assert Lora.of(json.loads(json.dumps(lora.plain()))) == lora
    found = dict(merged(base.items(), adapters, lora, "cpu"))
    assert found.keys() == base.keys()
    for name, sum_ in found.items():
        torch.testing.assert_close(sum_.double(), expected[name], rtol=1e-5, atol=1e-5, msg=name)
    last = list(base)[-1]
    with pytest.raises(InvalidInput, match="or not whole"):
        list(merged([item for item in base.items() if item[0] != last], adapters, lora, "cpu"))
    with pytest.raises(InvalidInput, match=r"experts.*in the base model's files"):
        lora.check_base({name: tuple(one.shape) for name, one in base.items() if name != last})


def in_memory(name: str) -> str:
    return name.replace("model.layers", "model.language_model.layers")


def test_a_manifest_of_experts_survives_its_way_and_must_fit() -> None:
    lora = Lora(2, 8.0, (*LORA.targets, *TRANSPOSED))
    tensors = tuple(tensor(name, *shape) for name, shape in lora.shapes.items())
    manifest = replace(MANIFEST, lora=lora, tensors=tensors)
    manifest.check()
    assert manifest_from_proto(manifest_to_proto(manifest)) == manifest
    for changed, words in (
        (replace(manifest, tensors=tensors[:-1]), r"experts\.lora_B\.weight is not there"),
        (replace(manifest, lora=replace(lora, rank=3)), "the adapted matrices need it"),
        (
            replace(manifest, lora=replace(lora, targets=(LoraTarget(f"{LAYER}.other", (3, 8, 6)),))),
            "no layer's experts",
        ),
    ):
        with pytest.raises(InvalidInput, match=words):
            changed.check()


def test_experts_of_files_are_those_of_a_layer_only_if_they_are_whole() -> None:
    shapes = {name: tuple(one.shape) for name, one in expert_files(
        {one.name: torch.zeros(one.shape) for one in (UP, DOWN)}).items()}  # fmt: skip
    known = {UP.name: UP.shape, DOWN.name: DOWN.shape}
    assert fused(shapes | {WEIGHT: (6, 4)}) == {WEIGHT: (6, 4)} | known
    assert UP.name not in fused(shapes | {f"{LAYER}.3.gate_proj.weight": (4, 6)})
    assert DOWN.name not in fused(shapes | {f"{LAYER}.3.down_proj.weight": (5, 4)})


@pytest.mark.parametrize("targets", [(UP, DOWN), (UP,), (DOWN,)], ids=["both", "gate and up", "down"])
def test_a_folder_of_peft_says_which_experts_it_adapts(targets: tuple[LoraTarget, ...], tmp_path: Path) -> None:
    lora = Lora(2, 8.0, (*LORA.targets, *targets))
    tensors = {name: torch.ones(shape) for name, shape in lora.shapes.items()}
    names = [target.name.removeprefix("model.layers.1.") for target in targets]
    found = read_adapters(peft_folder(tmp_path, tensors, target_parameters=names))
    assert sorted(found.modules) == sorted([MODULE, *(target.name for target in targets)])
    known = {**LINEAR, UP.name: UP.shape, DOWN.name: DOWN.shape}
    found.check(known, "Base-1B")
    assert set(found.lora(known, False).targets) == set(lora.targets)
    with pytest.raises(InvalidInput, match="no linear layer"):
        found.check(LINEAR, "Base-1B")
    with pytest.raises(InvalidInput, match="needs it"):
        found.check(known, "Base-1B", transposed=True)
    with pytest.raises(InvalidInput, match="has target_parameters"):
        read_adapters(peft_folder(tmp_path, tensors, target_parameters="mlp.experts.down_proj"))


def peft_folder(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({A: torch.ones(2, 4), B: torch.ones(6, 2)} if tensors is None else tensors, folder / WEIGHTS)
    known = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "base_model_name_or_path": "org/Base-1B", **config}
    (folder / CONFIG).write_text(json.dumps(known))
    return folder


MODULE = WEIGHT.removesuffix(".weight")
LINEAR = {MODULE: (6, 4), "lm": (6, 4)}


def test_a_folder_of_peft_says_what_it_holds(tmp_path: Path) -> None:
    found = read_adapters(peft_folder(tmp_path))
    assert (found.rank, found.alpha, found.modules) == (2, 8.0, [MODULE])
    for name in ("/models/base-1b/", "org/Base-1B", "/hub/models--org--Base-1B/snapshots/0a1b"):
        found.check(LINEAR, name)
    read_adapters(peft_folder(tmp_path, base_model_name_or_path=None)).check(LINEAR, "/any")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "does not describe LoRA"),
        ({"use_rslora": True}, "has use_rslora, which is not supported here; merge them with peft"),
        ({"bias": "all"}, "has bias"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights 'pissa'"),
        ({"r": True}, "has r True"),
        ({"lora_alpha": float("nan")}, "lora_alpha nan"),
    ],
)
def test_adapters_of_another_kind_are_refused_by_file(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as refused:
        read_adapters(peft_folder(tmp_path, **config))
    assert refused.value.field == str(tmp_path / CONFIG)


def test_a_file_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_adapters(tmp_path / "none")
    (peft_folder(tmp_path) / WEIGHTS).write_bytes(b"short")
    with pytest.raises(InvalidInput, match=r"no whole safetensors file.* save the adapters with peft"):
        read_adapters(tmp_path)
    with pytest.raises(InvalidInput, match="has no tensors"):
        read_adapters(peft_folder(tmp_path, {}))


@pytest.mark.parametrize(
    ("tensors", "model", "words"),
    [
        (None, "org/Base-7B", "says that the base model is 'org/Base-1B', and model.model_path is 'org/Base-7B'"),
        ({A: torch.ones(3, 4), B: torch.ones(6, 3)}, "Base-1B", r"lora_A.weight \[3, 4\]; rank 2 .* needs it \[2, 4\]"),
        ({A: torch.ones(2, 4)}, "Base-1B", r"lora_B.weight not there; .* needs it \[6, 2\]"),
        ({A.replace("q_", "k_"): torch.ones(2, 4)}, "Base-1B", "adapts .*k_proj, no linear layer of Base-1B"),
        ({A: torch.ones(2, 4), B: torch.ones(6, 2), WEIGHT: torch.ones(6, 4)}, "Base-1B", "needs it not there"),
    ],
)
def test_adapters_of_another_model_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor] | None, model: str, words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        read_adapters(peft_folder(tmp_path, tensors)).check(LINEAR, model)
