"""`trinity check` names what a YAML leaves to a default, what nothing reads, and values that switch a key off."""

import json
from pathlib import Path
from typing import Any

import pytest

from trinity.config import Config, ConfigError
from trinity.config.load import dump, parse
from trinity.config.schema.buffer import ExplorerInputConfig, TasksetConfig

pytestmark = pytest.mark.core


def config(taskset: dict[str, Any] | None = None, **sections: Any) -> Config:
    run = {
        "model": {"model_path": "m", "max_model_len": 64},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
        "buffer": {"batch_size": 8, "explorer_input": {"taskset": {"path": "d.jsonl", **(taskset or {})}}},
    }
    return parse(json.dumps(run | sections))


@pytest.mark.parametrize(
    ("taskset", "model", "sections", "said"),
    [
        ({}, 0, {}, "model.temperature"),
        ({"rollout_args": {"temperature": 0}}, 1, {}, "buffer.explorer_input.taskset.rollout_args.temperature"),
        ({"rollout_args": {"temperature": 1}}, 0, {}, ""),
        ({}, 0, {"algorithm": {"algorithm_type": "reinforceplusplus", "repeat_times": 1}}, ""),
        ({}, 0, {"mode": "train"}, "model.temperature"),
    ],
)
def test_greedy_rollouts_of_a_group_are_said(
    taskset: dict[str, Any], model: float, sections: dict[str, Any], said: str
) -> None:
    found = config(taskset, model={"model_path": "m", "max_model_len": 64, "temperature": model}, **sections).notices
    equal = ": is 0; the rollouts of a group are equal, and teach nothing"
    assert [note.removesuffix(equal) for note in found if note.endswith(equal)] == ([said] if said else [])


@pytest.mark.parametrize(("steps", "said"), [(None, False), (100, False), (99, True)])
def test_a_warm_up_that_outlasts_the_run_is_said(steps: int | None, said: bool) -> None:
    algorithm = {"algorithm_type": "grpo", "repeat_times": 4, "optimizer": {"lr_warmup_steps": 100}}
    found = config(algorithm=algorithm, trainer={"total_steps": steps}).notices
    assert (
        f"algorithm.optimizer.lr_warmup_steps: is 100; in a run of {steps} steps the rate never reaches lr" in found
    ) is said


def test_tasks_of_evaluations_without_explorers_are_said() -> None:
    source = {"experience_buffer": {"path": "rows.jsonl"}}
    tasks = {"eval_tasksets": [{"path": "d.jsonl"}]}
    buffer = {"train_batch_size": 4, "trainer_input": source, "explorer_input": tasks}
    found = config(mode="train", algorithm={"algorithm_type": "sft"}, buffer=buffer).notices
    assert any(
        note.startswith("buffer.explorer_input.eval_tasksets: has no effect: there are no expl") for note in found
    )


@pytest.mark.parametrize(
    ("algorithm", "repeat", "said"),
    [
        ({"algorithm_type": "grpo"}, 1, True),
        ({"algorithm_type": "dapo"}, 1, True),
        ({"algorithm_type": "rloo"}, 1, True),
        ({"algorithm_type": "grpo", "advantage_fn": "grpo_verl"}, 1, True),
        ({"algorithm_type": "rloo"}, 2, False),
        ({"algorithm_type": "ppo"}, 1, False),
        ({"algorithm_type": "reinforceplusplus"}, 1, False),
    ],
)
def test_groups_of_one_are_said_where_rollouts_are_compared(algorithm: dict[str, Any], repeat: int, said: bool) -> None:
    found = config(algorithm={**algorithm, "repeat_times": repeat}).notices
    sentence = "algorithm.repeat_times: is 1; the advantage in a group of one is its reward, without a baseline"
    assert (sentence in found) is said


JUDGE = {"auxiliary_models": [{"model_path": "a/judge", "engine_num": 2, "tensor_parallel_size": 2}]}


