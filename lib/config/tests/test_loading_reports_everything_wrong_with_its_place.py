"""A YAML that cannot be used: every problem at once, with line, key and the nearest name."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from trinity.config import ConfigError, load
from trinity.config.load import parse

pytestmark = pytest.mark.core

GOOD = """
project: p
name: n
checkpoint_root_dir: /tmp/none
model:
  model_path: some/model
  max_prompt_tokens: 16
  max_response_tokens: 16
algorithm:
  algorithm_type: grpo
  repeat_times: 4
buffer:
  batch_size: 8
  total_steps: 2
  explorer_input:
    taskset:
      name: sums
      path: data.jsonl
"""


def problems(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        parse(text, "run.yaml", overrides)
    return str(refused.value)


def test_a_good_one_is_taken() -> None:
    assert parse(GOOD).buffer.batch_size == 8


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("batch_size: 8", "batch_sise: 8", ["line 13", "buffer.batch_sise", "batch_size"]),
        ("algorithm_type: grpo", "algorithm_type: gpro", ["line 10", "algorithm.algorithm_type", "'gpro'", "'grpo'"]),
        ("batch_size: 8", "batch_size: eight", ["line 13", "buffer.batch_size", "eight"]),
        ("batch_size: 8", "batch_size: -1", ["line 13", "buffer.batch_size", "-1"]),
        ("max_prompt_tokens: 16", "max_prompt_tokens: [1]", ["line 7", "model.max_prompt_tokens"]),
        ("name: n\n", "name: n\nname: m\n", ["line 4", "name", "line 3"]),
        ("project: p", "project: [", ["is not YAML"]),
        ("model_path: some/model", "model_path: ${oc.env:NO_SUCH_VARIABLE_X}", ["NO_SUCH_VARIABLE_X"]),
        ("model_path: some/model", "model_path: ${nowhere.at_all}", ["nowhere.at_all"]),
        ("  max_response_tokens: 16", "  max_response_tokens: 16\n  max_model_len: 20", ["model.max_model_len", "20"]),
        ("    taskset:\n      name: sums\n      path: data.jsonl\n", "    default_workflow_type: simple_workflow\n",
         ["buffer.explorer_input.taskset", "missing"]),
        ("      path: data.jsonl", "      path: data.jsonl\n      default_workflow_type: math_workflw",
         ["default_workflow_type", "'math_workflow'"]),
    ],
)  # fmt: skip
def test_each_mistake_is_named(old: str, new: str, said: list[str]) -> None:
    assert old in GOOD
    text = problems(GOOD.replace(old, new))
    assert all(part in text for part in said), text
    assert text.startswith("run.yaml: ")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("buffer.explorer_input.taskset.path=postgresql://u:sEcret1@host/db", "must be a file, a folder or a hub name"),
        (
            f"buffer.explorer_input.taskset.path=https://u:sEcret1{'1' * 80}@host",
            "is 'https://***@host', must be a file",
        ),
        (
            "buffer.trainer_input.experience_buffer.path=ftp://u:sEcret1@host/x",
            "is 'ftp://***@host/x', must be an archive",
        ),
        ("buffer.batch_size=ftp://u:sEcret1@host/x", "is 'ftp://***@host/x', must be a whole number"),
    ],
)
def test_an_address_is_refused_without_its_password(override: str, said: str) -> None:
    text = problems(GOOD, override)
    assert said in text
    assert "sEcret1" not in text


def test_several_mistakes_are_reported_together() -> None:
    text = problems(GOOD.replace("batch_size", "batch_sise").replace("repeat_times: 4", "repeat_tims: 4"))
    assert "repeat_tims" in text
    assert "batch_sise" in text


def test_interpolation_and_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_MODEL", "from/environment")
    text = GOOD.replace("some/model", "${oc.env:SOME_MODEL,default/model}").replace("name: sums", "name: ${project}")
    config = parse(text, "run.yaml", ["buffer.batch_size=16", "algorithm.repeat_times=2"])
    assert config.model.model_path == "from/environment"
    assert config.buffer.explorer_input.taskset is not None
    assert config.buffer.explorer_input.taskset.name == "p"
    assert (config.buffer.batch_size, config.algorithm.repeat_times) == (16, 2)
    monkeypatch.delenv("SOME_MODEL")
    assert parse(text).model.model_path == "default/model"


def test_variables_may_be_numbers_where_no_schema_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIP", "0.3")
    variables = {"a": "${oc.env:CLIP}", "b": "${oc.env:CLIP}/2", "c": "${oc.env:NONE,1e-3}", "d": "2"}
    config = parse(GOOD, "run.yaml", [
        "algorithm.policy_loss_fn_args={clip_range_high: '${oc.env:CLIP}'}",
        "algorithm.optimizer.betas=[0.9, '${oc.env:NONE,0.95}']",
        f"buffer.explorer_input.taskset.workflow_args={json.dumps(variables)}",
        "project=${oc.env:CLIP}",
    ])  # fmt: skip
    assert config.algorithm.policy_loss_fn_args == {"clip_range_high": 0.3}
    assert config.algorithm.optimizer.betas == (0.9, 0.95)
    assert config.buffer.explorer_input.taskset is not None
    assert config.buffer.explorer_input.taskset.workflow_args == {"a": 0.3, "b": "0.3/2", "c": 0.001, "d": "2"}
    assert config.project == "0.3"


@pytest.mark.parametrize("override", ["buffer.batch_sise=3", "nonsense", "buffer.batch_size=x"])
def test_wrong_overrides_are_refused(override: str) -> None:
    assert override.partition("=")[0].rpartition(".")[2] in problems(GOOD, override)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "none.yaml")


def test_importing_is_quick_and_brings_no_torch() -> None:
    code = "import sys, trinity.config; assert 'torch' not in sys.modules"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 3.0  # of a core's time; half a second is usual


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("stages.rft.mode=train", "stages.rft.mode: stages has no entry 'rft': give its number, from 0 to 1"),
        ("stages.2.mode=train", "stages.2.mode: stages has no entry '2': give its number, from 0 to 1"),
        ("synchronizer.storage.1=folder", "storage has no entry '1': the list is empty; begin with 0"),
        ("model.lora_configs.1.lora_rank=8", "lora_configs has no entry '1': the list is empty; begin with 0"),
    ],
)
def test_an_override_into_a_list_says_which_entries_there_are(override: str, said: str) -> None:
    stages = "stages:\n  - stage_name: sft\n  - stage_name: rft\nsynchronizer: {storage: []}\n"
    assert said in problems(GOOD + stages, override)


@pytest.mark.parametrize("more", ["", "synchronizer: {storage: []}\n", "synchronizer: {storage: null}\n"])
def test_an_override_of_entry_0_begins_a_list(more: str) -> None:
    tasksets = "buffer.explorer_input.eval_tasksets"
    overrides = [
        "model.lora_configs.0.lora_rank=8",
        "synchronizer.storage.0=/tmp/versions",
        "synchronizer.storage.0=jetstream",
    ]
    overrides += [f"{tasksets}.0.path=test.jsonl", f"{tasksets}.0.name=test", f"{tasksets}.0.format.prompt_key=q"]
    overrides += ["stages.0.stage_name=rl", *(f"stages.0.{override}" for override in overrides[3:])]
    overrides += [
        f"stages.0.buffer.{given}" for given in ("batch_size=8", "total_steps=2", "explorer_input.taskset.path=a")
    ]
    overrides += ["stages.0.buffer.explorer_input.taskset.name=a"]
    config = parse(GOOD + more, overrides=overrides)
    (test,) = config.buffer.explorer_input.eval_tasksets
    assert (test.name, test.path, test.format.prompt_key) == ("test", "test.jsonl", "q")
    assert [adapter.lora_rank for adapter in config.model.lora_configs or ()] == [8]
    assert config.synchronizer.storage == ["jetstream"]
    assert config.stages[0].buffer is not None and config.stages[0].buffer.explorer_input is not None
    assert config.stages[0].buffer.explorer_input.eval_tasksets == [test]


def test_a_problem_of_a_list_that_an_override_begins_has_no_line() -> None:
    said = problems(GOOD, "buffer.explorer_input.eval_tasksets.0.name=test")
    assert "run.yaml: override buffer.explorer_input.eval_tasksets.0.path: is required" in said
    assert "override model.model_path: is a mapping, must be text" in problems(GOOD, "model.model_path.0=x")


def test_a_problem_of_the_command_line_names_the_override_and_no_line() -> None:
    overrides = ["buffer.batch_size=many", "trainer.save_intervall=3", "synchronizer={sync_interval: 0}"]
    with pytest.raises(ConfigError) as failed:
        parse(f"{GOOD}\ntrainer:\n  save_interval: none\n", overrides=overrides)
    said = {problem.path: str(problem) for problem in failed.value.problems}
    assert said["buffer.batch_size"].startswith("override buffer.batch_size: is 'many'")
    assert said["trainer.save_intervall"].startswith("override trainer.save_intervall: unknown key")
    assert said["synchronizer.sync_interval"].startswith("override synchronizer.sync_interval: ")
    assert said["trainer.save_interval"].startswith("line ")


def test_a_yaml_of_verl_is_named_as_such() -> None:
    with pytest.raises(ConfigError, match=r"actor_rollout_ref: unknown key; a YAML of veRL is not read; `trinity"):
        parse("actor_rollout_ref: {actor: {optim: {lr: 1e-6}}}")
