"""YAMLs as users of Trinity-RFT write them: taken as they are, every key accounted for, every typo found."""

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from trinity.compat_rft.tables import IGNORED, NOT_HERE, RENAMED, UNSUPPORTED
from trinity.compat_rft.translate import translate
from trinity.config import ConfigError, expand, load, make_plan
from trinity.config.load import parse
from trinity.config.names import reward_functions, workflows

pytestmark = pytest.mark.core

PUBLISHED = Path(__file__).parent / "trinity_rft"
NAMES = sorted(path.name for path in PUBLISHED.glob("*.yaml"))
EXAMPLE = (Path(__file__).parents[3] / "examples/grpo_gsm8k/gsm8k.yaml").read_text()
OLD = """
trainer:
  save_interval: 100
  trainer_config:
    actor_rollout_ref:
      model:
        use_remove_padding: true
        enable_gradient_checkpointing: false
      actor:
        ppo_micro_batch_size_per_gpu: 16
        optim:
          lr: 3e-5
        fsdp_config:
          param_offload: false
          optimizer_offload: true
      ref:
        fsdp_config:
          param_offload: true
    trainer:
      critic_warmup: 0
monitor:
  monitor_type: wandb
"""
EARLIER = EXAMPLE[: EXAMPLE.index("trainer:\n  save_interval")].replace("  optimizer:\n    lr: 1e-5\n", "") + OLD


def test_the_published_example_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "gsm8k.yaml"
    path.write_text(EXAMPLE)
    config = load(path)
    assert not any("old name" in notice for notice in config.notices)
    assert (config.algorithm.algorithm_type, config.algorithm.repeat_times, config.buffer.batch_size) == (
        "grpo",
        8,
        128,
    )


@pytest.mark.parametrize(
    ("given", "meant"), [("adam", "adamw"), ("AdamW", "adamw"), ("muon", "muon"), ("AdamW8bit", "adamw_8bit")]
)
def test_optimizers_have_the_names_of_trinity_rft_and_verl(given: str, meant: str) -> None:
    own = EXAMPLE.replace("  optimizer:\n", f"  optimizer:\n    optimizer_type: {given}\n")
    verls = EARLIER.replace("          lr: 3e-5\n", f"          lr: 3e-5\n          optimizer: {given}\n")
    verls = verls.replace("optimizer_offload: true", "optimizer_offload: false")
    assert parse(own).algorithm.optimizer.optimizer_type == meant
    assert parse(verls).algorithm.optimizer.optimizer_type == meant


def test_old_names_reach_the_keys_they_mean() -> None:
    config = parse(EARLIER)
    assert config.algorithm.optimizer.lr == 3e-5
    assert config.trainer.gradient_checkpointing is False
    assert config.trainer.deepspeed.offload_optimizer is True
    assert config.trainer.deepspeed.offload_reference is True
    said = "\n".join(config.notices)
    assert (config.trainer.use_remove_padding, config.trainer.micro_batch_size_per_gpu) == (True, 16)
    for key in ("use_remove_padding", "ppo_micro_batch_size_per_gpu", "critic_warmup", "optim.lr"):
        assert key in said, key


def test_what_is_not_supported_is_refused_with_its_line_unless_it_asks_for_nothing() -> None:
    text = EXAMPLE + "service:\n  data_juicer:\n    server_url: http://localhost:5005\n"
    with pytest.raises(ConfigError, match=r"line \d+: service\.data_juicer: .*not supported yet"):
        parse(text)
    parse(EXAMPLE + "data_processor:\n  experience_pipeline: null\n")
    parse(EXAMPLE.replace("explorer:", "explorer:\n  db_url: ''"))
    with pytest.raises(ConfigError, match="db_url"):
        parse(EXAMPLE.replace("explorer:", "explorer:\n  db_url: sqlite:///x"))


def test_an_old_and_a_new_name_that_disagree_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"explorer\.runner_num: is 4, but explorer\.runner_per_model is 16"):
        parse(EXAMPLE.replace("  runner_per_model: 16", "  runner_per_model: 16\n  runner_num: 4"))
    assert parse(EXAMPLE.replace("runner_per_model: 16", "runner_num: 4")).explorer.runner_per_model == 4


def test_stages_are_translated_too() -> None:
    stage = "stages:\n  - stage_name: one\n    trainer: {trainer_type: verl, save_interval: 5}\n  - stage_name: two\n"
    config = parse(EXAMPLE + stage)
    assert "stages.0.trainer.trainer_type: has no effect: the trainer is DeepSpeed" in config.notices


def _text(name: str) -> str:
    """A published YAML; the stages are meant to be added to the example."""
    text = (PUBLISHED / name).read_text()
    return (PUBLISHED / "grpo_gsm8k.yaml").read_text() + text if name.startswith("stages") else text


@pytest.mark.parametrize("name", NAMES)
def test_every_published_yaml_is_taken_as_it_is(name: str) -> None:
    config = parse(_text(name))
    assert config.project


