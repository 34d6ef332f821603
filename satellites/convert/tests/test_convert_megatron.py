"""Megatron's checkpoints become the model that they were cut from, bit for bit; a lost or cut shard is named."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from support.fakes.evil import Evil
from support.fakes.models.megatron import write_dist, write_ranks
from trinity.convert import convert
from trinity.reading.errors import ending_well

pytestmark = pytest.mark.core

_SIZES: dict[str, Any] = {
    "vocab_size": 98, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_FAMILIES = {
    "llama": LlamaConfig(**_SIZES),
    "qwen2": Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_SIZES, head_dim=12),
}


def converted(path: Path, base: Path | None = None) -> int:
    """The exit code of `trinity convert`."""
    return ending_well(lambda: convert(path, base, None))


def make(family: str, folder: Path) -> dict[str, torch.Tensor]:
    """The parameters of a model without two equal rows; its config is put into `folder`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_FAMILIES[family], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_FAMILIES[family].to_dict() | {"dtype": "float32"}))
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def step(
    job: Path, number: int, family: str = "qwen2", files: str = "huggingface"
) -> tuple[Path, dict[str, torch.Tensor]]:
    actor = job / f"global_step_{number}" / "actor"
    return actor, make(family, actor / files)


def assert_whole(actor: Path, state: dict[str, torch.Tensor]) -> None:
    found = load_file(actor / "huggingface/model.safetensors")
    assert set(state) - set(found) <= {"lm_head.weight"}
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.items())
    loaded = AutoModelForCausalLM.from_pretrained(actor / "huggingface", dtype=torch.float32).state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.items())


