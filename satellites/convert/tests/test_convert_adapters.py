"""`trinity convert` of checkpoints that hold adapters: what peft would merge, or a sentence on what is missing."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from support.fakes.models.convertible import converted
from support.programs.trainer.training import make_model
from trinity.config.checks.lora import in_four_bits
from trinity.convert.base import OtherModel, compared
from trinity.convert.source import Parameter, Source
from trinity.weights.four_bit import MARK, NF4, rounded_base

pytestmark = pytest.mark.core


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "base")


@pytest.fixture
def checkpoint(model: Path, tmp_path: Path) -> Path:
    """A checkpoint of adapters, as far as convert looks at it."""
    folder = tmp_path / "job/global_step_4"
    torch.manual_seed(2)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy = get_peft_model(base, LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"]))
    for name, parameter in policy.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.1)
    policy.save_pretrained(folder / "actor/lora_adapter")
    (folder / ".full_checkpoint").touch()
    return folder


def change_config(checkpoint: Path, **values: object) -> None:
    path = checkpoint / "actor/lora_adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_adapters_are_merged_as_peft_merges_them(
    checkpoint: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert converted(checkpoint.parent, model, None) == 0
    assert "LoRA adapters, merged with" in capsys.readouterr().out
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    expected = PeftModel.from_pretrained(base, checkpoint / "actor/lora_adapter").merge_and_unload().state_dict()
    found = load_file(checkpoint / "actor/huggingface/model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7, msg=name)
    AutoModelForCausalLM.from_pretrained(checkpoint / "actor/huggingface")


def test_adapters_of_a_base_of_four_bits_are_merged_with_its_rounded_values(checkpoint: Path, model: Path) -> None:
    pytest.importorskip("bitsandbytes")
    file = checkpoint / "actor/lora_adapter/adapter_model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt", MARK: NF4})
    assert converted(checkpoint.parent, model, None) == 0
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    state = base.state_dict()
    base.load_state_dict(dict(rounded_base(state.items(), in_four_bits, torch.float32)))
    expected = PeftModel.from_pretrained(base, checkpoint / "actor/lora_adapter").merge_and_unload().state_dict()
    found = load_file(checkpoint / "actor/huggingface/model.safetensors")
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7, msg=name)


def test_a_base_model_that_is_gone_is_asked_for(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint / "actor/huggingface").mkdir()
    change_config(checkpoint, base_model_name_or_path="/gone")
    assert converted(checkpoint, None, None) == 1
    assert "give it with --base-model-dir" in capsys.readouterr().out


def test_another_base_model_is_refused(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    small = Qwen2Config(vocab_size=97, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                        num_attention_heads=2, num_key_value_heads=1)  # fmt: skip
    Qwen2ForCausalLM(small).save_pretrained(tmp_path / "small")
    assert converted(checkpoint, tmp_path / "small", None) == 1
    assert "are no adapters of" in capsys.readouterr().out
    assert not (checkpoint / "actor/huggingface/model.safetensors").exists()


def test_adapters_of_another_kind_are_refused(
    checkpoint: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_config(checkpoint, use_dora=True)
    assert converted(checkpoint, model, None) == 1
    assert "use_dora, which is not supported here" in capsys.readouterr().out


def test_files_of_the_base_model_may_lack_a_part_of_the_names(tmp_path: Path) -> None:
    """Those of Qwen2.5-VL do."""
    weights = {"model.layers.0.mlp.up_proj.weight": torch.zeros(3, 2), "visual.merger.mlp.0.weight": torch.zeros(2, 2)}
    save_file(weights, tmp_path / "model.safetensors")
    for tower, other in (((2, 2), False), ((2, 4), True)):
        shapes = {"model.language_model.layers.0.mlp.up_proj.weight": (3, 2), "model.visual.merger.mlp.0.weight": tower}
        made = [Parameter(name, shape, torch.float32, ()) for name, shape in shapes.items()]
        source = compared(Source("a checkpoint", iter(made), torch.float32), tmp_path, gives_config=False)
        with pytest.raises(OtherModel, match="another model") if other else nullcontext():
            assert [parameter.name for parameter in source.parameters] == list(shapes)
