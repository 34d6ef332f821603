"""explorer.traffic: a run without tasksets, which refuses what would leave its calls untrained."""

from typing import Any

import pytest

from trinity.config.checks.sections import check
from trinity.config.schema import Config

pytestmark = pytest.mark.core

VALUES: dict[str, Any] = {
    "model": {"model_path": "/m", "max_model_len": 64},
    "algorithm": {"algorithm_type": "reinforceplusplus", "repeat_times": 1},
    "buffer": {"batch_size": 4, "total_steps": 2},
    "explorer": {"record": True, "traffic": {}},
    "synchronizer": {"sync_offset": 4},
}
TASKSET = {"path": "/t", "default_workflow_type": "simple_workflow"}


def said(**changes: Any) -> list[str]:
    return [problem.path for problem in check(Config.model_validate({**VALUES, **changes}), plugins_loaded=False)]


def test_such_a_run_needs_no_taskset() -> None:
    assert said() == []
    assert said(explorer={"record": True}) == ["buffer.explorer_input.taskset"]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"explorer": {"traffic": {}}}, "explorer.record"),
        (
            {"buffer": {"batch_size": 4, "total_steps": 2, "explorer_input": {"taskset": TASKSET}}},
            "buffer.explorer_input.taskset",
        ),
        ({"algorithm": {"algorithm_type": "reinforceplusplus", "repeat_times": 4}}, "algorithm.repeat_times"),
        ({"buffer": {"batch_size": 4}}, "buffer.total_steps"),
        ({"synchronizer": {"sync_offset": 0}}, "synchronizer.sync_offset"),
        ({"explorer": {"record": True, "traffic": {"trial": {}}}}, "explorer.traffic.trial"),
        ({"explorer": {"record": True, "traffic": {"guard": {}}}}, "synchronizer.versions_to_keep"),
    ],
)
def test_what_leaves_calls_untrained_is_refused(changes: dict[str, Any], key: str) -> None:
    assert said(**changes) == [key]


def test_a_guard_goes_back_to_versions_whose_files_are_kept() -> None:
    explorer = {"record": True, "traffic": {"guard": {}}}
    assert said(explorer=explorer, synchronizer={"sync_offset": 4, "versions_to_keep": 7}) == []


@pytest.mark.parametrize("merged", [True, False])
def test_a_trial_needs_engines_that_hold_two_versions(merged: bool) -> None:
    model = {**VALUES["model"], "lora_configs": [{"merged": merged}]}
    found = said(model=model, explorer={"record": True, "traffic": {"trial": {}}})
    assert found == (["explorer.traffic.trial"] if merged else [])


def test_an_endpoint_beside_the_run_has_no_tasks_to_judge() -> None:
    assert said(mode="serve", algorithm={}, synchronizer={}) == []
