"""YAMLs that users might write by mistake, or to break the command: exit code 2 and a sentence, at once.

Each row replaces or adds one value in a valid YAML: its key path, the new value as text, and words of the sentence.
That begins with file, line and key path.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.checks.broken_yamls import BASE, changed, check
from trinity.cli.main import app

pytestmark = pytest.mark.core

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
    ("model.temperature", "0.001", "must be 0 or at least 0.01"),
    ("buffer.explorer_input.taskset.rollout_args", "{temperature: 1e-320}", "must be 0 or at least 0.01"),
    ("algorithm.advantage_fn_args", "{epsilon: 0}", "epsilon"),
    ("model.model_path", "!!python/object/apply:os.system ['id']", "remove it, a value needs none here"),
    ("model.rope_scaling", "3", "is 3, must be a mapping"),
    ("model.trust_remote_code", "'yes'", "true or false"),
    ("model.custom_chat_template", "3", "text or null"),
    ("model.enable_thinking", "maybe", "true, false or null"),
    ("model.enable_thinking", "!!bool maybe", "must be true or false"),
    ("model.enable_thinking", "!!null maybe", "remove the tag"),
    ("model.lora_configs", "{}", "a list of mappings"),
    ("model.lora_configs", "[3]", "must be a mapping"),
    ("model.lora_configs", "[{}, {}]", "at most 1 entries"),
    ("model.lora_configs", "[{lora_rank: 0}]", "greater than or equal to 1"),
    ("model.lora_configs", "[{lora_rank: false}]", "whole number"),
    ("model.lora_configs", "[{lora_rank: auto}]", "whole number"),
    ("model.lora_configs", "[{merged: unmerged}]", "true or false"),
    ("model.lora_configs", "[{target_modules: {a: b}}]", "text, a list of texts or null"),
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
    ("algorithm.policy_loss_fn_args", "{loss_agg_mode: x}", "must be one of null"),
    ("algorithm.rollout_correction.token_range", "[1]", "required"),
    ("algorithm.rollout_correction.rollout_is", "[token]", "one of token, sequence"),
    ("algorithm.rollout_correction.token_cap", "true", "must be a number"),
    ("algorithm.policy_loss_fn_args", "{1: 2}", "write it in quotes"),
    ("algorithm.optimizer.betas", "[0.9, 0.9, 0.9]", "a list of 2 numbers"),
    ("buffer", "8", "must be a mapping"),
    ("buffer.batch_size", "!!float 8", "must be a number"),
    ("buffer.explorer_input.taskset.data_selector", "random", "must be a mapping"),
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
    ("buffer.explorer_input.taskset.rollout_args", "{stop: ['']}", "must not be empty"),
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
    ("explorer.listen_address", "''", "the name or the IP address"),
    ("explorer.listen_address", "::x", "the name or the IP address"),
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
    ("algorithm.rollout_correction.geometric_range", "[2, 2]", "0 <= low < high"),
    ("algorithm.kl_loss_fn_args", "{kl_coef: -1}", "at least 0"),
    ("algorithm.advantage_fn_args", "{epsilon: 1e-400}", "must be above 0"),
    ("model.lora_configs", "[{lora_rank: 100000000000}]", "less than or equal to"),
    ("buffer.batch_size", "9" * 5000, "is a number of 5000 characters"),
    ("buffer.batch_size", "1e999999999", "is inf, must be a whole number"),
    ("budget", "{gpu_hours: .nan}", "finite"),
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
    ("algorithm.optimizer.optimizer_type", "sgd", "one of adamw, muon, adamw_8bit"),
    ("algorithm.lr", "1e-6", "unknown key"),
    ("algoritm", "{}", "did you mean 'algorithm'"),
    ("data", "{train_files: x}", "unknown key"),
    ("buffer.explorer_input.taskset.default_workflow_type", "maths_workflow", "did you mean"),
    ("buffer.explorer_input.taskset.default_workflow_type", "email_search_workflow", "Trinity-RFT has"),
    (
        "buffer.explorer_input.taskset.default_workflow_type",
        "thinking_budget_workflow",
        "thinking_token_budget: is required",
    ),
    ("buffer.explorer_input.taskset.default_reward_fn_type", "nope", "not registered"),
    ("buffer.explorer_input.taskset.data_selector", "{selector_type: rand}", "did you mean 'random'"),
    ("buffer.explorer_input.taskset.storage_type", "sql", "must be file"),
    ("explorer.rollout_model.engine_type", "sglang", "the engine is vLLM"),
    ("explorer.rollout_model.enable_thinkin", "true", "did you mean 'enable_thinking'"),
    ("explorer.environments", "[{name: a, address: nowhere}]", "host:port, or attached"),
    ("explorer.environments", "[{name: a, address: 'h:99999'}]", "host:port, or attached"),
    ("explorer.environments", "[{name: a, address: 'h:٣'}]", "host:port, or attached"),
    ("trainer.trainer_strategy", "megatron", "the trainer is DeepSpeed"),
    ("trainer.trainer_config.actor_rollout_ref.model.lora_rank", "1", "model.lora_configs"),
    ("trainer.trainer_config.actor_rollout_ref.model.lora_rank", "auto", "model.lora_configs"),
    ("trainer.trainer_config.actor_rollout_ref.model.lora_rank", "false", "model.lora_configs"),
    ("model.tinker.enable", "true", "not supported"),
    ("monitor.monitor_type", "tensorbord", "did you mean 'tensorboard'"),
    ("synchronizer.storage", "['ftp://x']", "s3://"),
    ("trainer.checkpoint_storage", "['ftp://x']", "s3://"),
    ("trainer.checkpoint_storage", "[folder, jetstream]", "too large for it"),
    ("trainer.checkpoint_storage", "[/mnt/x]", "checkpoint_root_dir names the folder"),
    ("trainer.checkpoint_storage", "[folder, folder]", "which the list has already"),
    ("data_processor.experience_pipeline.operators", "[{name: nope}]", "not registered"),
    ("data_processor.task_pipeline.operators", "[{name: nope}]", "nope"),
]
CONTRADICTIONS = [
    ("model.max_model_len", "20", "less than max_prompt_tokens + max_response_tokens"),
    ("model.min_response_tokens", "17", "more than max_response_tokens"),
    ("model", "{model_path: m, max_model_len: 8, min_response_tokens: 5}", "more than max_response_tokens = 4"),
    ("data_processor.experience_pipeline.input_save_path", "x.csv", "a .jsonl, .db or .sqlite file"),
    (
        "data_processor.task_pipeline",
        "{operators: [{name: words_num_filter, args: {min_num: 4, max_num: 3}}]}",
        "min_num is 4, more than max_num = 3",
    ),
    ("buffer.train_batch_size", "3", "multiple of algorithm.repeat_times"),
    ("buffer.explorer_input.taskset", "null", "is missing; grpo needs tasks"),
    ("buffer.explorer_input.tasksets", "[{path: x}]", "together with taskset"),
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
    ("stages", "[{stage_name: a, mode: bench}]", "one of both, train"),
    ("synchronizer.storage", "[]", "is empty"),
    ("trainer.checkpoint_storage", "[]", "is empty; a run needs checkpoints"),
    ("mode", "bench", "eval_tasksets"),
]
FOLDERS = [
    ("project", "..", "checkpoint_root_dir"),
    ("project", "/etc", "checkpoint_root_dir"),
    ("name", "../../../etc", "checkpoint_root_dir"),
    ("name", "'a//b'", "checkpoint_root_dir"),
    ("name", '"a\\0b"', "printable"),
    ("name", '"\\u200b"', "printable"),
    ("name", "'a/./b'", "checkpoint_root_dir"),
    ("name", '"a\\nb"', "printable"),
    ("name", "x" * 300, "at most 200 bytes"),
    ("group", "../x", "checkpoint_root_dir"),
    ("explorer.name", "../x", "no /"),
    ("explorer.name", "trainer", "a process of the run is called so"),
    ("explorer.name", "main", "a process of the run is called so"),
    ("explorer.name", "environment-0", "a process of the run is called so"),
    ("stages", "[{stage_name: ../x}]", "no /"),
    ("stages", "[{stage_name: nats}]", "folder with this name"),
    ("stages", "[{stage_name: identity}]", "folder with this name"),
    ("stages", "[{stage_name: summary.json}]", "folder with this name"),
    ("checkpoint_root_dir", "'~no-such-user/x'", "no user of this machine"),
    ("checkpoint_root_dir", "/proc/x", "cannot be made"),
    ("checkpoint_root_dir", "$HOME/ckpt", "is '$HOME/ckpt', must have no variable of a shell: write ${oc.env:HOME}"),
    ("model.model_path", "$MODEL_PATH", "write ${oc.env:MODEL_PATH} in place of $MODEL_PATH"),
    ("buffer.explorer_input.taskset.path", "data/$SET/x.jsonl", "write ${oc.env:SET} in place of $SET"),
    ("synchronizer.storage", "['%APPDATA%\\x']", "write ${oc.env:APPDATA} in place of %APPDATA%"),
    ("name", "$USER", "write ${oc.env:USER} in place of $USER"),
    ("group", "a/$USER", "write ${oc.env:USER} in place of $USER"),
    ("model.model_path", "'~no-such-user/x'", "no user of this machine"),
    ("buffer.explorer_input.taskset.path", "a/" * 2000, "at most 3000 bytes"),
    ("data_processor.task_pipeline", "{output: '~no-such-user/x.jsonl'}", "no user of this machine"),
    ("synchronizer.storage", "[/etc/hostname]", "is a file"),
    ("synchronizer.storage", "[/proc/x]", "cannot be made"),
    ("data_processor.task_pipeline", "{output: /proc/x.jsonl}", "the folder '/proc' cannot be made"),
    ("synchronizer.storage", '["s3://bucket/\\0"]', "without NUL"),
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
    ("project", "'${oc.select:nope}'", "is null, must be text"),
    ("project", "'${......}'", "cannot be filled in"),
    ("project", "'${oc.env:${name}}'", "the environment variable n, which is not set"),
    ("buffer.batch_size", "'${model.max_prompt_tokens}x'", "'16x', must be a whole number"),
    ("project", "'${buffer}'", "a mapping, must be text"),
    ("project", "'" + "${name}" * 3000 + "'", "3000 interpolations"),
    ("project", "'" + "${" * 3000 + "a" + "}" * 3000 + "'", "3000 interpolations"),
    ("buffer.batch_size", "'${oc.env:NO_SUCH_VARIABLE_X,eight}'", "'eight', must be a whole number"),
    ("project", "'${oc.decode:" + "[" * 2500 + "]" * 2500 + "}'", "nested too deeply"),
]
ARGUMENTS = [
    ("rubric_judge_workflow", "{rubric: [3]}", "rubric.0: is 3, must be a mapping"),
    ("rubric_judge_workflow", "{rubric: []}", "rubric: is a list, must not be empty"),
    ("rubric_judge_workflow", "{rubric: [{description: a, weight: 0}]}", "weight: is 0, must be greater than 0"),
    ("rubric_judge_workflow", "{judge: null}", "must be text"),
    ("rubric_judge_workflow", "{judge_temperature: .inf}", "finite number"),
    ("rubric_judge_workflow", "{judge_max_tokens: 9999999999999}", "must be less than or equal to"),
    ("sokoban_workflow", "{max_turns: 9999999999999}", "must be less than or equal to"),
    ("R3L_sokoban_workflow", "{max_reflection_tokens: 9999999999999}", "must be less than or equal to"),
    ("tool_call_workflow", "{tools: [[a]]}", "tools.0: is a list, must be text"),
]
CHANGES = [*TYPES, *NUMBERS, *NAMES, *CONTRADICTIONS, *FOLDERS, *INTERPOLATIONS]


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


@pytest.mark.parametrize(("workflow", "args", "said"), ARGUMENTS)
def test_a_wrong_argument_of_a_workflow_is_one_sentence(workflow: str, args: str, said: str, written: Path) -> None:
    taskset = f"{{path: x, default_workflow_type: {workflow}, workflow_args: {args}}}"
    judge = "explorer: {auxiliary_models: [{model_path: a/judge, kind: generate}]}\n"
    written.write_text(judge + changed("buffer.explorer_input.taskset", taskset))
    text = check(written)
    assert said in text
    assert text.count("\n") == 1, text


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
