"""Tasks with images: what goes with them, and what is refused with its reason."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from trinity.config import ConfigError, make_plan
from trinity.config.load import load, parse
from trinity.config.plan import Plan

pytestmark = pytest.mark.core

TASKSET = {"path": "d.jsonl", "default_workflow_type": "simple_mm_workflow", "format": {"image_key": "image"}}


def plan_of(taskset: dict[str, Any] | None = None, **sections: Any) -> Plan:
    base: dict[str, Any] = {
        "checkpoint_root_dir": "/tmp/none",
        "model": {"model_path": "m", "max_prompt_tokens": 16, "max_response_tokens": 16, **sections.pop("model", {})},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
        "buffer": {
            "batch_size": 2,
            "explorer_input": {"taskset": {**TASKSET, **(taskset or {})}},
            **sections.pop("buffer", {}),
        },
    }
    return make_plan(parse(yaml.safe_dump({**base, **sections}), "test"))


def test_tasks_with_images_have_the_workflow_that_shows_them() -> None:
    assert plan_of().config.buffer.explorer_input.taskset is not None
    assert plan_of({"default_workflow_type": "async_simple_mm_workflow"})
    for workflow in ("math_workflow", "environment_workflow", "external_agent_workflow"):
        with pytest.raises(ConfigError, match=f"taskset.format.image_key: is given, and {workflow} shows no images"):
            plan_of({"default_workflow_type": workflow})
    with pytest.raises(ConfigError, match=r"taskset.format.image_key: is missing; simple_mm_workflow needs"):
        plan_of({"format": {}})


@pytest.mark.parametrize("name", ["squares", "geometry3k"])
def test_the_examples_are_right(name: str, repository: Path) -> None:
    plan = make_plan(load(repository / f"examples/vision/{name}.yaml"))
    assert plan.config.buffer.explorer_input.taskset.format.image_key  # type: ignore[union-attr]


def test_an_archive_of_a_run_with_images_is_allowed() -> None:
    assert plan_of(buffer={"trainer_input": {"experience_buffer": {"path": "a.jsonl"}}})
