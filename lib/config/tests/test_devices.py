"""Problems of a plan that this machine's GPUs cannot take name the numbers and the next best choice."""

import json
from pathlib import Path

import pytest

from trinity.config import Plan, make_plan
from trinity.config.advice import memory_by_machines
from trinity.config.devices import MemorySplit, describe_sharing, problems, ranks_sharing, split_memory
from trinity.config.load import parse
from trinity.config.memory import Sharding, cache_gib, certain_gib, checkpoint_gib, host_gib, version_gib
from trinity.runtime.devices import Gpu, TorchBuild, mismatch

pytestmark = pytest.mark.core

BASE = """
model: {model_path: a/model-7.0B, max_model_len: 4096}
algorithm: {algorithm_type: grpo, repeat_times: 4, kl_loss_fn: none}
buffer:
  batch_size: 8
  explorer_input: {taskset: {name: t, path: d.jsonl}}
"""
CUDA_13 = TorchBuild("2.11.0+cu130", "13.0")
HOST = 2000.0


def plan_of(*overrides: str, text: str = BASE) -> Plan:
    return make_plan(parse(text, overrides=overrides))


def gpus(count: int, gib: float = 140.0, driver: str = "580.65.06") -> list[Gpu]:
    return [Gpu(str(index), "NVIDIA Some", gib, gib, driver) for index in range(count)]


def found(plan: Plan, cards: list[Gpu], torch: TorchBuild | None = CUDA_13, host: float = HOST) -> dict[str, str]:
    return {problem.path: problem.message for problem in problems(plan, cards, torch, host)}


def test_a_torch_that_cannot_use_the_driver_is_a_problem() -> None:
    old = gpus(2, driver="550.54.15")
    assert found(plan_of(), old) == {"cluster.gpu_per_node": mismatch(old, CUDA_13)}


@pytest.mark.parametrize(
    ("overrides", "here", "said"),
    [
        (["engine_num=5"], 4, "5 engine(s) of 1 GPU(s) and at least one for the trainer do not fit on the 4 GPU(s) "
                              "here; set it to 3"),
        (["engine_num=1", "tensor_parallel_size=5"], 4, "set explorer.rollout_model.tensor_parallel_size to 3 or less"),
        (["engine_num=2"], 1, "this takes 3 GPUs; set CUDA_VISIBLE_DEVICES to nothing"),
    ],
)  # fmt: skip
def test_too_few_gpus_are_said_with_what_would_fit(overrides: list[str], here: int, said: str) -> None:
    plan = plan_of(*(f"explorer.rollout_model.{override}" for override in overrides))
    problem = found(plan, gpus(here))["explorer.rollout_model.engine_num"]
    assert said in problem


def test_engines_that_need_every_gpu_share_them_with_the_trainer() -> None:
    plan = plan_of(text=BASE.replace("7.0B", "1.5B"))
    assert found(plan, gpus(1, gib=80)) == {}
    # 1.5e9 x 18 bytes of states and 4 GiB beside; 3.0e9 bytes of weights and 4 GiB beside for the engine.
    split = split_memory(plan, gpus(1, gib=80)[0], 1)
    assert isinstance(split, MemorySplit)
    assert split.engine + split.trainer == pytest.approx(79)
    assert split.trainer >= 1.5e9 * 18 / 2**30 + 4
    assert split.engine >= 3e9 / 2**30 + 4
    assert describe_sharing(plan, gpus(1, gib=80)) == (
        f"engine and trainer share each GPU: {split.engine:.1f} and {split.trainer:.1f} GiB of "
        "GPU 0 (NVIDIA Some, 80.0 GiB)"
    )
    assert describe_sharing(plan, gpus(2)) == "", "the trainer has one of its own"
    four = plan_of("explorer.rollout_model.engine_num=4", text=BASE.replace("7.0B", "1.5B"))
    assert found(four, gpus(4, gib=80)) == {}
    assert ranks_sharing(four) == 4


