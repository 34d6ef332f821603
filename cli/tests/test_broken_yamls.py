"""YAMLs that users might write by mistake, or to break the command: exit code 2 and a sentence, at once.

Each row replaces or adds one value in a valid YAML: its key path, the new value as text, and words of the sentence.
That begins with file, line and key path.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from trinity.cli.main import app

pytestmark = pytest.mark.core

BASE = """
project: p
name: n
model: {model_path: some/model, max_prompt_tokens: 16, max_response_tokens: 16}
algorithm: {algorithm_type: grpo, repeat_times: 4}
buffer:
  batch_size: 8
  total_steps: 2
  explorer_input:
    taskset: {name: sums, path: data.jsonl}
"""

TYPES = [
    ("project", "3", "text"),
    ("project", "[p]", "a list, must be text"),
    ("name", "null", "null, must be text"),
    ("mode", "true", "one of both, explore"),
    ("mode", "bth", "did you mean 'both'"),
    ("mode", "colocate", "one of both"),
    ("mode", "[both]", "a list"),
    ("model", "null", "must be a mapping"),
    ("model", "[1, 2]", "must be a mapping"),
    ("model", "some/model", "must be a mapping"),
    ("model.model_path", "7", "must be text"),
    ("model.model_path", "''", "is empty"),
    ("model.model_path", "x" * 300, "at most 255 bytes"),
    ("model.critic_model_path", "a/" + "x" * 300, "at most 255 bytes"),
    ("model.chat_template_path", '"a\\0b"', "without NUL"),
    ("buffer.explorer_input.taskset.path", "x" * 300, "at most 255 bytes"),
    ("buffer.explorer_input.default_workflow_type", "x" * 3000, "which is not registered"),
    ("model.max_prompt_tokens", "'many'", "whole number"),
    ("model.max_prompt_tokens", "1.5", "whole number"),
    ("model.max_prompt_tokens", "true", "true, must be a whole number"),
    ("model.temperature", "true", "true, must be a number"),
    ("model.temperature", "warm", "must be a number"),
    ("model.custom_chat_template", "3", "text or null"),
    ("model.enable_thinking", "maybe", "true, false or null"),
    ("model.lora_configs", "{}", "a list of mappings"),
    ("model.lora_configs", "[3]", "must be a mapping"),
    ("model.lora_configs", "[{}, {}]", "at most 1 entries"),
    ("model.lora_configs", "[{lora_rank: 0}]", "greater than or equal to 1"),
    ("model.lora_configs", "[{lora_rank: false}]", "whole number"),
    ("model.lora_configs", "[{lora_rank: auto}]", "whole number"),
    ("model.lora_configs", "[{target_modules: {a: b}}]", "text or a list of texts"),
    ("algorithm", "grpo", "must be a mapping"),
    ("algorithm.algorithm_type", "[grpo]", "must be text"),
    ("algorithm.algorithm_type", "null", "must be text"),
    ("algorithm.repeat_times", "[4]", "whole number"),
    ("algorithm.repeat_times", "'4_0'", "'4_0', must be a whole number"),
    ("algorithm.repeat_times", "4_0", "'4_0', must be a whole number"),
    ("algorithm.repeat_times", "010", "'010', must be a whole number"),
    ("algorithm.repeat_times", "1:30", "'1:30', must be a whole number"),
    ("algorithm.repeat_times", "4.0", "whole number"),
    ("algorithm.optimizer", "[]", "must be a mapping"),
    ("algorithm.optimizer.betas", "0.9", "a list of 2 numbers"),
    ("algorithm.optimizer.betas", "[0.9]", "required"),
    ("algorithm.optimizer.betas", "[0.9, b]", "must be a number"),
    ("algorithm.optimizer.betas", "[0.9, true]", "must be a number"),
    ("algorithm.policy_loss_fn_args", "[1]", "a mapping or null"),
    ("algorithm.policy_loss_fn_args", "{clip_range: '0.2'}", "must be a number"),
    ("algorithm.rollout_correction.token_range", "[1]", "required"),
    ("algorithm.rollout_correction.token_cap", "true", "must be a number"),
    ("buffer", "8", "must be a mapping"),
    ("buffer.batch_size", "{a: 1}", "whole number"),
    ("buffer.save_experiences", "'sure'", "true or false"),
    ("buffer.save_experiences", "1", "true or false"),
    ("buffer.explorer_input", "[]", "must be a mapping"),
    ("buffer.explorer_input.taskset", "data.jsonl", "a mapping or null"),
    ("buffer.explorer_input.taskset", "{}", "path"),
    ("buffer.explorer_input.taskset", "{path: null}", "must be text"),
    ("buffer.explorer_input.taskset", "{path: ''}", "must not be empty"),
    ("buffer.explorer_input.taskset.format", "[prompt]", "must be a mapping"),
    ("buffer.explorer_input.taskset.format", "{prompt_key: ''}", "must not be empty"),
    ("buffer.explorer_input.taskset.rollout_args", "{stop: end}", "a list of texts"),
    ("buffer.explorer_input.taskset.workflow_args", "[]", "must be a mapping"),
    ("buffer.explorer_input.eval_tasksets", "{path: x}", "a list of mappings"),
    ("buffer.explorer_input.tasksets", "{path: x}", "a list of mappings"),
    ("explorer.env_vars", "{1: a}", "the key 1, must be text"),
    ("explorer.env_vars", "{A: 1}", "must be text"),
    ("explorer.env_vars", "{A: null}", "must be text"),
    ("explorer.env_vars", "{'A=B': c}", "without ="),
    ("explorer.env_vars", '{A: "x\\0y"}', "NUL"),
    ("explorer.rollout_model.dtype", "int8", "one of auto"),
    ("explorer.auxiliary_models", "{model_path: x}", "a list of mappings"),
    ("explorer.environments", "[{name: a}]", "required"),
    ("synchronizer.storage", "folder", "a list of texts"),
    ("synchronizer.storage", "[1]", "must be text"),
    ("trainer.deepspeed.zero_stage", "true", "one of 0, 1, 2, 3"),
    ("trainer.gradient_checkpointing", "1", "true, false, mlp or null"),
    ("monitor.monitor_args", "[a]", "a mapping or null"),
    ("data_processor.experience_pipeline.operators", "[reward_filter]", "must be a mapping"),
    ("data_processor.task_pipeline", "3", "a mapping or null"),
    ("stages", "{}", "a list of mappings"),
    ("stages", "[null]", "must be a mapping"),
    ("stages", "[{}]", "required"),
    ("trainer.trainer_config", "[]", "must be a mapping"),
]
NUMBERS = [
    ("algorithm.optimizer.lr", "0", "greater than 0"),
    ("algorithm.optimizer.lr", "-1e-3", "greater than 0"),
    ("algorithm.optimizer.lr", ".nan", "finite"),
    ("algorithm.optimizer.lr", ".inf", "finite"),
    ("algorithm.optimizer.lr", "1e400", "finite"),
    ("algorithm.optimizer.lr", "100", "less than or equal to 1"),
    ("algorithm.optimizer.betas", "[0.9, 1]", "less than 1"),
    ("algorithm.optimizer.betas", "[-0.1, 0.9]", "greater than or equal to 0"),
    ("algorithm.optimizer.weight_decay", "-1", "greater than or equal to 0"),
    ("algorithm.optimizer.lr_warmup_steps", "-2", "greater than or equal to -1"),
    ("algorithm.optimizer.lr_warmup_steps_ratio", "1.5", "less than or equal to 1"),
    ("algorithm.repeat_times", "0", "greater than or equal to 1"),
    ("algorithm.repeat_times", "99999999999999999999999", "less than or equal to"),
    ("algorithm.rollout_correction.token_cap", "0", "greater than 0"),
    ("algorithm.policy_loss_fn_args", "{clip_range: .nan}", "must be a number"),
    ("algorithm.policy_loss_fn_args", "{clip_range: -1}", "at least 0"),
    ("buffer.batch_size", "-8", "greater than or equal to 1"),
    ("buffer.total_steps", "0", "greater than or equal to 1"),
    ("buffer.total_steps", "9999999999999", "less than or equal to"),
    ("buffer.total_epochs", "0", "greater than or equal to 1"),
    ("buffer.explorer_input.taskset.weight", ".inf", "finite"),
    ("buffer.explorer_input.taskset.data_selector.seed", "-1", "greater than or equal to 0"),
    ("buffer.explorer_input.taskset.data_selector.seed", "99999999999999999999", "less than or equal to"),
    ("model.max_model_len", "99999999999999", "less than or equal to"),
    ("model.top_p", "0", "greater than 0"),
    ("model.temperature", ".inf", "finite"),
    ("cluster", "{node_num: -1}", "greater than or equal to 0"),
    ("cluster", "{node_num: 1, gpu_per_node: 100000000}", "less than or equal to"),
    ("explorer.proxy_port", "70000", "less than or equal to 65535"),
    ("explorer.runner_per_model", "1000000000", "less than or equal to 10000"),
    ("explorer.rollout_model.gpu_memory_utilization", "1.5", "less than or equal to 1"),
    ("explorer.rollout_model.seed", "-1", "greater than or equal to 0"),
    ("explorer.max_timeout", ".inf", "finite"),
    ("synchronizer.sync_interval", "0", "greater than or equal to 1"),
    ("synchronizer.sync_offset", "-1", "greater than or equal to 0"),
    ("synchronizer.bucket_mib", "99999999", "at most"),
    ("trainer.num_ranks", "0", "greater than or equal to 1"),
    ("trainer.grad_clip", ".nan", "finite"),
]
NAMES = [
    ("algorithm.algorithm_type", "grop", "did you mean 'grpo'"),
    ("algorithm.advantage_fn", "''", "must not be empty"),
    ("algorithm.policy_loss_fn", "nope", "not registered"),
    ("algorithm.policy_loss_fn_args", "{nope: 1}", "no such argument"),
    ("algorithm.optimizer.optimizer_type", "muon", "the optimizer is AdamW"),
    ("algorithm.lr", "1e-6", "unknown key"),
    ("algoritm", "{}", "did you mean 'algorithm'"),
    ("data", "{train_files: x}", "unknown key"),
    ("buffer.explorer_input.taskset.default_workflow_type", "maths_workflow", "did you mean"),
    ("buffer.explorer_input.taskset.default_workflow_type", "thinking_budget_workflow", "Trinity-RFT has"),
    ("buffer.explorer_input.taskset.default_reward_fn_type", "nope", "not registered"),
    ("buffer.explorer_input.taskset.data_selector", "{selector_type: rand}", "did you mean 'random'"),
    ("buffer.explorer_input.taskset.storage_type", "sql", "must be file"),
    ("explorer.rollout_model.engine_type", "sglang", "the engine is vLLM"),
    ("explorer.rollout_model.enable_thinkin", "true", "did you mean 'enable_thinking'"),
    ("explorer.environments", "[{name: a, address: nowhere}]", "host:port, or attached"),
    ("explorer.environments", "[{name: a, address: 'h:99999'}]", "host:port, or attached"),
    ("trainer.trainer_strategy", "megatron", "the trainer is DeepSpeed"),
    ("trainer.trainer_config.actor_rollout_ref.model.lora_rank", "1", "model.lora_configs"),
    ("trainer.trainer_config.actor_rollout_ref.model.lora_rank", "auto", "model.lora_configs"),
    ("trainer.trainer_config.actor_rollout_ref.model.lora_rank", "false", "model.lora_configs"),
    ("model.tinker.enable", "true", "not supported"),
    ("monitor.monitor_type", "tensorbord", "did you mean 'tensorboard'"),
    ("synchronizer.storage", "['ftp://x']", "s3://"),
    ("data_processor.experience_pipeline.operators", "[{name: nope}]", "not registered"),
    ("data_processor.task_pipeline.operators", "[{name: nope}]", "nope"),
]
CONTRADICTIONS = [
    ("model.max_model_len", "20", "less than max_prompt_tokens + max_response_tokens"),
    ("model.min_response_tokens", "17", "more than max_response_tokens"),
    ("buffer.train_batch_size", "3", "multiple of algorithm.repeat_times"),
    ("buffer.explorer_input.taskset", "null", "is missing; grpo needs tasks"),
    ("buffer.explorer_input.tasksets", "[{path: x}]", "beside taskset"),
    ("buffer.explorer_input.eval_tasksets", "[{path: x, name: a}, {path: y, name: a}]", "has already"),
    ("buffer.explorer_input.taskset.data_selector", "{selector_type: offline_easy2hard}", "feature_keys"),
    ("buffer.explorer_input.taskset.data_selector", "{selector_type: diff_based, kwargs: {tau: -1}}", "at least 0"),
    ("algorithm.sample_strategy", "mix", "auxiliary_buffers"),
    ("algorithm.algorithm_type", "on_policy_distill", "asks no teacher"),
    ("algorithm.rollout_correction.token_range", "[5, 1]", "token_range"),
    ("explorer.auxiliary_models", "[{model_path: a/b}, {model_path: c/b}]", "another model has already"),
    ("trainer.deepspeed", "{offload_param: true, offload_optimizer: true}", "zero_stage 3"),
    ("stages", "[{stage_name: a}, {stage_name: a}]", "another stage has already"),
    ("stages", "[{stage_name: a, stages: []}]", "unknown key"),
    ("stages", "[{stage_name: a, model: {model_path: x}}]", "unknown key"),
    ("stages", "[{stage_name: a, mode: bench}]", "eval_tasksets"),
    ("synchronizer.storage", "[]", "is empty"),
    ("mode", "bench", "eval_tasksets"),
]
FOLDERS = [
    ("project", "..", "checkpoint_root_dir"),
    ("project", "/etc", "checkpoint_root_dir"),
    ("name", "../../../etc", "checkpoint_root_dir"),
    ("name", "'a//b'", "checkpoint_root_dir"),
    ("name", '"a\\0b"', "printable"),
    ("name", '"a\\nb"', "printable"),
    ("name", "x" * 300, "at most 200 bytes"),
    ("group", "../x", "checkpoint_root_dir"),
    ("explorer.name", "../x", "no /"),
    ("stages", "[{stage_name: ../x}]", "no /"),
    ("stages", "[{stage_name: nats}]", "folder of its own"),
    ("checkpoint_root_dir", '"a\\0b"', "NUL"),
    ("checkpoint_root_dir", "''", "must not be empty"),
    ("checkpoint_root_dir", "/etc/hostname", "is a file"),
    ("checkpoint_root_dir", "/dev/null/x", "is a file"),
    ("checkpoint_root_dir", "/tmp/" + "x" * 300, "at most 255 bytes"),
    ("checkpoint_root_dir", "/tmp/" + "x/" * 2000, "bytes"),
]
INTERPOLATIONS = [
    ("project", "'${oc.env:NO_SUCH_VARIABLE_X}'", "NO_SUCH_VARIABLE_X, which is not set"),
    ("project", "'${project}'", "refers to itself"),
    ("buffer.total_steps", "'${buffer}'", "refers to itself"),
    ("project", "'${foo:bar}'", "Unsupported interpolation type foo"),
    ("project", "'${oc.env:X'", "cannot be filled in"),
    ("project", "'${}'", "cannot be filled in"),
    ("project", "'${no.such.key}'", "no.such.key"),
    ("project", "'???'", "missing value"),
    ("project", "'${buffer}'", "a mapping, must be text"),
    ("project", "'" + "${name}" * 3000 + "'", "3000 interpolations"),
    ("project", "'" + "${" * 3000 + "a" + "}" * 3000 + "'", "3000 interpolations"),
    ("buffer.batch_size", "'${oc.env:NO_SUCH_VARIABLE_X,eight}'", "'eight', must be a whole number"),
]
CHANGES = [*TYPES, *NUMBERS, *NAMES, *CONTRADICTIONS, *FOLDERS, *INTERPOLATIONS]

_NINE = ", ".join(["*{0}"] * 9)
_LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [{_NINE.format(a)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
_DOUBLING = "a0: xxxxxxxx\n" + "".join(f"a{i + 1}: '{f'${{a{i}}}' * 8}'\n" for i in range(10))
TEXTS = [
    ("", "model.model_path: is empty"),
    ("null", "line 1: must be a mapping"),
    ("- a", "line 1: must be a mapping"),
    ("hello", "line 1: must be a mapping"),
    ("a:\n\tb: 3", "line 2: is not YAML"),
    ("a: [1, 2", "is not YAML"),
    ("a: {b: c", "is not YAML"),
    ("a: @b", "line 1: is not YAML"),
    ("a: *b", "line 1: is not YAML"),
    ("a: 'b", "is not YAML"),
    ("%YAML 3.0\n---\na: b", "line 1: is not YAML"),
    ("a: \x07", "line 1: is not YAML"),
    (BASE + "---\n" + BASE, "another document"),
    (BASE + "name: m\n", "name: is given twice, first on line 3"),
    (BASE + " batch_size: 9\n", "is not YAML"),
    (BASE + "trainer: {ulysses_sequence_parallel_size: 3, num_ranks: 4}\n", "does not divide trainer.num_ranks"),
    (BASE + "cluster: {node_num: 1, gpu_per_node: 2}\nexplorer: {rollout_model: {engine_num: 3}}\n", "more than"),
    (BASE + "cluster: {node_num: 1, gpu_per_node: 2}\ntrainer: {num_ranks: 3}\n", "trainer.num_ranks: is 3"),
    (BASE.replace("batch_size: 8", "batch_size: 8\n  batch_size: 9"), "buffer.batch_size: is given twice"),
    ("1: a", "line 1: has the key 1"),
    ("null: a", "line 1: has the key null"),
    ("true: a", "line 1: has the key true"),
    ("? [a]\n: b", "line 1: has the key"),
    ("? {a: b}\n: c", "line 1: has the key"),
    ("'': 3", "unknown key"),
    ("a.b: 3", "unknown key"),
    ("<<: 3", "line 1"),
    ("<<: {a: b}", "line 1: a: unknown key"),
    ("project: !!python/object/apply:os.system [ls]", "line 1: project: has the tag"),
    ("project: !foo bar", "line 1: project: has the tag !foo"),
    ("project: !!binary aGVsbG8=", "line 1: project: has the tag"),
    ("project: !!set {a, b}", "line 1: project: has the tag"),
    ("project: !!int abc", "must be a number"),
    ("a: " + "[" * 5000, "line 1: lists and mappings are nested"),
    ("a: " + "[" * 5000 + "]" * 5000, "line 1: lists and mappings are nested"),
    ("a: " + "{a: " * 5000 + "}" * 5000, "line 1: lists and mappings are nested"),
    ("a: " + "1" * 5000, "a number of 5000 characters"),
    ("a: 0." + "1" * 5000, "a number of 5002 characters"),
    ("a: &a\n  b: *a\n", "line 2: *a is inside"),
    ("stages: &a [*a]\n", "line 1: *a is inside"),
    ("a: &a\n  <<: *a\n", "line 2: *a is inside"),
    (_LAUGHS, "more than 5000 nodes"),
    (_DOUBLING + "project: ${a10}\n", "grows to"),
    ("".join(f"k{i}: 1\n" for i in range(20_000)), "more than 5000 nodes"),
    ("a: " + "x" * 600_000, "too large"),
    ("explorer:\n" + "".join(f"  k{i}: 1\n" for i in range(1000)), "unknown key"),
    (BASE + "stages: [" + ", ".join(f"{{stage_name: s{i}}}" for i in range(1500)) + "]\n", "at most 100"),
]


def changed(path: str, value: str) -> str:
    """BASE with a value, as text, at a key path."""
    document = yaml.safe_load(BASE)
    *sections, name = path.split(".")
    at = document
    for section in sections:
        at = at.setdefault(section, {})
    at[name] = "THE-VALUE"
    return yaml.safe_dump(document, sort_keys=False, width=10**9).replace("THE-VALUE", value)


def check(path: Path, *overrides: str) -> str:
    """What `trinity check` says of a file that it refuses."""
    begin = time.process_time()
    done = CliRunner().invoke(app, ["check", "--config", str(path), *overrides])
    assert time.process_time() - begin < 5
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert done.stderr.startswith(str(path))
    return done.stderr


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


@pytest.mark.parametrize(("key", "value", "said"), CHANGES, ids=[f"{k}={v[:30]}" for k, v, _ in CHANGES])
def test_a_wrong_value_is_one_sentence(key: str, value: str, said: str, written: Path) -> None:
    written.write_text(changed(key, value))
    text = check(written)
    assert said in text
    assert text.count("\n") == 1, text
    assert len(text) < len(str(written)) + 1500
    assert re.match(r": (line \d+: )?\w+(\.[\w=]+)*: ", text.removeprefix(str(written))), text


@pytest.mark.parametrize(("text", "said"), TEXTS, ids=[text[:30] for text, _ in TEXTS])
def test_a_text_that_is_no_configuration_is_refused(text: str, said: str, written: Path) -> None:
    written.write_text(text)
    assert said in check(written)


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name, content, said in (
        ("bytes", bytes(range(256)), "is not UTF-8 text"),
        ("utf16", BASE.encode("utf-16"), "is not UTF-8 text"),
        ("latin", b"project: \xe9", "is not UTF-8 text (byte 9)"),
        ("zeros", bytes(100), "line 1: is not YAML"),
        ("large", b"#" * 2**20, "too large"),
    ):
        (tmp_path / name).write_bytes(content)
        assert said in check(tmp_path / name)
    for name, said in ((".", "is no file"), ("fifo", "is no file"), ("none", "no such file"), ("x" * 300, "too long")):
        assert said in check(tmp_path / name)


def test_the_valid_yaml_and_a_byte_order_mark_are_taken(written: Path) -> None:
    for head in ("", "\ufeff"):
        written.write_text(head + BASE, encoding="utf-8")
        done = CliRunner().invoke(app, ["check", str(written)])
        assert done.exit_code == 0, done.output


def test_names_cannot_write_to_the_terminal(written: Path) -> None:
    for key, name in (("model.model_path", '"\\e[31mred"'), ("buffer.explorer_input.taskset.name", '"\\e[31mred"')):
        written.write_text(changed(key, name))
        done = CliRunner().invoke(app, ["check", str(written)])
        assert (done.exit_code, "\\x1b[31mred" in done.stdout, "\x1b" in done.stdout) == (0, True, False), done.output


@pytest.mark.parametrize("command", ["check", "run"])
@pytest.mark.parametrize("text", ["", "a: " + "[" * 5000, changed("mode", "bth"), changed("name", "../x")])
def test_the_commands_end_with_two(command: str, text: str, written: Path) -> None:
    written.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "trinity.cli.main", command, str(written)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(str(written))
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "override", ["a", "=3", "a..b=3", "buffer.batch_size=[", "stages.7.mode=both", "x=" + "[" * 99]
)
def test_overrides_are_refused_too(override: str, written: Path) -> None:
    written.write_text(BASE)
    assert override.partition("=")[0].removesuffix(".7.mode") in check(written, override)