def test_the_published_ppo_run_means_what_it_says() -> None:
    config = parse(_text("ppo_example.yaml"))
    plan = make_plan(config)
    assert (plan.gpus.explorer, plan.gpus.auxiliary, plan.gpus.trainer) == (2, 2, 4)
    assert config.trainer.critic.optimizer.lr == 1e-5
    assert config.trainer.critic.optimizer.lr_warmup_steps_ratio == 0.05
    assert config.model.critic_model_path.endswith("/models/Qwen2-7B-Instruct")
    assert [taskset.name for taskset in plan.tasksets] == ["gsm8k", "math"]
    assert plan.staleness.bound == 4
    scored = [taskset.workflow_args for taskset in (*plan.tasksets, *plan.eval_tasksets)]
    assert scored == [{"reward_model": ""}] * 4, "as veRL's reward_model.enable: by the classifier"


def test_the_published_stages_run_one_after_the_other() -> None:
    warmup, rft = (make_plan(stage) for stage in expand(parse(_text("stages_sft_then_rft.yaml"))))
    assert (warmup.algorithm.algorithm_type, warmup.groups_per_step, warmup.total_steps) == ("sft", 128, 10)
    assert (rft.algorithm.algorithm_type, rft.groups_per_step) == ("grpo", 128)


def test_lengths_that_are_not_given_are_those_of_their_time() -> None:
    config = parse(_text("grpo_gsm8k_early.yaml"))
    assert (make_plan(config).lengths.prompt, make_plan(config).lengths.response) == (2048, 2048)
    assert any("no length is given" in notice for notice in config.notices)


@pytest.mark.parametrize("name", NAMES)
def test_one_wrong_letter_is_found_and_the_right_key_named(name: str) -> None:
    """In every key of every published YAML; a key that means another one then is told by what it holds."""
    lines = _text(name).splitlines()
    for index, line in enumerate(lines):
        found = re.match(r"^( *-? *)([a-zA-Z_]+):", line)
        if found is None:
            continue
        key = found.group(2)
        place = len(key) - 1 if index % 2 else len(key) // 2
        wrong = f"{key[:place]}{'x' if key[place] != 'x' else 'y'}{key[place + 1 :]}"
        text = "\n".join([*lines[:index], f"{found.group(1)}{wrong}{line[found.end(2) :]}", *lines[index + 1 :]])
        with pytest.raises(ConfigError) as refused:
            parse(text)
        problem = next(p for p in refused.value.problems if wrong in p.path.split("."))
        assert problem.line == index + 1, line
        assert repr(key) in problem.message, problem


def test_a_shorter_key_that_exists_is_told_by_what_it_holds() -> None:
    for name, key, wrong in (
        ("grpo_gsm8k.yaml", "\nmodel:", "\nmode:"),
        ("async_explorer.yaml", "\nmodel:", "\nmode:"),
        ("ppo_example.yaml", " tasksets:", " taskset:"),
    ):
        with pytest.raises(ConfigError, match=f"did you mean '{key.strip(' :' + chr(10))}'"):
            parse(_text(name).replace(key, wrong, 1))


def test_old_names_of_values_are_accepted_in_any_case() -> None:
    text = EXAMPLE.replace("sync_method: 'nccl'", "sync_method: Online\n  sync_style: dynamic_by_explorer")
    config = parse(text)
    assert (config.synchronizer.sync_method, config.synchronizer.sync_style) == ("nccl", "explorer_driven")
    assert "synchronizer.sync_style: dynamic_by_explorer is an old name of explorer_driven" in config.notices


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"tools_key": "tools", "enable_concatenated_multi_turn": False}, ""),
        ({"image_key": "images"}, "images are for tasksets, datasets are trained as text; remove it"),
        ({"tools_key": "functions"}, "is 'functions': tools of SFT and DPO are read from the column named tools"),
        ({"enable_concatenated_multi_turn": True}, "is True: of a conversation the last message is trained; write a"),
    ],
)
def test_what_sft_would_read_or_train_otherwise_is_refused(form: dict[str, Any], said: str) -> None:
    buffer = {"train_batch_size": 4, "trainer_input": {"experience_buffer": {"path": "d.jsonl", "format": form}}}
    run = {"mode": "train", "model": {"model_path": "m"}, "algorithm": {"algorithm_type": "sft"}, "buffer": buffer}
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        parse(json.dumps(run))


def test_tables_do_not_overlap_and_lead_to_real_keys() -> None:
    assert not set(RENAMED) & set(UNSUPPORTED)
    assert not set(IGNORED) & set(UNSUPPORTED)
    for old, new in RENAMED.items():
        if "*" not in old:
            values: dict[str, object] = {}
            node = values
            for part in old.split(".")[:-1]:
                node[part] = node = {}  # type: ignore[assignment]
            node[old.split(".")[-1]] = "marker"
            found: object = translate(values).values
            for part in new.split("."):
                assert isinstance(found, dict)
                found = found[part]
            assert found == "marker", old


def test_what_is_not_here_is_so_and_says_what_to_use() -> None:
    assert not NOT_HERE.keys() & {*workflows(), *reward_functions()}
    for name in ("agentscope_react_workflow", "email_search_workflow", "intercode_sql_workflow", "rm_gallery_reward"):
        assert NOT_HERE[name].count("docs/") == 1
