"""Batches of which a part are expert rows (sample_strategy mix): their size fits rollouts and rows together."""

import pytest

from trinity.config import ConfigError, make_plan
from trinity.config.load import parse

pytestmark = pytest.mark.core

MIX = """
project: p
name: n
checkpoint_root_dir: /tmp/none
model: {model_path: m/Qwen2.5-0.5B, max_prompt_tokens: 16, max_response_tokens: 16}
algorithm:
  algorithm_type: mix
  repeat_times: 4
  sample_strategy_args: {expert_data_ratio: 0.2, sft_dataset_name: worked}
buffer:
  batch_size: 2
  train_batch_size: 10
  explorer_input: {taskset: {name: t, path: d.jsonl}}
  trainer_input: {auxiliary_buffers: {worked: {path: w.jsonl}}}
"""


def test_the_rest_of_the_batch_is_whole_groups() -> None:
    plan = make_plan(parse(MIX))
    assert (plan.groups_per_step, plan.experiences_per_step, plan.experts_per_step) == (2, 8, 2)


def test_without_a_size_the_rows_come_beside_the_tasks() -> None:
    plan = make_plan(parse(MIX, overrides=["buffer.train_batch_size=0"]))
    assert (plan.groups_per_step, plan.experiences_per_step, plan.experts_per_step) == (2, 8, 2)


@pytest.mark.parametrize("size", [8, 12, 13])
def test_a_batch_that_leaves_a_part_of_a_group_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=rf"buffer\.train_batch_size: is {size}, of which . are expert rows"):
        parse(MIX, overrides=[f"buffer.train_batch_size={size}"])