@pytest.mark.parametrize("family", _FAMILIES)
def test_both_formats_on_every_grid_are_the_unsharded_model(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = []
    for number, (tensor, pipeline) in enumerate(((1, 1), (2, 1), (1, 2), (2, 2))):
        made += [step(tmp_path, 2 * number, family), step(tmp_path, 2 * number + 1, family)]
        write_dist(made[-2][0] / "dist_ckpt", made[-2][1], _FAMILIES[family], tensor, files=pipeline)
        write_ranks(made[-1][0] / "model", made[-1][1], _FAMILIES[family], tensor, pipeline)
    assert converted(tmp_path) == 0
    assert "8 converted, 0 skipped, 0 failed" in capsys.readouterr().out
    for actor, state in made:
        assert_whole(actor, state)
    assert converted(tmp_path) == 0
    assert "0 converted, 8 skipped, 0 failed" in capsys.readouterr().out


@pytest.mark.parametrize("inside", ["", "actor", "actor/dist_ckpt", "actor/dist_ckpt/.metadata"])
def test_any_path_inside_a_step_is_the_step(inside: str, tmp_path: Path) -> None:
    actor, state = step(tmp_path, 120)
    write_dist(actor / "dist_ckpt", state, _FAMILIES["qwen2"], 2, files=2)
    assert converted(tmp_path / "global_step_120" / inside) == 0
    assert_whole(actor, state)


def test_the_config_of_older_verl_or_of_the_base_model_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    actor, state = step(tmp_path, 1, files="hf_config_and_tokenizer")
    write_ranks(actor / "model", state, _FAMILIES["qwen2"], 2, 1)
    bare, others = step(tmp_path, 2)
    write_dist(bare / "dist_ckpt", others, _FAMILIES["qwen2"], 1, files=1)
    (bare / "huggingface").rename(tmp_path / "base")
    assert converted(tmp_path) == 1
    assert f"failed: {bare}/huggingface/config.json is missing; give" in capsys.readouterr().out
    assert converted(tmp_path, tmp_path / "base") == 0
    assert_whole(actor, state)
    assert_whole(bare, others)


def test_rows_that_pad_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    actor, state = step(tmp_path, 1)
    write_dist(actor / "dist_ckpt", state, _FAMILIES["qwen2"], 2, files=2, padded=30)
    assert converted(tmp_path) == 0
    assert_whole(actor, state)


def test_a_shard_that_is_lost_or_cut_names_itself_and_the_others_are_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    actors, states = zip(*[step(tmp_path, number) for number in range(1, 9)], strict=True)
    for actor, state in zip(actors[:4], states[:4], strict=True):
        write_dist(actor / "dist_ckpt", state, _FAMILIES["qwen2"], 2, files=2)
    for actor, state in zip(actors[4:], states[4:], strict=True):
        write_ranks(actor / "model", state, _FAMILIES["qwen2"], 2, 2)
    lost, cut = (sorted((actor / "dist_ckpt").glob("*.distcp"))[-1] for actor in actors[:2])
    lost.unlink()
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    nothing = actors[2] / "dist_ckpt/.metadata"
    nothing.unlink()
    between, half = actors[4] / "model/mp_rank_00_001/model.pt", actors[5] / "model/mp_rank_01_001/model.pt"
    between.unlink()
    half.write_bytes(half.read_bytes()[: half.stat().st_size // 2])
    for folder in (actors[6] / "model").glob("mp_rank_01_*"):
        shutil.rmtree(folder)
    for folder in (actors[7] / "model").glob("mp_rank_*_001"):
        shutil.rmtree(folder)
    assert converted(tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    said = [line.partition(": failed: ")[2] for line in lines if ": failed: " in line]
    expected = [
        f"{lost} is missing", f"{cut} was cut", f"{nothing} is missing", f"{between}: is missing",
        f"{half}: is damaged", f"{actors[6]}/model/mp_rank_01_000/model.pt is missing",
        f"{actors[7]}/model/mp_rank_00_001/model.pt is missing",
    ]  # fmt: skip
    for line, start in zip(said, expected, strict=True):
        assert line.startswith(start), (line, start)
    assert lines[-1] == "1 converted, 0 skipped, 7 failed"
    assert_whole(actors[3], states[3])
    assert not [path for path in tmp_path.rglob("*.safetensors") if path.parents[1] != actors[3]]


def test_pickles_run_nothing_and_read_no_file_outside_their_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "owned"
    actors = [step(tmp_path, number) for number in (1, 2, 3)]
    for actor, state in actors[:2]:
        write_dist(actor / "dist_ckpt", state, _FAMILIES["qwen2"], 1, files=1)
    described = actors[0][0] / "dist_ckpt/.metadata"
    described.write_bytes(pickle.dumps({"storage_data": Evil(marker)}))
    points = actors[1][0] / "dist_ckpt/.metadata"
    points.write_bytes(points.read_bytes().replace(b"__0_0.distcp", b"../../x.dist"))
    write_ranks(actors[2][0] / "model", actors[2][1], _FAMILIES["qwen2"], 1, 1)
    torch.save([{"x": Evil(marker)}], actors[2][0] / "model/mp_rank_00/model.pt")
    assert converted(tmp_path) == 1
    said = capsys.readouterr().out
    assert not marker.exists()
    assert said.count("asks for posix.system") == 2 and "'../../x.dist', outside its folder" in said
    assert "0 converted, 0 skipped, 3 failed" in said


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "deepseek_v3"}, "describes a model of type 'deepseek_v3'"),
        ({"num_hidden_layers": 6}, "holds nothing that becomes model.layers.4."),
        ({"num_key_value_heads": 4}, "self_attention.linear_qkv.weight has 64 rows"),
        ({"intermediate_size": 50}, "config.json says [50, 32]"),
        ({"vocab_size": 120}, "config.json says [120, 32]"),
        ({"hidden_size": "x"}, "has hidden_size 'x', which is no size"),
    ],
)
def test_a_config_of_another_model_is_refused(
    change: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    actor, state = step(tmp_path, 1)
    write_dist(actor / "dist_ckpt", state, _FAMILIES["qwen2"], 1, files=1)
    config = actor / "huggingface/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    assert converted(tmp_path) == 1
    assert reason in capsys.readouterr().out
    assert not list(tmp_path.rglob("*.safetensors"))


def test_other_backends_and_mixtures_of_experts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zarr, state = step(tmp_path, 1)
    write_dist(zarr / "dist_ckpt", state, _FAMILIES["qwen2"], 1, files=1)
    (zarr / "dist_ckpt/metadata.json").write_text('{"sharded_backend": "zarr"}')
    experts, state = step(tmp_path, 2)
    state["router"] = torch.zeros(2)
    write_ranks(experts / "model", state, _FAMILIES["qwen2"], 1, 1)
    path = experts / "model/mp_rank_00/model.pt"
    (parts,) = torch.load(path, weights_only=True)
    torch.save([parts | {"decoder.layers.0.mlp.router.weight": torch.zeros(2)}], path)
    assert converted(tmp_path) == 1
    said = capsys.readouterr().out
    assert "is in the format zarr; only torch_dist" in said
    assert "holds decoder.layers.0.mlp.router.weight, which Llama, Qwen2 and Qwen3 do not have" in said
