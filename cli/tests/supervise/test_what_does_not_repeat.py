"""`trinity check` of reproducible: true refuses environments and plugins that do not repeat, and names the key."""

from pathlib import Path
from typing import Any

import pytest

from support.checks.deep_check import check, play

pytestmark = pytest.mark.core

ROW = {"question": "?", "answer": "2", "nums": [10, 4, 4], "target": 24}
TASKSET = "buffer.explorer_input.taskset"
PLUGIN = """
from trinity import plugins
from trinity.sdk.environment import Environment, Observation


@plugins.environment("coin")
class Coin(Environment):
    def reset(self, task, args, seed):
        return Observation("?")

    def step(self, action):
        return Observation("", done=True)


@plugins.reward_function("lottery", random=True)
def lottery(item, args):
    return 0.0


@plugins.reward_function("steady")
def steady(item, args):
    return 0.0


@plugins.experience_operator("dice", random=True)
def dice(groups, args):
    return groups
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plugin's module has one place in a process."""
    made = tmp_path_factory.mktemp("plugins")
    (made / "plugins_of_chance.py").write_text(PLUGIN)
    return made


@pytest.mark.parametrize(
    ("taskset", "overrides", "said"),
    [
        (play("countdown"), [], ""),
        (play("coin"), [], f"{TASKSET}.workflow_args.environment: is 'coin', which does not announce"),
        ({"default_reward_fn_type": "steady"}, [], ""),
        (
            {"default_reward_fn_type": "lottery"},
            [],
            f"{TASKSET}.default_reward_fn_type: uses 'lottery', which declares random=True",
        ),
        (
            {"default_reward_fn_type": "steady"},
            ["data_processor.experience_pipeline.operators=[{name: dice}]"],
            "operators.0.name: is 'dice', which declares random=True",
        ),
    ],
)
def test_it_is_refused_with_reproducible_alone(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    taskset: dict[str, Any],
    overrides: list[str],
    said: str,
) -> None:
    monkeypatch.setenv("TRINITY_PLUGIN_DIRS", str(folder))
    code, output = check(tmp_path, ROW, "reproducible=true", *overrides, **taskset)
    assert code == (2 if said else 0), output
    assert said in " ".join(output.split())
    code, output = check(tmp_path, ROW, *overrides, **taskset)
    assert code == 0, output
