"""What the engine's process of `trinity debug` answers: an outcome in plain numbers, and what is wrong with plugins."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.fakes.explorers.toolbox import Toolbox, make_episode_task, right
from trinity.compat_rft.debug import engine as debug
from trinity.data.experience import UNLIMITED
from trinity.data.wire import task_to_json
from trinity.explorer.settings import ExplorerSettings

pytestmark = pytest.mark.core


async def answer(question: dict[str, Any], settings: ExplorerSettings | None = None) -> dict[str, Any]:
    made = await debug._answer(question, Toolbox(right), UNLIMITED, settings or ExplorerSettings())  # type: ignore[arg-type]
    return json.loads(json.dumps(made))  # type: ignore[no-any-return]


async def test_a_group_is_answered_with_its_arrays() -> None:
    task = make_episode_task(workflow="environment_workflow", workflow_args_json='{"environment": "corridor"}')
    made = await answer({"task": task_to_json(task)})
    assert made["failure"] is None and made["seconds"] >= 0
    assert [one["rollout"] for one in made["experiences"]] == [0, 1]
    for one in made["experiences"]:
        assert len(one["token_ids"]) == one["prompt_tokens"] + one["response_tokens"]
        assert len(one["mask"]) == len(one["logprobs"]) == one["response_tokens"] and set(one["mask"]) <= {0, 1}
        assert one["prompt"] and one["truncation"] == "none" and isinstance(one["reward"], float)


async def test_an_unknown_workflow_is_a_failure_with_its_cause() -> None:
    made = await answer({"task": task_to_json(make_episode_task(workflow="nothing"))})
    assert made["experiences"] == [] and made["failure"]["cause"] == "workflow_error"
    assert "'nothing' is unknown" in made["failure"]["error"]


async def test_plugins_that_cannot_be_imported_are_a_problem_and_no_end(tmp_path: Path) -> None:
    (tmp_path / "plugin_of_debug.py").write_text("def broken(:\n")
    settings = ExplorerSettings(plugin_dirs=str(tmp_path))
    assert "plugin_of_debug.py:1: SyntaxError" in (await answer({"reload": True}, settings))["problem"]
    (tmp_path / "plugin_of_debug.py").write_text("FINE = 1\n")
    assert await answer({"reload": True}, settings) == {"problem": ""}
