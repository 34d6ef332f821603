"""model.lora_configs and rope_scaling: what is taken, what is refused, and what `trinity check` says of it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trinity.compat_rft.translate import translate
from trinity.config import make_plan
from trinity.config.checks.lora import choose, modules_of, refuse_unmerged, select
from trinity.config.checks.sections import check, check_rope
from trinity.config.checks.weights import check_synchronizer, stores, transports, weights_advice
from trinity.config.schema import Config
from trinity.config.schema.model import LoraConfig

pytestmark = pytest.mark.core

WEIGHTS = [
    ("model.embed_tokens.weight", 2),
    *((f"model.layers.{layer}.self_attn.{name}_proj.weight", 2) for layer in (0, 1) for name in "qkvo"),
    ("model.layers.0.self_attn.q_proj.bias", 1),
    ("model.layers.0.mlp.gate_up.weight", 3),
    ("model.norm.weight", 1),
    ("lm_head.weight", 2),
]


def config(lora: dict[str, Any], **sections: dict[str, Any]) -> Config:
    model = {"model_path": "/m", "max_prompt_tokens": 8, "max_response_tokens": 8, "lora_configs": [lora]}
    taskset = {"explorer_input": {"taskset": {"name": "t", "path": "d.jsonl"}}}
    return Config.model_validate({"project": "p", "name": "n", "model": model, "buffer": taskset, **sections})


def test_linear_layers_are_read_off_a_checkpoint() -> None:
    assert modules_of(WEIGHTS) == [name.removesuffix(".weight") for name, _ in WEIGHTS[1:9]]


def test_names_stand_for_every_layer_that_ends_with_them() -> None:
    modules = modules_of(WEIGHTS)
    assert select(LoraConfig(), modules) == (modules, [])
    found, _ = select(LoraConfig(target_modules=["q_proj", "layers.1.self_attn.v_proj"]), modules)
    assert [name.removeprefix("model.layers.") for name in found] == [
        "0.self_attn.q_proj", "1.self_attn.q_proj", "1.self_attn.v_proj",
    ]  # fmt: skip
    assert select(LoraConfig(target_modules=r".*\.1\..*[qk]_proj"), modules)[0] == [modules[4], modules[5]]
    rest, _ = select(LoraConfig(exclude_modules=["q_proj", "k_proj", "v_proj"]), modules)
    assert rest == [modules[3], modules[7]]


def test_layers_of_a_vision_tower_are_adapted_where_they_are_named_with_it() -> None:
    tower = [f"model.visual.blocks.0.{name}" for name in ("attn.qkv", "mlp.up_proj")]
    text = [f"model.language_model.layers.0.{name}" for name in ("self_attn.q_proj", "mlp.up_proj")]
    modules = modules_of((f"{name}.weight", 2) for name in ["model.visual.pos_embed", *tower, *text])
    assert modules == [*tower, *text]
    for targets, chosen in (
        ("all-linear", text), (["up_proj"], text[1:]), (".*up_proj", text[1:]), (["q_proj", "visual.blocks.0.attn.qkv"],
        [tower[0], text[0]]), (r".*visual.*|.*q_proj", [*tower, text[0]]),
    ):  # fmt: skip
        assert select(LoraConfig(target_modules=targets), modules) == (chosen, [])
    assert select(LoraConfig(exclude_modules=".*visual.*"), modules) == (text, [])
    _, problems = select(LoraConfig(target_modules=["qkv"]), modules)
    assert "layers in the vision tower only; name them with it: visual.blocks.0" in problems[0].message
    frozen = config({"target_modules": ".*visual.*"}, trainer={"freeze_vision_tower": True})
    problems = [p for p in check(frozen) if "lora" in p.path]
    assert "trainer.freeze_vision_tower is true; leave out one of them" in problems[0].message


LAYER = "model.layers.0.mlp"
EXPERTS = [f"{LAYER}.experts.gate_up_proj", f"{LAYER}.experts.down_proj"]
SHARED = [f"{LAYER}.shared_experts.{name}_proj" for name in ("gate", "up", "down")]
MIXTURE = [("model.layers.0.self_attn.q_proj.weight", 2), *((name, 3) for name in EXPERTS),
           *((f"{name}.weight", 2) for name in SHARED)]  # fmt: skip


@pytest.mark.parametrize(
    ("targets", "chosen"),
    [
        ("all-linear", ["model.layers.0.self_attn.q_proj", *SHARED]),
        (["q_proj", "down_proj"], ["model.layers.0.self_attn.q_proj", SHARED[2]]),
        (".*_proj", ["model.layers.0.self_attn.q_proj", *SHARED]),
        (["shared_experts.down_proj"], [SHARED[2]]),
        (".*shared_experts.*_proj|.*[.]down_proj", SHARED),
        (["q_proj", "experts"], ["model.layers.0.self_attn.q_proj", *EXPERTS]),
        (["mlp.experts"], EXPERTS),
        (["experts.down_proj"], EXPERTS[1:]),
        (["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], EXPERTS),
        (r".*[.]experts[.].*", EXPERTS),
        (r".*experts.*|.*q_proj", ["model.layers.0.self_attn.q_proj", *EXPERTS, *SHARED]),
    ],
)
def test_experts_are_adapted_where_they_are_named(targets: Any, chosen: list[str]) -> None:
    modules = modules_of(MIXTURE, "qwen3_moe")
    assert modules_of(MIXTURE, "mixtral") == [name for name in modules if name not in EXPERTS]
    assert select(LoraConfig(target_modules=targets), modules) == (chosen, [])


def test_names_of_experts_are_asked_for_whole_and_unmerged_ones_are_refused() -> None:
    modules = modules_of(MIXTURE[:3], "qwen3_moe")
    for name, words in (("gate_up_proj", "experts.gate_up_proj"), ("gate_proj", "did you mean [experts.gate_up_proj]")):
        _, problems = select(LoraConfig(target_modules=[name]), modules)
        assert words in problems[0].message
    _, problems = select(LoraConfig(target_modules=["experts"]), modules[:1])
    assert "has 'experts', which no linear layer of the model is called" in problems[0].message
    assert select(LoraConfig(target_modules=["q_proj", "experts"], exclude_modules=["gate_up_proj"]), modules)[0] == [
        modules[0], modules[2],
    ]  # fmt: skip
    (problem,) = refuse_unmerged(8, modules)
    assert "engines hold adapters of experts only merged; leave it out, or set merged: true" in problem.message
    unmerged = [p for p in check(config({"target_modules": ["experts"], "merged": False})) if "lora" in p.path]
    assert [problem.path for problem in unmerged] == ["model.lora_configs.0.target_modules"]
    assert not [p for p in check(config({"target_modules": ["experts"]})) if "lora" in p.path]


@pytest.mark.parametrize(
    ("choice", "key", "words"),
    [
        ({"target_modules": ["q_porj"]}, "target_modules", "did you mean [q_proj]?"),
        ({"target_modules": ["embed_tokens"]}, "target_modules", "embeddings and output heads are not adapted"),
        ({"target_modules": ["xyzzy"]}, "target_modules", "it has k_proj, o_proj, q_proj, v_proj"),
        ({"target_modules": "all_linear"}, "target_modules", "a regex that no linear layer's whole name matches"),
        ({"exclude_modules": "["}, "exclude_modules", "which is no regex"),
        ({"exclude_modules": ".*"}, "target_modules", "leave no layer to adapt"),
    ],
)
def test_layers_that_are_not_there_are_named_with_the_nearest(choice: dict[str, Any], key: str, words: str) -> None:
    found, problems = select(LoraConfig(**choice), modules_of(WEIGHTS))
    assert found == []
    assert problems[0].path == f"model.lora_configs.0.{key}"
    assert words in problems[0].message


def test_a_dtype_that_training_does_not_have_is_refused() -> None:
    trainer = {"deepspeed": {"dtype": "float32"}}
    problems = [p for p in check(config({"lora_dtype": "bfloat16"}, trainer=trainer)) if "lora" in p.path]
    assert [problem.path for problem in problems] == ["model.lora_configs.0.lora_dtype"]
    assert "trainer.deepspeed.dtype is float32" in problems[0].message
    assert not [p for p in check(config({"lora_dtype": "float32"}, trainer=trainer)) if "lora" in p.path]
    empty = [p for p in check(config({"target_modules": []})) if "lora" in p.path]
    assert "all-linear" in empty[0].message


@pytest.mark.parametrize("wrong", [{"lora_rank": 0}, {"lora_alpha": -1}, {"lora_dtype": "float16"}, {"rank": 3}])
def test_values_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        config(wrong)


def test_a_base_of_four_bits_stays_on_the_gpu() -> None:
    deepspeed = {"zero_stage": 3, "offload_optimizer": True, "offload_param": True}
    found = check(config({"load_in_4bit": True}, trainer={"deepspeed": deepspeed}))
    (problem,) = [one for one in found if one.path == "model.lora_configs.0.load_in_4bit"]
    assert "trainer.deepspeed.offload_param is too; a base of four bits stays on the GPU" in problem.message
    found = check(config({"load_in_4bit": True}, trainer={"deepspeed": {"zero_stage": 3}}))
    assert not [problem for problem in found if "lora" in problem.path]


def test_one_set_of_adapters_trains() -> None:
    with pytest.raises(ValueError, match="lora_configs"):
        Config.model_validate({"project": "p", "name": "n", "model": {"model_path": "/m", "lora_configs": [{}, {}]}})


def test_keys_of_trinity_rft_are_taken() -> None:
    known = {"name": "lora", "lora_rank": 8, "base_model_name": None, "path": "/adapters", "is_dummy": False}
    found = translate({"model": {"lora_configs": [known], "max_cpu_loras": 4}})
    assert (found.refused, found.values["model"]) == ([], {"lora_configs": [{"lora_rank": 8, "path": "/adapters"}]})


def test_given_adapters_decide_what_the_yaml_leaves_out_and_agree_with_the_rest() -> None:
    modules = modules_of(WEIGHTS)
    given = SimpleNamespace(folder=Path("/a"), rank=4, alpha=8.0, modules=[modules[4], modules[0]])
    chosen, problems = choose(LoraConfig(path="/a"), modules, given)
    assert (problems, chosen.rank, chosen.alpha, chosen.modules) == ([], 4, 8.0, [modules[0], modules[4]])
    same = LoraConfig(path="/a", lora_rank=4, lora_alpha=8, target_modules=["q_proj"])
    assert choose(same, modules, given)[1] == []
    other = LoraConfig(path="/a", lora_rank=8, lora_alpha=4, exclude_modules=["q_proj"])
    found = {problem.path.rpartition(".")[2]: problem.message for problem in choose(other, modules, given)[1]}
    assert found.keys() == {"lora_rank", "lora_alpha", "target_modules"}
    assert found["lora_rank"] == "is 8, and that of the adapters in /a is 4; leave it out"
    assert found["target_modules"].startswith("chooses other layers than /a, which lacks model.layers.0.self_attn.k_")
    alone, _ = choose(LoraConfig(), modules, None)
    assert (alone.rank, alone.alpha, alone.modules) == (32, 32.0, modules)


def test_given_adapters_are_refused_beside_several_stages() -> None:
    stages = [{"stage_name": "one"}, {"stage_name": "two"}]
    several = config({"path": "/a"}, stages=stages)  # type: ignore[arg-type]
    assert [p.path for p in check(several) if "lora" in p.path] == ["model.lora_configs.0.path"]
    assert not [p for p in check(config({"path": "/a"}, stages=stages[:1])) if "lora" in p.path]  # type: ignore[arg-type]


def test_versions_of_adapters_are_small_and_never_differences() -> None:
    storage = {"synchronizer": {"storage": ["folder", "jetstream"], "full_interval": 5}}
    with_lora, without = config({}, **storage), config({}, **storage)
    without = without.model_copy(update={"model": without.model.model_copy(update={"lora_configs": None})})
    parameters = 7e9
    assert [p.path for p in check_synchronizer(without, parameters)] == ["synchronizer.storage"]
    assert not list(check_synchronizer(with_lora, parameters))
    assert any("never a difference" in sentence for sentence in weights_advice(with_lora))
    assert "differences" in stores(without)
    assert "differences" not in stores(with_lora)
    assert "adapters, merged by the explorers" in transports(with_lora)


def test_unmerged_adapters_are_held_for_every_version_in_use_and_the_next() -> None:
    def held(**sync: Any) -> int:
        return make_plan(config({"merged": False}, synchronizer=sync)).adapters_held

    assert LoraConfig().merged
    assert held() == 2
    assert held(sync_offset=1) == 3
    assert held(sync_interval=4) == 2, "a task begins with one of two versions at most"
    assert held(sync_interval=2, sync_offset=4) == 4
    assert held(sync_offset=1000) == 16


@pytest.mark.parametrize(
    ("choice", "key", "words"),
    [
        ({"lora_rank": 513}, "lora_rank", "is 513, and vLLM computes unmerged adapters up to rank 512; set merged"),
        ({"target_modules": [".visual.qkv"]}, "target_modules", "vision tower, which vLLM does not adapt; leave them"),
    ],
)
def test_adapters_that_vllm_cannot_hold_are_refused(choice: dict[str, Any], key: str, words: str) -> None:
    (problem,) = [p for p in check(config({"merged": False, **choice})) if "lora" in p.path]
    assert problem.path == f"model.lora_configs.0.{key}" and words in problem.message
    assert not [p for p in check(config(choice)) if "lora" in p.path]


def test_layers_that_a_regex_finds_in_a_tower_and_ranks_of_a_folder_are_refused() -> None:
    (problem,) = refuse_unmerged(8, ["model.layers.0.mlp.up_proj", "model.visual.blocks.0.mlp.up_proj"])
    assert problem.path == "model.lora_configs.0.target_modules" and "choose model.visual.blocks.0" in problem.message
    (problem,) = refuse_unmerged(1024, ["model.layers.0.mlp.up_proj"])
    assert problem.path == "model.lora_configs.0.path" and "of rank 1024" in problem.message
    assert not list(refuse_unmerged(512, ["model.layers.0.mlp.up_proj"]))


def test_unmerged_adapters_travel_by_storage() -> None:
    unmerged = config({"merged": False}, synchronizer={"sync_method": "nccl"})
    assert transports(unmerged) == "a version (adapters, held unmerged by the engines) every 1 step(s), by storage"
    assert any("sync_method: nccl has no effect" in sentence for sentence in weights_advice(unmerged))
    merged = config({}, synchronizer={"sync_method": "nccl"})
    assert not any("sync_method" in sentence for sentence in weights_advice(merged))


YARN = {"rope_type": "yarn", "factor": 4.0}


def with_rope(**rope: Any) -> Config:
    return Config.model_validate({"project": "p", "name": "n", "model": {"model_path": "/m", "rope_scaling": rope}})


def test_names_of_rope_scaling_of_trinity_rft_and_verl_are_taken() -> None:
    found = translate({"model": {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1e6}})
    assert (found.refused, found.values["model"]) == ([], {"rope_scaling": YARN, "rope_theta": 1e6})
    verl = {"trainer_config": {"actor_rollout_ref": {"model": {"rope_scaling": YARN, "rope_theta": 1e6}}}}
    found = translate({"trainer": verl})
    assert (found.refused, found.values["model"]) == ([], {"rope_scaling": YARN, "rope_theta": 1e6})
    refused = translate({"trainer": {"trainer_config": {"critic": {"model": {"rope_theta": 1e6}}}}}).refused
    assert "the critic's own config.json" in refused[0].message


@pytest.mark.parametrize(
    ("rope", "path", "words"),
    [
        ({"rope_type": "yarn"}, "factor", "rope_type yarn needs it"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor", "is missing"),
        ({**YARN, "low_freq_factor": 1.0}, "low_freq_factor", "is not of rope_type yarn"),
        ({"rope_type": "default", "factor": 2.0}, "factor", "is not of rope_type default"),
    ],
)
def test_numbers_of_rope_scaling_that_are_missing_or_too_many_are_named(
    rope: dict[str, Any], path: str, words: str
) -> None:
    problem = next(iter(check_rope(with_rope(**rope))))
    assert problem.path == f"model.rope_scaling.{path}" and words in problem.message
    assert not list(check_rope(with_rope(**YARN, beta_fast=16.0)))


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "yam"])
def test_kinds_of_rope_scaling_that_follow_the_length_of_a_prompt_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="rope_type"):
        with_rope(rope_type=kind, factor=2.0)
