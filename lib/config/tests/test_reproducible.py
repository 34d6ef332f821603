"""reproducible: true refuses what depends on clocks, on the order of events, or on programs elsewhere."""

from typing import Any

import pytest

from trinity.config.checks.sections import check
from trinity.config.run_record import Addresses, RunRecord, announcement
from trinity.config.schema import Config

pytestmark = pytest.mark.core

TASKS = {"taskset": {"path": "/t", "default_workflow_type": "simple_workflow"}}


def said(**changes: Any) -> list[tuple[str, str]]:
    values = {
        "model": {"model_path": "/m"},
        "algorithm": {"repeat_times": 4},
        "buffer": {"batch_size": 4, "total_steps": 2, "explorer_input": TASKS},
        "reproducible": True,
    }
    config = Config.model_validate({**values, **changes})
    return [(problem.path, problem.message) for problem in check(config, plugins_loaded=False)]


def test_an_asynchronous_run_is_taken() -> None:
    assert said(synchronizer={"sync_offset": 1}) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"explorer": {"record": True}}, "explorer.record"),
        ({"explorer": {"dynamic_timeout": {"enable": True}}}, "explorer.dynamic_timeout"),
        ({"explorer": {"over_rollout": {"ratio": 0.5}}}, "explorer.over_rollout"),
        ({"explorer": {"environments": [{"name": "far", "address": "attached"}]}}, "explorer.environments"),
        ({"explorer": {"auxiliary_models": [{"model_path": "/j"}]}}, "explorer.auxiliary_models"),
        ({"explorer": {"rollout_model": {"engine_args": {"block_size": 32}}}}, "engine_args"),
        ({"synchronizer": {"on_rejected": "continue"}}, "on_rejected"),
        ({"algorithm": {"repeat_times": 4, "sample_strategy": "staleness_control"}}, "staleness_control"),
        ({"buffer": {"batch_size": 4, "total_steps": 2, "explorer_input": TASKS, "trainer_input": {
            "experience_buffer": {"replay_buffer": {"enable": True}}}}}, "replay_buffer"),
        ({"buffer": {"batch_size": 4, "total_steps": 2, "explorer_input": {"taskset": {
            **TASKS["taskset"], "data_selector": {"selector_type": "diff_based"}}}}}, "data_selector diff_based"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_cannot_be_promised_is_refused(changes: dict[str, Any], words: str) -> None:
    problems = [message for path, message in said(**changes) if path == "reproducible"]
    assert len(problems) == 1 and problems[0].startswith("is true, which does not go with") and words in problems[0]
    assert not [path for path, _ in said(**changes, reproducible=False) if path == "reproducible"]


def test_versions_that_tasks_may_need_are_kept() -> None:
    assert said(synchronizer={"sync_offset": 2}) == [
        (
            "synchronizer.versions_to_keep",
            "is 3; with reproducible: true a task may need an older version: at least 4",
        )
    ]
    assert said(synchronizer={"sync_offset": 2, "versions_to_keep": 4}) == []
    assert said(synchronizer={"sync_offset": 2, "sync_interval": 2}) == []


def test_an_explorer_that_joins_gets_it_from_the_run() -> None:
    config = Config.model_validate({"reproducible": True, "explorer": {"rollout_model": {"seed": 7}}})
    record = RunRecord(version="1", run="r", stage="", online=True, last=True, addresses=Addresses(), config=config)
    found = RunRecord.model_validate_json(announcement(record)).config
    assert (found.reproducible, found.explorer.rollout_model.seed) == (True, 7)