def test_what_engine_and_trainer_may_take_is_said_where_they_do_not_fit() -> None:
    problem = found(plan_of(), gpus(1, gib=100))["explorer.rollout_model.engine_num"]
    assert problem.startswith("engine and trainer share GPU 0 (NVIDIA Some, 100.0 GiB): the engine needs at least 17.0")
    assert "the trainer 121.3 (states 117.3)" in problem
    assert "with trainer.deepspeed.offload_optimizer it is" in problem
    assert problem.endswith(", or use another GPU")
    assert found(plan_of("trainer.deepspeed.offload_optimizer=true"), gpus(1, gib=100)) == {}
    small = BASE.replace("7.0B", "1.5B")
    greedy = found(plan_of("explorer.rollout_model.gpu_memory_utilization=0.9", text=small), gpus(1, gib=80))
    said = greedy["explorer.rollout_model.gpu_memory_utilization"]
    assert said.startswith("is 0.9: 72.0 of GPU 0 (NVIDIA Some, 80.0 GiB), which the trainer shares")
    most = float(said.partition("set it to ")[2].split()[0])
    fits = plan_of(f"explorer.rollout_model.gpu_memory_utilization={most}", text=small)
    assert found(fits, gpus(1, gib=80)) == {}


def test_the_cache_of_all_rollouts_is_the_most_a_sharing_engine_takes(tmp_path: Path) -> None:
    path = engine_model(tmp_path, layers=4)  # 16 KiB a token; 8 x 4 rollouts of 4,096 tokens take 2 GiB
    (tmp_path / "model.safetensors").open("wb").truncate(2**30)
    for offset in (0, 1):
        plan = plan_of(f"model.model_path={path}", f"synchronizer.sync_offset={offset}")
        split = split_memory(plan, gpus(1, gib=140)[0], 1)
        assert isinstance(split, MemorySplit)
        assert split.engine == pytest.approx(1 + 4 + 2 * (1 + offset), abs=0.01)


def test_what_fits_is_no_problem() -> None:
    assert found(plan_of(), gpus(2)) == {}
    assert found(plan_of("explorer.rollout_model.engine_num=3"), gpus(4, gib=200)) == {}
    assert found(plan_of("mode=train"), gpus(1)) == {}


def test_the_cluster_of_the_yaml_limits_what_is_used() -> None:
    rollout = "explorer.rollout_model.engine_num=2"
    shared = plan_of(rollout, "cluster.node_num=1", "cluster.gpu_per_node=2", text=BASE.replace("7.0B", "1.5B"))
    assert describe_sharing(shared, gpus(8)).startswith("engine and trainer share each GPU")
    assert found(plan_of("cluster.node_num=1", "cluster.gpu_per_node=2"), gpus(8)) == {}


def test_training_states_must_fit_on_the_fewest_machines_too() -> None:
    """7e9 x (2 + 12 / ranks) bytes under ZeRO 2: 91.3 GiB on one rank, 52.2 on two. `memory` counts gradients too."""
    two = ["mode=train", "cluster.node_num=2", "cluster.gpu_per_node=1"]
    assert found(plan_of(*two), gpus(1, gib=60)) == {}
    problem = found(plan_of(*two, "cluster.least_nodes=1"), gpus(1, gib=60))["cluster.least_nodes"]
    assert problem.startswith(
        "is 1, but weights and training states take 91.3 GiB on each of 1 rank(s) of 1 machine(s)"
    )
    assert problem.endswith("set it to 2")
    assert "on each of 2 rank(s)" in found(plan_of(*two), gpus(1, gib=50))["trainer.deepspeed.zero_stage"]
    four = ["mode=train", "cluster.node_num=4", "cluster.gpu_per_node=1", "cluster.least_nodes=1"]
    assert found(plan_of(*four), gpus(1, gib=60))["cluster.least_nodes"].endswith("set it to 2")
    rows = [row.split() for row in memory_by_machines(plan_of(*four, "cluster.least_nodes=2"))]
    assert rows == [
        ["machines", "ranks", "GiB", "a", "rank"],
        ["2", "2", "65.2"],
        ["3", "3", "47.8"],
        ["4", "4", "39.1"],
    ]
    assert memory_by_machines(plan_of()) == []


