"""YAMLs that are broken in further ways: units, tags, anchors, other digits, line ends, files in the place of folders.

As in test_broken_yamls: exit code 2 and one sentence with the key path, at once.
"""

import os
import re
from pathlib import Path

import pytest

from support.checks.broken_yamls import BASE, changed, check

pytestmark = pytest.mark.core

_EXPLORER, _ROLLOUT, _SYNC, _TRAINER = "explorer.", "explorer.rollout_model.", "synchronizer.", "trainer."
_TASKSET, _SOURCE = "buffer.explorer_input.taskset.", "buffer.trainer_input."
UNITS = [
    (_EXPLORER + "max_timeout", "30min", "'30min', must be a number"),
    (_EXPLORER + "max_timeout", "PT30M", "must be a number"),
    (_EXPLORER + "max_timeout", "{minutes: 3}", "a mapping, must be a number"),
    (_EXPLORER + "max_timeout", "1e30", "less than or equal to 1000000000"),
    (_EXPLORER + "max_retry_times", "1e9", "must be a whole number"),
    (_EXPLORER + "agent_wait", "0", "greater than 0"),
    (_EXPLORER + "dynamic_timeout", "{ratio: 1}", "greater than 1"),
    (_EXPLORER + "over_rollout", "{ratio: 1.0}", "less than 1"),
    (_EXPLORER + "over_rollout", "{ratio: -0.1}", "greater than or equal to 0"),
    (_EXPLORER + "over_rollout", "{ratio: 10%}", "must be a number"),
    (_EXPLORER + "over_rollout", "{wait_after_min: -1}", "greater than or equal to 0"),
    (_EXPLORER + "over_rollout", "{return_partial_tasks: true}", "a group is stored whole"),
    (_SYNC + "bucket_mib", "512MiB", "'512MiB', must be a whole number"),
    (_SYNC + "bucket_mib", "536870912", "a bucket is held in memory"),
    (_SYNC + "sync_timeout", "1h", "'1h', must be a number"),
    (_SYNC + "canary_tolerance", "0", "greater than 0"),
    (_ROLLOUT + "gpu_memory_utilization", "90", "less than or equal to 1"),
    (_ROLLOUT + "gpu_memory_utilization", "90%", "'90%', must be a number"),
    (_ROLLOUT + "cpu_kvcache_gib", "8GiB", "must be a number"),
    (_ROLLOUT + "max_num_seqs", "1e3", "a whole number or null"),
    ("model.max_prompt_tokens", "2k", "'2k', must be a whole number"),
    ("model.max_prompt_tokens", "100000001", "less than or equal to 100000000"),
    ("model.top_p", "95", "less than or equal to 1"),
    ("model.top_k", "0.5", "a whole number"),
    ("budget", "{gpu_hours: 2h}", "'2h', must be a number"),
    ("algorithm.optimizer.lr", "1e-400", "greater than 0"),
    ("algorithm.optimizer.lr_warmup_steps", "10%", "a whole number"),
    ("cluster", "{gpu_per_node: 8x}", "a whole number"),
    (_TRAINER + "num_ranks", "0x10", "'0x10', must be a whole number"),
    (_TRAINER + "num_ranks", "'٣'", "must be a whole number"),
    (_TRAINER + "num_ranks", "2020-01-01", "'2020-01-01', must be a whole number"),
    (_TRAINER + "num_ranks", "=", "has the tag !!value"),
    (_TRAINER + "grad_clip", "1,5", "'1,5', must be a number"),
    ("buffer.total_steps", "'１'", "must be a whole number"),
    ("buffer.total_steps", "' 2'", "must be a whole number"),
]
VALUES = [
    ("algorithm.optimizer.betas", "{a: 1, b: 2}", "a mapping, must be a list of 2 numbers"),
    ("algorithm.optimizer.betas", "[[0.9], 0.9]", "a list, must be a number"),
    ("algorithm.kl_loss_fn", "kk", "not registered"),
    ("algorithm.policy_loss_fn_args", "{clip_range: [0.1, 0.2]}", "must be a number"),
    ("algorithm.sample_strategy_args", "{expert_data_ratio: 0.5}", "no such argument"),
    (_TASKSET + "path", "{a: b}", "a mapping, must be text"),
    (_TASKSET + "split", "[train]", "a list, must be text"),
    (_TASKSET + "rollout_args", "{temperature: .nan}", "a finite number"),
    (_TASKSET + "rollout_args", "{stop: [3]}", "must be text"),
    (_TASKSET + "format", "{image_key: [a]}", "text or null"),
    (_TASKSET + "data_selector", "{selector_type: random, kwargs: {x: 1}}", "no such argument"),
    ("buffer.explorer_input.eval_tasksets", "[[]]", "must be a mapping"),
    (_SOURCE + "experience_buffer", "{path: x.txt}", "must be an archive"),
    (_SOURCE + "experience_buffer", "{replay_buffer: {enable: true, priority_fn: nope}}", "one of linear_decay"),
    (_SOURCE + "auxiliary_buffers", "{a: null}", "must be a mapping"),
    (_ROLLOUT + "engine_args", "{logprobs_mode: raw_logits}", "cannot be set"),
    (_EXPLORER + "environments", "[{name: a, address: 'http://h:80'}]", "host:port, or attached"),
    (_EXPLORER + "environments", "[{name: a, address: 'h:0'}]", "host:port, or attached"),
    (_EXPLORER + "auxiliary_models", "[{model_path: a, external_model: {base_url: 'ftp://x'}}]", "must be http://"),
    (_EXPLORER + "env_vars", "{'A': [b]}", "must be text"),
    (_EXPLORER + "listen_address", "http://x", "the name or the IP address"),
    (_SYNC + "storage", "['s3:///x']", "no name of a bucket"),
    (_SYNC + "storage", "['relative/../../x']", "an absolute path"),
    (_SYNC + "storage", "[folder, folder]", "which the list has already"),
    (_TRAINER + "trainer_config_path", "x.yaml", "remove it"),
    ("data_processor.task_pipeline", "{output: x.csv}", "must end in"),
    ("data_processor.task_pipeline", "{output: 's3://bucket/x.jsonl'}", "of this machine"),
    ("data_processor.task_pipeline", "{nope: 3}", "unknown key"),
    ("model.lora_configs", "[{lora_rank: 8, target_modules: []}]", "is empty"),
    ("model.rope_scaling", "{rope_type: yarn}", "factor: is missing"),
    ("model.rope_scaling", "{rope_type: yarn, factor: 1e300}", "less than or equal to 10000"),
    ("monitor.monitor_args", "{nope: 1}", "no such argument"),
    ("stages", "[{stage_name: a, mode: serve}, {stage_name: b}]", "one of both, train or null"),
    ("stages", "[{stage_name: a, mode: explore}]", "one of both, train or null"),
    ("stages", "[{stage_name: a, buffer: {batch_size: x}}]", "a whole number"),
    ("stages", '[{stage_name: "a\\tb"}]', "printable"),
    ("project", "'${oc.dict.keys:buffer}'", "a list, must be text"),
    ("name", "'${project}/../${project}'", "without empty, . and .. parts"),
    ("buffer.explorer_input.taskset", "'${buffer.explorer_input}'", "refers to itself"),
    ("project", '"\\u202e"', "printable"),
    ("checkpoint_root_dir", "'s3://bucket/jobs'", "of this machine"),
    ("checkpoint_root_dir", "'file:///jobs'", "of this machine"),
    ("checkpoint_root_dir", "/dev/full", "is a file"),
    ("checkpoint_root_dir", "/proc/self/mem", "is a file"),
]
TEXTS = [
    ("monitor: {<<: [1, 2]}\n", "expected a mapping for merging"),
    ("monitor: {<<: [{monitor_type: tensorbord}]}\n", "did you mean 'tensorboard'"),
    ("? !!str mode\n: bth\n", "did you mean 'both'"),
    ("&k mode: *k\n", "mode: is 'mode', must be one of"),
    ("explorer: !!seq {a: b}\n", "expected a sequence node"),
    ("explorer: !!omap [a: b]\n", "has the tag !!omap"),
    ("=: 3\n", "has the key =, must be text"),
    ("mode: >+\n both\n\n", "did you mean 'both'"),
    ("mode: both\u2028x: 3\n", "x: unknown key"),
    ('mode: "\\uD800"\n', "invalid Unicode"),
    ("...\nfoo: bar\n", "is not YAML"),
]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


