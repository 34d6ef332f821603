"""What distillation, preference pairs and models that workflows ask need is said before anything starts."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from trinity.config import ConfigError, make_plan
from trinity.config.checks.teacher import teachers
from trinity.config.load import parse
from trinity.config.plan import Plan

pytestmark = pytest.mark.core

TASKSET = {"name": "t", "path": "d.jsonl", "default_workflow_type": "on_policy_distill_workflow"}


def plan_of(**sections: Any) -> Plan:
    base: dict[str, Any] = {
        "project": "p",
        "name": "n",
        "checkpoint_root_dir": "/tmp/none",
        "model": {"model_path": "m", "max_prompt_tokens": 16, "max_response_tokens": 16},
    }
    return make_plan(parse(yaml.safe_dump({**base, **sections}), "test"))


def distilling(**changes: Any) -> dict[str, Any]:
    taskset = {**TASKSET, **changes.pop("taskset", {})}
    sections: dict[str, Any] = {
        "algorithm": {"algorithm_type": "on_policy_distill", "repeat_times": 4},
        "buffer": {"batch_size": 2, "explorer_input": {"taskset": taskset}},
        "explorer": {"auxiliary_models": [{"name": "teacher", "model_path": "m"}]},
    }
    return {**sections, **changes}


def test_distillation_has_a_workflow_that_asks_a_teacher_and_one_to_ask() -> None:
    assert plan_of(**distilling()).algorithm.algorithm_type == "on_policy_distill"
    with pytest.raises(ConfigError, match=r"taskset.default_workflow_type.*simple_workflow.*asks no teacher"):
        plan_of(**distilling(taskset={"default_workflow_type": "simple_workflow"}))
    with pytest.raises(ConfigError, match=r"explorer.auxiliary_models.*is empty"):
        plan_of(**distilling(explorer={}))


def test_a_loss_that_reads_a_teachers_likeliest_tokens_needs_a_teacher_or_the_policy_as_one(tmp_path: Path) -> None:
    algorithm = {"algorithm_type": "top_k_distill", "policy_loss_fn_args": {"top_k": 64, "beta": 0}}
    assert plan_of(**distilling(algorithm=algorithm)).algorithm.teacher_top == 64
    assert plan_of(**distilling()).algorithm.teacher_top == 0
    own = {"workflow_args": {"teacher": "policy", "privileged": "It is {answer}."}}
    assert plan_of(**distilling(algorithm=algorithm, explorer={}, taskset=own))
    with pytest.raises(ConfigError, match=r"simple_workflow.*asks no teacher; top_k_distill needs"):
        plan_of(**distilling(algorithm=algorithm, taskset={"default_workflow_type": "simple_workflow"}))
    with pytest.raises(ConfigError, match=r"explorer.auxiliary_models.*is empty"):
        plan_of(**distilling(algorithm=algorithm, explorer={}))
    with pytest.raises(ConfigError, match=r"workflow_args.privileged: is 3, must be text"):
        plan_of(**distilling(algorithm=algorithm, taskset={"workflow_args": {"privileged": 3}}))
    for top_k in (0, 257):
        with pytest.raises(ConfigError, match=rf"policy_loss_fn_args.top_k: is {top_k}, must be in \[1, 256\]"):
            plan_of(**distilling(algorithm={**algorithm, "policy_loss_fn_args": {"top_k": top_k}}))
    with pytest.raises(ConfigError, match="kl_penalty_fn: is 'k2', but top_k_distill reads no reward"):
        plan_of(**distilling(algorithm={**algorithm, "kl_penalty_fn": "k2"}))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 63}')
    model = {"model_path": str(tmp_path), "max_prompt_tokens": 16, "max_response_tokens": 16}
    with pytest.raises(ConfigError, match=r"policy_loss_fn_args.top_k: is 64, the model has 63 tokens"):
        plan_of(**distilling(algorithm=algorithm, model=model))


def test_the_policy_as_a_teacher_is_no_auxiliary_model() -> None:
    taskset = {"workflow_args": {"teacher": "policy"}}
    assert teachers(plan_of(**distilling()).config) == {""}
    assert teachers(plan_of(**distilling(taskset=taskset)).config) == set()


def test_a_teacher_is_compared_with_a_policy_at_its_own_temperature() -> None:
    assert plan_of(**distilling(taskset={"rollout_args": {"temperature": 1.0}}))
    with pytest.raises(ConfigError, match=r"taskset.rollout_args.temperature: is 0.7, but on_policy_distill_workflow"):
        plan_of(**distilling(taskset={"rollout_args": {"temperature": 0.7}}))
    model = {"model_path": "m", "max_prompt_tokens": 16, "max_response_tokens": 16, "temperature": 0.7}
    with pytest.raises(ConfigError, match=r"model.temperature: is 0.7, .* at temperature 1; sample at 1 too"):
        plan_of(**distilling(model=model))
    assert plan_of(**distilling(model=model, taskset={"rollout_args": {"temperature": 1.0}}))


def pairs(storage: str | None, **algorithm: Any) -> dict[str, Any]:
    source = {"path": "pairs.jsonl", **({"storage_type": storage} if storage else {})}
    return {
        "mode": "train",
        "algorithm": {"algorithm_type": "dpo", **algorithm},
        "buffer": {"train_batch_size": 8, "total_steps": 2, "trainer_input": {"experience_buffer": source}},
    }


def test_dpo_on_a_dataset_takes_rows_as_pairs() -> None:
    plan = plan_of(**pairs("file"))
    assert (plan.offline, plan.algorithm.offline, plan.algorithm.rows) == (True, True, "pairs")
    assert plan.groups_per_step == 8
    assert plan_of(**pairs("file", repeat_times=2)).groups_per_step == 4, "a pair counts as two experiences"
    with pytest.raises(ConfigError, match=r"train_batch_size: is 8, must be a multiple of algorithm.repeat_times = 3"):
        plan_of(**pairs("file", repeat_times=3))


def test_a_dataset_of_pairs_needs_no_storage_type() -> None:
    plan = plan_of(**pairs(None))
    assert (plan.offline, plan.algorithm.rows, plan.groups_per_step) == (True, "pairs", 8)
    with pytest.raises(ConfigError, match=r"taskset: is missing; dpo needs tasks"):
        plan_of(**pairs("queue", repeat_times=2))


def test_dpo_on_rollouts_still_compares_the_rollouts_of_a_task() -> None:
    taskset = {"taskset": {"name": "t", "path": "d.jsonl"}}
    rolled_out: dict[str, Any] = {"buffer": {"batch_size": 2, "explorer_input": taskset}}
    plan = plan_of(algorithm={"algorithm_type": "dpo", "repeat_times": 4}, **rolled_out)
    assert (plan.offline, plan.algorithm.offline) == (False, False)
    with pytest.raises(ConfigError, match=r"algorithm.repeat_times.*compares the rollouts of a task"):
        plan_of(algorithm={"algorithm_type": "dpo", "repeat_times": 1}, **rolled_out)


@pytest.mark.parametrize(
    ("workflow", "args", "models", "words"),
    [
        ("simple_workflow", {"reward_model": "helpfull"}, ["helpful"], "has no 'helpfull'.*did you mean 'helpful'"),
        ("math_rm_workflow", {}, [], "is empty, and math_rm_workflow asks one"),
        ("rubric_judge_workflow", {"judge": "a"}, ["helpful"], "has no 'a', which rubric_judge_workflow asks"),
        ("rubric_judge_openai_workflow", {}, ["helpful"], "whose judge has external_model"),
        ("math_trainable_ruler_workflow", {}, [], ""),
        ("simple_workflow", {"reward_model": "helpful"}, ["helpful"], ""),
        ("math_rm_workflow", {}, ["helpful"], ""),
        ("simple_workflow", {}, [], ""),
    ],
)
def test_a_model_that_a_workflow_asks_must_be_there(
    workflow: str, args: dict[str, Any], models: list[str], words: str
) -> None:
    taskset = {"name": "t", "path": "d.jsonl", "default_workflow_type": workflow, "workflow_args": args}
    sections: dict[str, Any] = {
        "buffer": {"explorer_input": {"taskset": taskset}},
        "explorer": {"auxiliary_models": [{"name": name, "model_path": "m"} for name in models]},
    }
    if not words:
        plan_of(**sections)
        return
    with pytest.raises(ConfigError, match=f"explorer.auxiliary_models.*{words}"):
        plan_of(**sections)
    plan_of(mode="train", **sections)