@pytest.mark.parametrize(
    ("ranks", "gib", "host", "overrides", "said"),
    [
        # 7e9 x (2 + 12) bytes = 91.3 GiB on one rank; 2 ranks of ZeRO 2: 52.2, of ZeRO 3: 45.6.
        (1, 80.0, HOST, [], "take 91.3 GiB on each of 1 rank(s), more than GPU 1 (NVIDIA Some, 80.0 GiB) has; with "
                            "trainer.deepspeed.offload_optimizer it is 13.0 GiB a rank and 104.3 GiB of host memory"),
        (2, 48.0, HOST, [], "with trainer.deepspeed.zero_stage 3 it is 45.6 GiB a rank"),
        (2, 40.0, 64.0, [], "ZeRO 3 needs 3 such GPUs for the trainer; or train only adapters"),
        (1, 12.0, HOST, ["trainer.deepspeed.offload_optimizer=true"],
         "with trainer.deepspeed.zero_stage 3, offload_optimizer and offload_param it is 0.0 GiB a rank"),
    ],
)  # fmt: skip
def test_training_states_that_do_not_fit_name_the_next_best_choice(
    ranks: int, gib: float, host: float, overrides: list[str], said: str
) -> None:
    cards = [*gpus(1), *(Gpu(str(1 + rank), "NVIDIA Some", gib, gib, "580.65") for rank in range(ranks))]
    problem = found(plan_of(*overrides), cards, host=host)["trainer.deepspeed.zero_stage"]
    assert problem.startswith("is 2: weights and training states of 7.00 billion parameters")
    assert said in problem


def test_what_is_recommended_is_not_refused_itself() -> None:
    cards = gpus(2, gib=48)
    assert "offload_optimizer" in found(plan_of(), cards)["trainer.deepspeed.zero_stage"]
    assert found(plan_of("trainer.deepspeed.offload_optimizer=true"), cards) == {}


def test_offloading_needs_host_memory() -> None:
    plan = plan_of("trainer.deepspeed.offload_optimizer=true")
    problem = found(plan, gpus(2), host=64.0)["trainer.deepspeed.offload_optimizer"]
    assert "needs 104.3 GiB of this machine's memory, 64.0 are available" in problem


def test_adapters_need_the_base_weights_alone() -> None:
    lora = "model.lora_configs=[{lora_rank: 8}]"
    sharding = Sharding(1, 2)
    assert certain_gib(plan_of(lora), 7e9, sharding) == pytest.approx(14e9 / 2**30)
    assert host_gib(plan_of(lora), 7e9, sharding) == 0


def sized_model(folder: Path, **sizes: int) -> str:
    """A model of 7 billion parameters in bfloat16."""
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16", "num_hidden_layers": 32, **sizes}))
    (folder / "model.safetensors").open("wb").truncate(14 * 10**9)
    return str(folder)


def test_a_base_of_four_bits_is_smaller_and_whole_on_every_rank(tmp_path: Path) -> None:
    model = sized_model(tmp_path, vocab_size=100_000, hidden_size=5_000, intermediate_size=20_000)
    plan = plan_of(f"model.model_path={model}", "model.lora_configs=[{load_in_4bit: true}]")
    ends = 2 * 100_000 * 5_000
    held = (7e9 - ends) * (4 + 8 / 64 + 32 / (64 * 256)) / 8
    assert certain_gib(plan, 7e9, Sharding(1, 2)) == pytest.approx((held + 2 * ends) / 2**30)
    assert certain_gib(plan, 7e9, Sharding(4, 3)) == pytest.approx((held + 2 * ends / 4) / 2**30)


def test_adapters_of_experts_are_counted(tmp_path: Path) -> None:
    sizes = {"vocab_size": 100_000, "hidden_size": 2_048, "moe_intermediate_size": 768, "num_experts": 32}
    lora = "model.lora_configs=[{lora_rank: 16, target_modules: [q_proj, experts]}]"
    plan = plan_of(f"model.model_path={sized_model(tmp_path, **sizes)}", lora)
    numbers = 32 * 32 * 16 * (2 * 2_048 + 3 * 768)
    assert certain_gib(plan, 7e9, Sharding(1, 2)) == pytest.approx((14e9 + (2 + 12) * numbers) / 2**30)
    assert certain_gib(plan, 7e9, Sharding(4, 2)) == pytest.approx((14e9 + (2 + 12 / 4) * numbers) / 2**30)
    assert version_gib(plan, 7e9) == pytest.approx(2 * numbers / 2**30)
    assert checkpoint_gib(plan, 7e9) == pytest.approx((12 + 2) * numbers / 2**30)
    both = plan_of(f"model.model_path={tmp_path}", lora.replace("lora_rank", "load_in_4bit: true, lora_rank"))
    held = 7e9 - 2 * 100_000 * 2_048 - 3 * 32 * 32 * 2_048 * 768
    smaller = certain_gib(plan, 7e9, Sharding(1, 2)) - certain_gib(both, 7e9, Sharding(1, 2))
    assert smaller == pytest.approx(held * (2 - 4.127 / 8) / 2**30, rel=1e-3), "experts stay in bfloat16"


