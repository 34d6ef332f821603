"""`trinity convert` of families whose checkpoints and files differ: towers that were not trained, experts in one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import FAMILIES, make_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from support.fakes.models.convertible import converted, step_folder

pytestmark = [pytest.mark.core, pytest.mark.timeout(300)]


def saved_step(family: str, folder: Path, *, tower: bool) -> tuple[Path, dict[str, torch.Tensor], Any]:
    """The actor folder of a trained model, with its state, and the class that loads it."""
    chosen = next(one for one in FAMILIES if one.kind == family)
    model = make_model(chosen, folder / "base")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "language_model." in name or chosen.config is None:
                parameter += 0.1 * torch.randn_like(parameter)
    state = dict(model.state_dict())
    actor = step_folder(folder / "job", 1, folder / "base")
    trained = {
        name: tensor for name, tensor in state.items() if tower or "language_model." in name or "lm_head" in name
    }
    torch.save(trained, actor / "model_world_size_1_rank_0.pt")
    return actor, state, AutoModelForCausalLM if chosen.config is None else AutoModelForImageTextToText


def assert_whole(actor: Path, state: dict[str, torch.Tensor], kind: Any) -> None:
    found, about = kind.from_pretrained(actor / "huggingface", dtype=torch.float32, output_loading_info=True)
    assert not about["missing_keys"] and not about["unexpected_keys"], about
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, state[name].float()), name


@pytest.mark.parametrize(("family", "given"), [("qwen3_5", True), ("gemma3", False)])
def test_a_tower_that_was_not_trained_comes_from_the_base_model(
    family: str, given: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is `given` by an option, or the run's configuration names it."""
    actor, state, kind = saved_step(family, tmp_path, tower=False)
    assert converted(tmp_path / "job", None, None) == 1
    said = capsys.readouterr().out
    assert "reads images without its vision tower, which was not trained; give the base model's folder with" in said
    assert not list(actor.glob("huggingface/*.safetensors"))
    if not given:
        named = {"model": {"model_path": str(tmp_path / "base")}}
        (tmp_path / "job/config.json").write_text(json.dumps(named))
    assert converted(tmp_path / "job", tmp_path / "base" if given else None, None) == 0, capsys.readouterr().out
    assert_whole(actor, state, kind)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_moe"])
def test_a_base_model_of_the_same_shapes_is_accepted(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files of mixtures hold each expert; transformers has those of a layer in one tensor."""
    actor, state, kind = saved_step(family, tmp_path, tower=True)
    assert converted(tmp_path / "job", tmp_path / "base", None) == 0, capsys.readouterr().out
    assert_whole(actor, state, kind)


def test_a_router_keeps_its_correction_in_float32(tmp_path: Path) -> None:
    """Slices of a run in bfloat16: masters are rounded, buffers are not."""
    model = make_model(next(one for one in FAMILIES if one.kind == "glm4_moe"), tmp_path / "base")
    actor = step_folder(tmp_path / "job", 1, tmp_path / "base")
    config = json.loads((actor / "huggingface/config.json").read_text())
    (actor / "huggingface/config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    correction = torch.tensor([10.0, 10.001, 10.002, 10.003])
    buffers = {name: correction for name, _ in model.named_buffers() if name.endswith("e_score_correction_bias")}
    kinds = {"master": dict(model.named_parameters()), "buffer": buffers}
    shapes = {kind: {f"model.{name}": [*tensor.shape] for name, tensor in of.items()} for kind, of in kinds.items()}
    index = {"ranks": 1, "dtype": "bfloat16", "parameters": shapes["master"], "buffers": shapes["buffer"]}
    (folder := actor / "slices").mkdir()
    (folder / "slices.json").write_text(json.dumps(index))
    (folder / "rank_00000.json").write_text("{}")
    flat = {f"{kind}/0/model.{n}": t.detach().reshape(-1).clone() for kind, of in kinds.items() for n, t in of.items()}
    save_file(flat, folder / "rank_00000_00000.safetensors")
    assert buffers and converted(tmp_path / "job", None, None) == 0
    found = load_file(actor / "huggingface/model.safetensors")
    assert all(torch.equal(found[name], correction) for name in buffers)
    assert {found[name].dtype for name, _ in model.named_parameters()} == {torch.bfloat16}