@pytest.mark.parametrize(("key", "value", "said"), [*UNITS, *VALUES])
def test_a_wrong_value_is_one_sentence(key: str, value: str, said: str, written: Path) -> None:
    written.write_text(changed(key, value), encoding="utf-8")
    text = check(written)
    assert said in text
    assert text.count("\n") == 1, text
    assert re.match(r": (line \d+: )?\w+(\.[\w=]+)*: ", text.removeprefix(str(written))), text


@pytest.mark.parametrize(("end", "said"), TEXTS)
def test_a_wrong_end_is_one_sentence_with_its_line(end: str, said: str, written: Path) -> None:
    for ends in ("\n", "\r\n", "\r"):
        written.write_bytes((BASE + end).replace("\n", ends).encode())
        text = check(written)
        assert said in text
        assert text.count("\n") == 1, text
        assert re.match(r": line 1[123]: ", text.removeprefix(str(written))), text


def test_what_lies_in_the_way_of_a_folder_is_named(written: Path, tmp_path: Path) -> None:
    os.symlink(tmp_path / "nowhere", tmp_path / "dangling")
    os.symlink(tmp_path / "loop", tmp_path / "loop")
    for place in ("dangling", "dangling/below", "loop"):
        written.write_text(changed("checkpoint_root_dir", str(tmp_path / place)))
        assert f"{tmp_path / place.partition('/')[0]} is a link to nowhere; give another folder" in check(written)
    (tmp_path / "jobs/p/n").mkdir(parents=True)
    (tmp_path / "jobs/p/n/second").write_text("")
    stages = "stages: [{stage_name: first}, {stage_name: second}]\n"
    written.write_text(stages + changed("checkpoint_root_dir", str(tmp_path / "jobs")))
    assert f"the folder of a stage '{tmp_path}/jobs/p/n/second' cannot be made" in check(written)
