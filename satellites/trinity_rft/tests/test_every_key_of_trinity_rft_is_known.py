"""Every key that any generation of Trinity-RFT's YAML has is ours, an old name of ours, without effect, or refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trinity.config import Config, ConfigError, expand
from trinity.config.load import parse

pytestmark = pytest.mark.core

# One key path a line; 0 stands for an item of a list.
KEYS = (Path(__file__).parent / "trinity_rft/keys.txt").read_text().split()
RUN: dict[str, Any] = {
    "model": {"model_path": "m", "max_model_len": 64},
    "algorithm": {"algorithm_type": "grpo", "repeat_times": 4, "optimizer": {"lr": 1e-5, "weight_decay": 0.1}},
    "buffer": {"batch_size": 8, "explorer_input": {"taskset": {"path": "d.jsonl"}}},
}


def document_with(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = [value] if part == "0" else {part: value}
    if path.startswith("stages.0."):
        value["stages"][0].setdefault("stage_name", "one")
    return value  # type: ignore[no-any-return]


def unknown(path: str) -> Iterator[str]:
    try:
        parse(json.dumps(document_with(path, "x")))
    except ConfigError as error:
        yield from (str(problem) for problem in error.problems if "unknown key" in problem.message)


def test_no_key_is_unknown() -> None:
    assert [problem for path in KEYS for problem in unknown(path)] == []


@pytest.mark.parametrize("path", ["cod", "trainer.trainer_config", "trainer.trainer_config.critic.optim"])
def test_a_foreign_section_that_holds_no_keys_is_said(path: str) -> None:
    with pytest.raises(ConfigError, match=f"{path}: must be a mapping"):
        parse(json.dumps(RUN | document_with(path, "x")))


def stage_with(**actor: Any) -> dict[str, Any]:
    return {"stage_name": "one", "trainer": {"trainer_config": {"actor_rollout_ref": {"actor": actor}}}}


def staged(*stages: dict[str, Any]) -> list[Config]:
    return expand(parse(json.dumps(RUN | {"stages": list(stages)})))


def test_an_old_name_in_a_stage_changes_its_key_and_leaves_the_rest_inherited() -> None:
    one, two = staged(stage_with(optim={"lr": 3e-5, "weight_decay": 0.2}), {"stage_name": "two"})
    assert (one.algorithm.optimizer.lr, one.algorithm.optimizer.weight_decay) == (3e-5, 0.2)
    assert (one.algorithm.algorithm_type, one.algorithm.repeat_times) == ("grpo", 4)
    assert (two.algorithm.optimizer.lr, two.algorithm.repeat_times) == (1e-5, 4)
    save = {"stage_name": "one", "data_processor": {"experience_pipeline": {"save_input": False}}}
    (one,) = staged(save)
    assert (one.buffer.save_experiences, one.buffer.batch_size) == (False, 8)


def test_an_old_name_in_a_stage_that_has_the_section_goes_into_it() -> None:
    (one,) = staged({**stage_with(optim={"lr": 3e-5}), "algorithm": {"algorithm_type": "grpo", "repeat_times": 2}})
    assert (one.algorithm.optimizer.lr, one.algorithm.repeat_times) == (3e-5, 2)
    with pytest.raises(ConfigError, match=r"is 3e-05, but stages\.0\.algorithm\.optimizer\.lr is 2e-05; give one"):
        staged({**stage_with(optim={"lr": 3e-5}), "algorithm": {"optimizer": {"lr": 2e-5}}})


def test_an_old_name_of_what_stages_cannot_change_is_said() -> None:
    critic = {"stage_name": "one", "trainer": {"trainer_config": {"critic": {"model": {"path": "c"}}}}}
    with pytest.raises(ConfigError, match=r"is of the whole run; give model\.critic_model_path, outside of stages"):
        staged(critic)


@pytest.mark.parametrize("algorithm", [None, {"repeat_times": 4, "optimizer": None}])
def test_an_old_name_of_a_key_in_an_empty_section_is_taken(algorithm: dict[str, Any] | None) -> None:
    trainer = {"trainer": stage_with(optim={"lr": 3e-5})["trainer"]}
    assert parse(json.dumps({**RUN, **trainer, "algorithm": algorithm})).algorithm.optimizer.lr == 3e-5
    with pytest.raises(ConfigError, match="algorithm: is 'x'"):
        parse(json.dumps({**RUN, **trainer, "algorithm": "x"}))


def test_values_are_taken_in_any_case() -> None:
    text = json.dumps(RUN | {"synchronizer": {"sync_method": "NCCL"}})
    taskset = "buffer.explorer_input.taskset"
    buffer = "buffer.trainer_input.experience_buffer"
    config = parse(
        text,
        overrides=[
            f"{taskset}.storage_type=FILE",
            f"{taskset}.format.prompt_type=Plaintext",
            f"{buffer}.storage_type=SQL",
        ],
    )
    found = config.buffer.explorer_input.taskset
    assert found is not None
    assert config.buffer.trainer_input.experience_buffer is not None
    assert (found.storage_type, found.format.prompt_type) == ("file", "plaintext")
    assert config.buffer.trainer_input.experience_buffer.storage_type == "sql"
