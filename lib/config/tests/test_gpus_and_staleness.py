"""Who gets which GPUs, how old weights may be, and what is refused or advised before anything starts."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity.config import ConfigError, Plan, make_plan
from trinity.config.advice import memory
from trinity.config.load import parse
from trinity.config.memory import cache_gib, parameters_of, recomputing_gib, vocabulary_of
from trinity.config.plan import GpuSplit, Staleness

pytestmark = pytest.mark.core

BASE = """
project: p
name: n
checkpoint_root_dir: /tmp/none
model: {model_path: m, max_prompt_tokens: 16, max_response_tokens: 16}
algorithm: {algorithm_type: grpo, repeat_times: 4}
buffer:
  batch_size: 8
  explorer_input: {taskset: {name: t, path: d.jsonl}}
"""
SFT = """
mode: train
model: {model_path: m, max_model_len: 64}
algorithm: {algorithm_type: sft}
buffer:
  train_batch_size: 8
  trainer_input: {experience_buffer: {path: d.jsonl}}
"""
JUDGES = "explorer.auxiliary_models=[{model_path: x/judge, engine_num: 2}, {model_path: y/scorer}]"


def plan_of(*overrides: str, text: str = BASE) -> Plan:
    return make_plan(parse(text, overrides=overrides))


def problems(*overrides: str, text: str = BASE) -> dict[str, str]:
    """Message by key."""
    with pytest.raises(ConfigError) as refused:
        parse(text, overrides=overrides)
    return {problem.path: problem.message for problem in refused.value.problems}


def cluster(nodes: int, each: int) -> list[str]:
    return [f"cluster.node_num={nodes}", f"cluster.gpu_per_node={each}"]


def engines(number: int, parallel: int = 1) -> list[str]:
    rollout = "explorer.rollout_model"
    return [f"{rollout}.engine_num={number}", f"{rollout}.tensor_parallel_size={parallel}"]


@pytest.mark.parametrize(
    ("overrides", "split"),
    [
        ([*cluster(1, 8), *engines(2, 2)], GpuSplit(8, 4, 0, 4)),
        ([*cluster(2, 8), *engines(2, 2), JUDGES], GpuSplit(16, 4, 3, 9)),
        ([*cluster(2, 8), *engines(2, 2), "trainer.num_ranks=4"], GpuSplit(16, 4, 0, 4)),
        ([*cluster(1, 4), *engines(4), JUDGES, "mode=train"], GpuSplit(4, 0, 0, 4)),
        ([*cluster(1, 8), *engines(4), JUDGES, "mode=explore"], GpuSplit(8, 4, 3, 0)),
        ([*cluster(1, 8), *engines(8), "mode=serve"], GpuSplit(8, 8, 0, 0)),
        (engines(2), GpuSplit(0, 2, 0, 0)),
    ],
)
def test_the_trainer_gets_what_engines_and_auxiliary_models_leave(overrides: list[str], split: GpuSplit) -> None:
    assert plan_of(*overrides).gpus == split


def test_a_dataset_alone_is_trained_on_all_gpus() -> None:
    assert plan_of(*cluster(2, 4), *engines(2), JUDGES, text=SFT).gpus == GpuSplit(8, 0, 0, 8)


@settings(deadline=None)
@given(nodes=st.integers(0, 4), each=st.integers(0, 8), engine=st.integers(1, 4), parallel=st.integers(1, 4))
def test_what_is_taken_fits_into_the_cluster_with_a_gpu_for_the_trainer(
    nodes: int, each: int, engine: int, parallel: int
) -> None:
    total = max(1, nodes) * each
    overrides = [*cluster(nodes, each), *engines(engine, parallel)]
    if total and engine * parallel > total:
        assert "explorer.rollout_model.engine_num" in problems(*overrides)
        return
    gpus = plan_of(*overrides).gpus
    if gpus.shared:
        assert gpus.explorer == gpus.trainer == total
    else:
        assert gpus.explorer + gpus.auxiliary + gpus.trainer == total if total else gpus.trainer == 0


def test_engines_and_auxiliary_models_that_do_not_fit_are_refused_with_the_sum() -> None:
    said = problems(*cluster(1, 4), *engines(2), JUDGES)["explorer.rollout_model.engine_num"]
    assert (
        said == "2 engines of 1 GPU(s) take 2 and the auxiliary models 3 of the cluster's 4 GPUs, more than there are"
    )
    shared = plan_of(*cluster(1, 5), *engines(2), JUDGES).gpus
    assert (shared.explorer, shared.auxiliary, shared.trainer, shared.shared) == (2, 3, 2, True)
    assert plan_of(*cluster(1, 5), *engines(2), JUDGES, "mode=explore").gpus.explorer == 2
    assert "more than there are" in str(problems(*cluster(1, 4), *engines(2), JUDGES, "mode=explore"))


def test_ranks_that_no_gpu_is_left_for_are_refused() -> None:
    said = problems(*cluster(1, 8), *engines(4), "trainer.num_ranks=5")
    assert said == {"trainer.num_ranks": "is 5, but 4 of the cluster's 8 GPUs are left for it"}
    assert plan_of(*cluster(1, 8), *engines(4), "trainer.num_ranks=4").gpus.trainer == 4
    said = problems(*cluster(1, 4), *engines(4), "trainer.num_ranks=5")
    assert said == {"trainer.num_ranks": "is 5, but the engines, whose GPUs it shares, have 4"}
    assert plan_of(*engines(4), "trainer.num_ranks=64").gpus.trainer == 0  # the machine decides
    said = problems(*cluster(1, 4), "trainer.num_ranks=5", text=SFT)
    assert said == {"trainer.num_ranks": "is 5, but 4 of the cluster's 4 GPUs are left for it"}


def test_two_auxiliary_models_of_one_name_are_refused() -> None:
    models = "explorer.auxiliary_models=[{model_path: x/judge}, {model_path: y/other, name: judge}]"
    assert problems(models) == {"explorer.auxiliary_models.1.name": "is 'judge', which another model has already"}


@pytest.mark.parametrize(
    ("overrides", "bound"),
    [
        ([], 0),
        (["synchronizer.sync_interval=4", "synchronizer.sync_offset=1"], 4),
        (["synchronizer.sync_interval=4", "synchronizer.sync_style=explorer_driven"], 7),
        (["synchronizer.sync_interval=4", "synchronizer.sync_style=trainer_driven", "synchronizer.sync_offset=2"], 9),
        (["synchronizer.sync_style=explorer_driven"], 1),
    ],
)
def test_the_bound_of_a_style(overrides: list[str], bound: int) -> None:
    plan = plan_of(*overrides)
    assert plan.staleness.bound == bound
    assert plan.outstanding_groups == (bound + 1) * 8


@settings(deadline=None)
@given(capacity=st.integers(1, 2000), interval=st.integers(1, 6), offset=st.integers(0, 4))
def test_fully_async_fills_the_capacity_and_is_never_behind_the_driven_styles(
    capacity: int, interval: int, offset: int
) -> None:
    plan = plan_of(
        "synchronizer.sync_style=fully_async",
        f"synchronizer.sync_interval={interval}",
        f"synchronizer.sync_offset={offset}",
        f"buffer.trainer_input.experience_buffer.capacity={capacity}",
    )
    driven = Staleness(interval, offset + interval)
    outstanding = plan.outstanding_groups * 4
    if plan.staleness == driven:
        assert capacity - plan.experiences_per_step < outstanding
    else:
        assert plan.staleness.bound > driven.bound
        assert capacity - plan.experiences_per_step < outstanding <= capacity


@given(interval=st.integers(1, 9), offset=st.integers(0, 9), step=st.integers(0, 99))
def test_as_many_batches_are_open_as_have_their_gates_met(interval: int, offset: int, step: int) -> None:
    staleness = Staleness(interval, offset)
    batches = staleness.open_batches(step)
    assert staleness.gate(batches - 1) <= step < staleness.gate(batches)


def test_fully_async_without_a_buffer_has_the_default_capacity() -> None:
    plan = plan_of("synchronizer.sync_style=fully_async")
    assert plan.outstanding_groups == 10000 // 32 * 8


@pytest.mark.parametrize(
    ("key", "given_", "meant"),
    [
        ("sync_method", "NCCL", "nccl"),
        ("sync_method", "Checkpoint", "checkpoint"),
        ("sync_method", "ONLINE", "nccl"),
        ("sync_method", "offline", "checkpoint"),
        ("sync_method", "HCCL", "nccl"),
        ("sync_style", "FIXED", "fixed"),
        ("sync_style", "Dynamic_By_Explorer", "explorer_driven"),
        ("sync_style", "dynamic_by_trainer", "trainer_driven"),
        ("sync_style", "Fully_Async", "fully_async"),
    ],
)
def test_old_names_and_any_case_are_taken(key: str, given_: str, meant: str) -> None:
    config = parse(BASE, overrides=[f"synchronizer.{key}={given_}"])
    assert getattr(config.synchronizer, key) == meant
    named = any(notice.startswith(f"synchronizer.{key}: {given_} is an old name") for notice in config.notices)
    assert named == (given_.lower() != meant)


def test_a_misspelt_style_is_answered_with_the_right_one() -> None:
    said = problems("synchronizer.sync_style=explorer_drven")["synchronizer.sync_style"]
    assert "did you mean 'explorer_driven'" in said


TWO = "buffer.explorer_input.tasksets=[{name: a, path: x}, {name: a, path: y}]"
EVAL = "buffer.explorer_input.eval_tasksets=[{name: t, path: x}, {path: y}, {path: z}]"
SELECTOR = "buffer.explorer_input.taskset.data_selector"


def test_tasksets_have_names_of_their_own() -> None:
    text = BASE.replace("{taskset: {name: t, path: d.jsonl}}", "{}")
    key = "buffer.explorer_input.tasksets.1.name"
    assert problems(TWO, text=text) == {key: "is 'a', which buffer.explorer_input.tasksets.0 has already"}
    plan = plan_of(EVAL)  # a name may be used for training and for evaluation; without one it is numbered
    assert [taskset.name for taskset in plan.eval_tasksets] == ["t", "eval_taskset_1", "eval_taskset_2"]
    assert "buffer.explorer_input.tasksets" in problems(TWO)  # beside taskset


@pytest.mark.parametrize(
    ("override", "key", "said"),
    [
        (f"{SELECTOR}={{selector_type: diff_based, kwargs: {{targt_reward: 0.4}}}}", f"{SELECTOR}.kwargs.targt_reward",
         "diff_based has no such argument; did you mean 'target_reward'?"),
        (f"{SELECTOR}={{selector_type: diff_based, kwargs: {{tau: high}}}}", f"{SELECTOR}.kwargs.tau", "is 'high'"),
        (f"{SELECTOR}={{selector_type: shuffle, kwargs: {{m: 1}}}}", f"{SELECTOR}.kwargs.m",
         "shuffle has no such argument; known: none"),
        (f"{SELECTOR}.selector_type=offline_easy2hard", f"{SELECTOR}.feature_keys", "is empty"),
        (f"{SELECTOR}.selector_type=shufle", f"{SELECTOR}.selector_type", "did you mean 'shuffle'?"),
        ("monitor={monitor_type: wandb, monitor_args: {base_ur: x}}", "monitor.monitor_args.base_ur",
         "wandb has no such argument; did you mean 'base_url'?"),
        ("monitor={monitor_type: tensorboard, monitor_args: {base_url: x}}", "monitor.monitor_args.base_url",
         "tensorboard has no such argument; known: none"),
        ("mode=bench", "buffer.explorer_input.eval_tasksets", "is missing; mode bench evaluates on them"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(override: str, key: str, said: str) -> None:
    found = problems(override)
    assert list(found) == [key]
    assert said in found[key]


def test_a_datasets_selector_is_checked_too() -> None:
    place = "buffer.trainer_input.experience_buffer.data_selector"
    assert list(problems(f"{place}.selector_type=offline_easy2hard", text=SFT)) == [f"{place}.feature_keys"]
    assert "learns from rewards" in problems(f"{place}.selector_type=diff_based", text=SFT)[f"{place}.selector_type"]
    assert list(problems(f"{place}.kwargs={{m: 2}}", text=SFT)) == [f"{place}.kwargs.m"]


def advised(*overrides: str, text: str = BASE) -> list[str]:
    return [notice.partition(":")[0] for notice in parse(text, overrides=overrides).notices]


def test_lengths_that_are_not_given_are_advised() -> None:
    text = BASE.replace(", max_prompt_tokens: 16, max_response_tokens: 16", "")
    assert "model.max_model_len" in advised(text=text)
    assert "model.max_model_len" not in advised()
    assert "model.max_model_len" not in advised("mode=explore", text=text)  # the run that is joined knows
    lengths = plan_of(text=text).lengths
    assert (lengths.prompt, lengths.response, lengths.model) == (2048, 2048, 4096)


def test_an_interval_of_evaluations_without_tasksets_is_advised() -> None:
    assert "explorer.eval_interval" in advised("explorer.eval_interval=5")
    assert "explorer.eval_interval" not in advised()
    assert "explorer.eval_interval" not in advised("explorer.eval_interval=5", EVAL)


def test_tasks_of_an_explorer_that_joins_are_advised() -> None:
    assert "buffer.explorer_input" in advised("mode=explore")
    text = BASE.replace("  explorer_input: {taskset: {name: t, path: d.jsonl}}\n", "")
    assert "buffer.explorer_input" not in advised("mode=explore", text=text)
    assert "buffer.explorer_input" not in advised()


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("Qwen/Qwen2.5-1.5B-Instruct", 1.5e9),
        ("Qwen2.5-1.5B-Instruct", 1.5e9),
        ("/models/Qwen2-7B-Instruct", 7e9),
        ("HuggingFaceTB/SmolLM2-135M", 135e6),
        ("meta-llama/Llama-3.2-1B", 1e9),
        ("owner/7b-of-something-else/model-32b-v0.1", 32e9),
        ("some/model", None),
        ("FsfairX-LLaMA3-RM-v0.1", None),
        ("model-4bit", None),
        ("", None),
    ],
)
def test_parameters_are_read_off_a_name(name: str, count: float | None) -> None:
    assert parameters_of(name) == (None if count is None else (pytest.approx(count), "by its name"))


@pytest.mark.parametrize(
    ("config", "count"), [('{"dtype": "float32"}', 250), ('{"torch_dtype": "bfloat16"}', 500), ("", 500)]
)
def test_parameters_are_counted_in_a_folder_of_any_name(tmp_path: Path, config: str, count: int) -> None:
    folder = tmp_path / "Qwen2.5-72B"
    folder.mkdir()
    assert parameters_of(str(folder)) == (72e9, "by its name")
    for part in (1, 2):
        (folder / f"model-{part}.safetensors").write_bytes(b"\0" * 500)
    (folder / "consolidated.safetensors").write_bytes(b"\0" * 1000)
    (folder / "config.json").write_text(config)
    assert parameters_of(str(folder)) == (count, "by its files")


@pytest.mark.parametrize("size", ["'8'", "-8", "[8]", "null", "true", "1e3", "1" + "0" * 30])
def test_sizes_of_a_model_that_are_none_are_unknown(tmp_path: Path, size: str) -> None:
    names = ("num_attention_heads", "hidden_size", "num_hidden_layers", "head_dim", "intermediate_size", "vocab_size")
    fields = ", ".join(f'"{name}": {size}' for name in names).replace("'", '"')
    (tmp_path / "config.json").write_text(f'{{{fields}, "text_config": {{{fields}}}}}')
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "nowhere")
    folder = str(tmp_path)
    assert (cache_gib(folder, 8, 1), recomputing_gib(folder, 8), vocabulary_of(folder)) == (0, 0, 0)
    assert parameters_of(folder) is None
    assert (vocabulary_of("a/**"), vocabulary_of("a/[b")) == (0, 0)


def test_memory_says_what_a_rank_holds() -> None:
    text = BASE.replace("model_path: m", "model_path: a/b-1.0B")
    said = memory(plan_of(*cluster(1, 8), *engines(4), "algorithm.kl_loss_fn=none", text=text))
    assert said is not None
    gib = (2 + 4 / 4 + 12 / 4) * 1e9 / 2**30  # ZeRO 2 over the 4 GPUs left
    assert f"1.00 billion parameters by its name: training states {gib:.1f} GiB a rank" in said
    assert memory(plan_of()) is None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("repeat_times: 4", "repeat_times: 1", "algorithm.repeat_times: is 1"),
        ("algorithm_type: grpo, ", "", "algorithm.algorithm_type: is not given; grpo is taken"),
        (
            "\nbuffer:",
            "\ncluster: {node_num: 2, gpu_per_node: 8}\nbuffer:",
            "cluster.node_num: training begins once 1 other machine(s) join by mode=train_node",
        ),
    ],
)
def test_what_surprises_users_is_said(old: str, new: str, said: str) -> None:
    assert old in BASE
    assert not any(said in notice for notice in parse(BASE).notices)
    assert any(said in notice for notice in parse(BASE.replace(old, new)).notices)


def test_an_explorer_that_joins_is_told_nothing_of_what_it_does_not_choose() -> None:
    joins = "project: p\nname: n\nmode: explore\ncheckpoint_root_dir: /tmp/none\nexplorer: {name: one}\n"
    assert list(parse(joins).notices) == []


def test_the_vocabulary_is_known_by_folder_and_by_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert vocabulary_of("owner/tiny") == 0
    snapshot = tmp_path / "models--owner--tiny/snapshots/0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"vocab_size": 151936}')
    assert vocabulary_of("owner/tiny") == vocabulary_of(str(snapshot)) == 151936


@pytest.mark.parametrize("machines", [[], ["cluster.node_num=0"], ["cluster.node_num=1"]], ids=str)
def test_gpus_of_this_machine_count_without_a_number_of_machines(machines: list[str]) -> None:
    assert plan_of("cluster.gpu_per_node=2", *machines).gpus == GpuSplit(total=2, explorer=1, auxiliary=0, trainer=1)
    with pytest.raises(ConfigError, match="4 engines of 1 GPU\\(s\\) take 4 of the cluster's 2 GPUs"):
        plan_of("cluster.gpu_per_node=2", "explorer.rollout_model.engine_num=4", *machines)