def engine_model(folder: Path, layers: int = 32) -> Path:
    """32 layers, 8 key-value heads of 128, in bf16: 128 KiB a token."""
    (folder / "config.json").write_text(json.dumps({
        "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "num_hidden_layers": layers,
    }))  # fmt: skip
    (folder / "model.safetensors").open("wb").truncate(14 * 2**30)
    return folder


def test_the_cache_of_a_sequence_is_by_the_models_shape(tmp_path: Path) -> None:
    model = str(engine_model(tmp_path))
    assert cache_gib(model, 8192, 1) == pytest.approx(1.0)
    assert cache_gib(model, 8192, 4) == pytest.approx(0.25)
    assert cache_gib("owner/unknown", 8192, 1) == 0
    shape = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "text_config": shape}))
    assert cache_gib(model, 8192, 1) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("gib", "length", "said"),
    [
        (17.0, 8192, "is 0.8: 13.6 of GPU 0 (NVIDIA Some, 17.0 GiB); the weights take 14.0 GiB a GPU, and the "
                     "key-value cache of one sequence of 8192 tokens 1.0 GiB; set it to 0.93 at least"),
        (15.5, 8192, "set it to 0.95, and the lengths to 5939 tokens together at most"),
        (12.0, 8192, "set explorer.rollout_model.tensor_parallel_size to 2"),
    ],
)  # fmt: skip
def test_an_engine_that_does_not_fit_names_the_next_best_choice(
    gib: float, length: int, said: str, tmp_path: Path
) -> None:
    changes = (f"model.model_path={engine_model(tmp_path)}", f"model.max_model_len={length}", "mode=explore")
    plan = plan_of(*changes, "explorer.rollout_model.gpu_memory_utilization=0.8")
    assert said in found(plan, gpus(1, gib))["explorer.rollout_model.gpu_memory_utilization"]


def test_auxiliary_models_are_looked_at_with_keys_of_their_own() -> None:
    judges = "explorer.auxiliary_models=[{model_path: x/judge-1.0B}, {model_path: y/judge-72B}]"
    keys = found(plan_of(judges, "mode=explore"), gpus(3))
    assert list(keys) == ["explorer.auxiliary_models.1.gpu_memory_utilization"]


def test_without_gpus_the_models_memory_on_the_cpu_counts() -> None:
    problem = found(plan_of(), [], host=24.0)["model.model_path"]
    assert "there is no GPU here, and on the CPU they take 130.4 GiB, of which 24.0 are available" in problem
    assert found(plan_of(text=BASE.replace("7.0B", "0.5B")), [], host=24.0) == {}
    assert found(plan_of(), [], host=0.0) == {}, "where the system does not say, nothing is refused"


def test_ranks_that_cannot_share_sequences_are_said() -> None:
    key = "trainer.ulysses_sequence_parallel_size"
    plan = plan_of(f"{key}=2")
    for cards in ([], gpus(4), gpus(1)):  # one on the CPU, three of four, one that the engine shares
        assert "does not divide the" in found(plan, cards)[key]
    assert key not in found(plan, gpus(3))


def test_a_reference_in_host_memory_is_counted_there() -> None:
    cards = gpus(2, gib=100)
    reference = ["algorithm.kl_loss_fn=k3"]
    assert "take 104.3 GiB" in found(plan_of(*reference), cards)["trainer.deepspeed.zero_stage"]
    away = [*reference, "trainer.deepspeed.offload_reference=true"]
    assert found(plan_of(*away), cards) == {}
    assert host_gib(plan_of(*away), 7e9, Sharding(1, 2)) == pytest.approx(13.04, abs=0.01)
