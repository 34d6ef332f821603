"""YAMLs as users of Trinity-RFT write them: taken as they are, every key accounted for, every typo found."""

import re
from pathlib import Path

import pytest

from trinity.config import ConfigError, load
from trinity.config.compat import IGNORED, RENAMED, UNSUPPORTED, translate
from trinity.config.load import parse

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
    assert config.notices == ()
    assert (config.algorithm.algorithm_type, config.algorithm.repeat_times, config.buffer.batch_size) == (
        "grpo",
        8,
        128,
    )


def test_old_names_reach_the_keys_they_mean() -> None:
    config = parse(EARLIER)
    assert config.algorithm.optimizer.lr == 3e-5
    assert config.trainer.gradient_checkpointing is False
    assert config.trainer.deepspeed.offload_optimizer is True
    said = "\n".join(config.notices)
    for key in ("use_remove_padding", "ppo_micro_batch_size_per_gpu", "critic_warmup", "monitor_type", "optim.lr"):
        assert key in said, key


def test_what_is_not_supported_is_refused_with_its_line_unless_it_asks_for_nothing() -> None:
    text = EXAMPLE + "data_processor:\n  experience_pipeline:\n    operators: [{name: reward_filter}]\n"
    with pytest.raises(ConfigError, match=r"line \d+: data_processor\.experience_pipeline: .*not supported yet"):
        parse(text)
    parse(EXAMPLE + "data_processor:\n  experience_pipeline: null\n")
    parse(EXAMPLE.replace("trainer:", "trainer:\n  ulysses_sequence_parallel_size: 1"))
    with pytest.raises(ConfigError, match="ulysses_sequence_parallel_size"):
        parse(EXAMPLE.replace("trainer:", "trainer:\n  ulysses_sequence_parallel_size: 2"))


def test_an_old_and_a_new_name_that_disagree_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"explorer\.runner_num: is 4, but explorer\.runner_per_model is 16"):
        parse(EXAMPLE.replace("  runner_per_model: 16", "  runner_per_model: 16\n  runner_num: 4"))
    assert parse(EXAMPLE.replace("runner_per_model: 16", "runner_num: 4")).explorer.runner_per_model == 4


def test_stages_are_translated_too() -> None:
    stage = "stages:\n  - stage_name: one\n    trainer: {trainer_type: verl, save_interval: 5}\n  - stage_name: two\n"
    config = parse(EXAMPLE + stage)
    assert config.notices == ("stages.0.trainer.trainer_type: has no effect: the trainer is DeepSpeed",)


KEYS = sorted({(m.group(1), m.group(2)) for m in re.finditer(r"^( *-? *)([a-z_]+):", EARLIER, re.M)})


@pytest.mark.parametrize(("indent", "key"), KEYS)
def test_one_wrong_letter_is_found_and_the_right_key_named(indent: str, key: str) -> None:
    wrong = f"{key[0]}{'x' if key[1] != 'x' else 'y'}{key[2:]}"
    text = re.sub(rf"^{re.escape(indent)}{key}:", f"{indent}{wrong}:", EARLIER, count=1, flags=re.M)
    with pytest.raises(ConfigError) as refused:
        parse(text)
    (problem,) = [p for p in refused.value.problems if "unknown key" in p.message]
    assert problem.path.endswith(wrong)
    assert problem.line == text.splitlines().index(next(x for x in text.splitlines() if f"{wrong}:" in x)) + 1
    assert repr(key) in problem.message


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
