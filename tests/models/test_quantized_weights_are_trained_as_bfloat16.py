"""Weights of four bits (gpt-oss's MXFP4) are read as the numbers they stand for, and saved and published as such."""

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import FAMILIES, make_model
from models.test_families_compute_as_transformers import by_policy, policy_of, sequences
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import Mxfp4Config

from trinity.config.schema.model import ModelConfig
from trinity.runtime.errors import InvalidInput
from trinity.trainer.model.file_parts import FileParts
from trinity.trainer.model.policy import load_policy
from trinity.weights.checkpoints import copy_all_but_weights

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]

[FAMILY] = [one for one in FAMILIES if one.kind == "gpt_oss"]
NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # of an E2M1 code
BLOCK = 32


def numbers(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[E, rows, n, 16] -> [E, columns, rows]: two codes in a byte, the lower one first, times 2^(scale - 127)."""
    found = torch.stack([NUMBERS[blocks.int() & 15], NUMBERS[blocks.int() >> 4]], -1).flatten(-2)
    return (found * torch.exp2(scales.float() - 127)[..., None]).flatten(-2).transpose(1, 2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with experts of four bits, and one of the same numbers in float32."""
    quantized, plain = (tmp_path_factory.mktemp(name) for name in ("quantized", "plain"))
    for folder in (quantized, plain):
        make_model(FAMILY, folder)
    tensors, generator = load_file(plain / "model.safetensors"), torch.Generator().manual_seed(0)
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj"):
            packed[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        shape = (experts, rows, columns // BLOCK)
        blocks = torch.randint(0, 256, (*shape, BLOCK // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 126, shape, generator=generator, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = numbers(blocks, scales).contiguous()
    assert sum(name.endswith("_blocks") for name in packed) == 4
    save_file(packed, quantized / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    rewrite(quantized, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return quantized, plain


def rewrite(folder: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


@pytest.mark.parametrize("packed", [False, True])
def test_the_policy_computes_with_the_numbers(packed: bool, folders: tuple[Path, Path]) -> None:
    policy, expected = (policy_of(folder, packed) for folder in folders)
    assert all(weight.requires_grad and weight.dtype is torch.float32 for weight in policy.parameters())
    ours, theirs = dict(policy.weights()), dict(expected.weights())
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight), name
    batch = sequences()
    torch.testing.assert_close(by_policy(policy, batch, packed=packed), by_policy(expected, batch, packed=packed))


def test_versions_and_checkpoints_have_the_names_of_plain_files(folders: tuple[Path, Path], tmp_path: Path) -> None:
    quantized, plain = folders
    policy = policy_of(quantized, packed=True)
    parts = FileParts(policy.model)
    saved = {
        part: tensor.contiguous() for name, weight in policy.weights() for part, tensor in parts.cut(name, weight.data)
    }
    assert saved.keys() == load_file(plain / "model.safetensors").keys()
    copy_all_but_weights(quantized, tmp_path)
    save_file(saved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for name, weight in AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).state_dict().items():
        assert torch.equal(loaded[name], weight), name


def test_the_conversion_of_the_docs_writes_the_plain_weights(
    folders: tuple[Path, Path], repository: Path, tmp_path: Path
) -> None:
    [code] = re.findall(r"```python\n(.*?)```", (repository / "docs/models.md").read_text(), re.DOTALL)
    names = {"openai/gpt-oss-20b": str(folders[0]), "gpt-oss-20b-bf16": str(tmp_path)}
    for name, folder in names.items():
        assert f'"{name}"' in code
        code = code.replace(f'"{name}"', repr(folder))
    exec(textwrap.dedent(code), {"AutoModelForCausalLM": AutoModelForCausalLM, "Mxfp4Config": Mxfp4Config})
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    expected = load_file(folders[1] / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.bfloat16()), name


def test_sizes_are_known_without_weights(folders: tuple[Path, Path]) -> None:
    shapes = [
        {
            name: weight.shape
            for name, weight in load_policy(
                ModelConfig(model_path=str(folder)), torch.float32, 7, weights=False
            ).weights()
        }
        for folder in folders
    ]
    assert shapes[0] == shapes[1]


def test_other_quantized_weights_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    copy_all_but_weights(folders[1], tmp_path)
    rewrite(tmp_path, {"quant_method": "fp8"})
    with pytest.raises(InvalidInput, match=r"model\.model_path: .* is quantized \(fp8\); only bfloat16 and mxfp4"):
        policy_of(tmp_path, packed=False)