@pytest.mark.parametrize(
    ("workflow", "args", "idle"),
    [
        ("simple_workflow", {}, True),
        ("rubric_judge_workflow", {}, False),
        ("rubric_judge_workflow", {"judge": "judge"}, False),
        ("players_workflow", {"environment": "nim", "seats": {"first": "judge"}}, False),
        ("math_rm_workflow", {}, False),
        ("simple_workflow", {"reward_model": "judge"}, False),
        ("async_math_workflow", {"reward_model": ""}, False),
    ],
)
def test_an_auxiliary_model_that_nothing_asks_is_named_with_its_gpus(
    workflow: str, args: dict[str, Any], idle: bool
) -> None:
    found = config({"default_workflow_type": workflow, "workflow_args": args}, explorer=JUDGE).notices
    said = "explorer.auxiliary_models.0: no workflow asks judge, and it takes 4 GPU(s); remove it"
    assert (said in found) == idle


@pytest.mark.parametrize(
    ("taskset", "kind", "scored"),
    [
        ({}, "auto", True),
        ({"format": {"prompt_key": "q"}}, "score", True),
        ({}, "generate", False),
        ({"default_reward_fn_type": "math_reward"}, "auto", False),
        ({"default_workflow_type": "simple_workflow"}, "auto", False),
        ({"workflow_args": {"reward_model": "rater"}}, "auto", False),
        ({"format": {"reward_fn_key": "how"}}, "auto", False),
    ],
)
def test_a_reward_model_scores_tasksets_that_name_nothing(taskset: dict[str, Any], kind: str, scored: bool) -> None:
    models = [{"model_path": "a/rater", "kind": kind}]
    made = config(taskset, explorer={"auxiliary_models": models})
    source = made.buffer.explorer_input.taskset
    assert source is not None and (source.workflow_args.get("reward_model") == "") == scored
    said = "buffer.explorer_input.taskset: names no workflow and no reward function; the reward model in"
    assert any(notice.startswith(said) for notice in made.notices) == scored
    assert parse(json.dumps(dump(made))).buffer == made.buffer


def test_rows_that_name_their_workflow_may_ask_any_model() -> None:
    assert not [n for n in config({"format": {"workflow_key": "how"}}, explorer=JUDGE).notices if "judge" in n]


def test_defaults_of_tasksets_are_named() -> None:
    place = "buffer.explorer_input.taskset"
    notices = config().notices
    assert f"{place}.default_workflow_type: is not given; simple_workflow is taken" in notices
    assert f"{place}.default_reward_fn_type: is not given; math_reward is taken" in notices
    given = {"default_workflow_type": "math_boxed_workflow"}
    assert not [notice for notice in config(given).notices if "is not given" in notice]


def test_evaluated_rows_that_are_trained_are_named(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").touch()
    tasksets = [{"path": str(tmp_path / "d.jsonl")}, {"path": "owner/data"}]
    evaluated = [{"path": f"{tmp_path}/./d.jsonl", "split": "test"}, *(
        {"path": "owner/data", "split": split} for split in ("test", "train"))]  # fmt: skip
    found = config(buffer={"batch_size": 8, "explorer_input": {"tasksets": tasksets, "eval_tasksets": evaluated}})
    said = [one.partition(", which are trained")[0] for one in found.notices if "are trained" in one]
    place = "buffer.explorer_input.eval_tasksets"
    assert said == [f"{place}.0.path: has the rows of tasksets.0", f"{place}.2.path: has the rows of tasksets.1"]


def test_arguments_that_a_workflow_does_not_read_are_named() -> None:
    args = {"default_workflow_type": "math_workflow", "workflow_args": {"use_base": True}}
    said = "buffer.explorer_input.taskset.workflow_args.use_base: has no effect: math_workflow does not read it"
    assert said in config(args).notices
    wrong = {"default_workflow_type": "math_ruler_workflow", "workflow_args": {"judge_temperature": "hot"}}
    with pytest.raises(ConfigError, match="judge_temperature: is 'hot', must be a number"):
        config(wrong)


def test_rollouts_and_lengths_that_another_key_decides_are_named() -> None:
    model = {"model_path": "m", "max_prompt_tokens": 16, "max_response_tokens": 16}
    found = config({"repeat_times": 4, "rollout_args": {"max_tokens": 999}}, model=model).notices
    assert "taskset.repeat_times: has no effect: algorithm.repeat_times says it" in "\n".join(found)
    assert "taskset.rollout_args.max_tokens: is 999; model.max_response_tokens = 16 is the limit" in "\n".join(found)
    sound = config({"rollout_args": {"max_tokens": 16}}, model=model).notices
    assert not [note for note in sound if "max_tokens" in note or "repeat_times" in note]


def test_the_path_of_an_archive_is_not_called_useless() -> None:
    buffer = {"batch_size": 8, "explorer_input": {"taskset": {"path": "d"}}}
    buffer["trainer_input"] = {"experience_buffer": {"path": "/tmp/archive.jsonl"}}
    assert not [notice for notice in config(buffer=buffer).notices if "archive" in notice or "log on NATS" in notice]


@pytest.mark.parametrize(("value", "off"), [(0, True), (None, True), (1, False), (False, False), ("auto", False)])
def test_a_rank_of_adapters_is_what_it_says(value: Any, off: bool) -> None:
    trainer = {"trainer_config": {"actor_rollout_ref": {"model": {"lora_rank": value}}}}
    if off:
        assert any("lora_rank: asks for nothing" in notice for notice in config(trainer=trainer).notices)
    else:
        with pytest.raises(ConfigError, match=r"lora_rank: is .*adapters are model\.lora_configs"):
            config(trainer=trainer)


@pytest.mark.parametrize("value", [True, False])
def test_enable_thinking_is_taken_from_the_engines_section_too(value: bool) -> None:
    assert config(explorer={"rollout_model": {"enable_thinking": value}}).model.enable_thinking is value
    judge = {"model_path": "a/judge", "enable_thinking": value}
    assert config(explorer={"auxiliary_models": [judge]}).explorer.auxiliary_models[0].enable_thinking is value


def test_a_section_that_is_not_enabled_has_no_effect() -> None:
    model = {"model_path": "m", "max_model_len": 64}
    config(model={**model, "tinker": {"enable": False, "rank": 16}})
    with pytest.raises(ConfigError, match="Tinker"):
        config(model={**model, "tinker": {"enable": True, "rank": 16}})


@pytest.mark.parametrize(
    ("section", "taken", "refused"),
    [
        ({"explorer": {"rollout_model": {"engine_type": "X"}}}, "vllm_async", "sglang"),
        ({"trainer": {"trainer_strategy": "X"}}, "fsdp2", "megatron"),
    ],
)
def test_a_part_that_is_another_is_refused(section: dict[str, Any], taken: str, refused: str) -> None:
    text = json.dumps(section)
    config(**json.loads(text.replace("X", taken)))
    with pytest.raises(ConfigError, match=f"is '{refused}'.*remove it, or write"):
        config(**json.loads(text.replace("X", refused)))


@pytest.mark.parametrize(
    ("given", "own", "trained", "evaluated", "reward"),
    [
        ({}, {}, "simple_workflow", "simple_workflow", "math_reward"),
        ({"default_workflow_type": "a", "default_reward_fn_type": "r"}, {}, "a", "a", "r"),
        ({"default_workflow_type": "a", "default_eval_workflow_type": "e"}, {}, "a", "e", "math_reward"),
        ({"default_eval_workflow_type": "e"}, {}, "simple_workflow", "e", "math_reward"),
        (
            {"default_workflow_type": "a", "default_eval_workflow_type": "e", "default_reward_fn_type": "r"},
            {"default_workflow_type": "own", "default_reward_fn_type": "mine"},
            "own", "own", "mine",
        ),
    ],
)  # fmt: skip
def test_the_nearest_workflow_and_reward_function_are_taken(
    given: dict[str, str], own: dict[str, str], trained: str, evaluated: str, reward: str
) -> None:
    source = ExplorerInputConfig.model_validate(given)
    taskset = TasksetConfig.model_validate({"name": "sums", "path": "/data", **own})
    assert source.workflow_of(taskset) == trained
    assert source.workflow_of(taskset, evaluated=True) == evaluated
    assert source.reward_of(taskset) == reward


def test_whether_a_workflow_is_given_at_all_can_be_asked() -> None:
    source, taskset = ExplorerInputConfig(), TasksetConfig(name="sums", path="/data")
    assert (source.workflow_of(taskset, default=""), source.reward_of(taskset, default="")) == ("", "")
