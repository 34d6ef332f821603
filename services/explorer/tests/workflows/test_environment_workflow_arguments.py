"""Arguments of environment workflows, Trinity-RFT's names among them; the docs and the YAML know all."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.fakes.explorers.toolbox import Toolbox, make_episode_task, right
from trinity.compat_rft.workflows import WORKFLOWS as OF_TRINITY_RFT
from trinity.config import workflows as config_workflows
from trinity.explorer.workflows import WORKFLOWS, find_workflow
from trinity.explorer.workflows.environments import ENVIRONMENT_WORKFLOWS, EnvironmentWorkflow
from trinity.plugins import satellites
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core
ALL = {**WORKFLOWS, **OF_TRINITY_RFT}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, r"workflow_args\.environment: is missing"),
        ({"environment": "corridor", "max_turn": 3}, r"max_turn: unknown key; did you mean 'max_turns'\?"),
        ({"environment": "corridor", "max_turns": 0}, r"max_turns: is 0, must be greater than or equal to 1"),
        ({"environment": "corridor", "max_repeats": 1}, r"max_repeats: is 1, must be 0 or at least 2"),
        ({"environment": "corridor", "on_bad_format": "ignore"}, r"must be one of end, penalty, no_op, pass"),
        ({"environment": "corridor", "penalty": "much"}, r"penalty: is 'much', must be a number"),
        ({"environment": "corridor", "environment_args": []}, r"environment_args: is a list, must be a mapping"),
        ({"environment": "corridor", "step_wise": 1}, r"step_wise: is 1, must be true or false"),
    ],
)
def test_bad_arguments_are_refused_by_name(args: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        EnvironmentWorkflow(make_episode_task(json.dumps(args)), Toolbox(right))


def test_names_of_trinity_rft_play_their_environments() -> None:
    for name in ("alfworld_workflow", "sciworld_workflow", "webshop_workflow", "frozen_lake_workflow"):
        workflow = ENVIRONMENT_WORKFLOWS[name](make_episode_task('{"max_env_steps": 7}'), Toolbox(right))
        assert isinstance(workflow, EnvironmentWorkflow)
        assert workflow.player.rules.max_turns == 7
        assert workflow.player.rules.environment in name.replace("sciworld", "scienceworld")
    step_wise = ENVIRONMENT_WORKFLOWS["step_wise_alfworld_workflow"](make_episode_task(), Toolbox(right))
    assert isinstance(step_wise, EnvironmentWorkflow)
    assert step_wise.player.rules.step_wise


@pytest.mark.parametrize("name", ["max_env_steps", "agent_max_steps"])
@pytest.mark.parametrize(
    ("workflow", "argument"),
    [
        ("alfworld_workflow", "max_steps"),
        ("sciworld_workflow", "max_steps"),
        ("webshop_workflow", "max_steps"),
        ("frozen_lake_workflow", "max_steps"),
        ("sokoban_workflow", "max_steps"),
        ("gym_card_workflow", "max_steps"),
        ("R3L_alfworld_workflow", "max_steps"),
        ("countdown_workflow", "max_attempts"),
        ("R3L_dapo_workflow", "max_attempts"),
    ],
)
def test_trinity_rfts_limit_of_steps_is_the_environments_too(workflow: str, argument: str, name: str) -> None:
    made = ALL[workflow](make_episode_task(json.dumps({name: 50})), Toolbox(right))
    rules = made.player.rules  # type: ignore[attr-defined]
    assert (rules.max_turns, rules.environment_args[argument]) == (50, 50)
    others = {**config_workflows.EPISODE_WORKFLOWS, **config_workflows.R3L_WORKFLOWS}[workflow].environment_args
    assert {**rules.environment_args, argument: 50} == {**others, argument: 50}


def test_the_limit_of_an_environment_of_a_plugin_is_its_own() -> None:
    made = EnvironmentWorkflow(
        make_episode_task(
            '{"environment": "corridor", "environment_args": {"a": 1}, "max_env_steps": 150,'
            ' "branches": {"turns": [120]}}'
        ),
        Toolbox(right),
    )
    assert (made.player.rules.max_turns, made.player.rules.environment_args) == (150, {"a": 1})


def test_frozen_lakes_names_of_trinity_rft_reach_the_environment() -> None:
    args = {"env_max_steps": 6, "agent_max_steps": 12, "is_slippery": True, "desc": None}
    made = ENVIRONMENT_WORKFLOWS["frozen_lake_workflow"](make_episode_task(json.dumps(args)), Toolbox(right))
    rules = made.player.rules  # type: ignore[attr-defined]
    assert rules.max_turns == 12
    assert rules.environment_args == {"max_steps": 12, "path_max_steps": 6, "is_slippery": True}


@pytest.mark.parametrize(
    ("workflow", "args", "message"),
    [
        (
            "alfworld_workflow",
            {"max_env_steps": 5, "agent_max_steps": 6},
            r"agent_max_steps: means the same as max_env_steps; give one of the two",
        ),
        ("alfworld_workflow", {"max_turns": 5, "max_env_steps": 5}, r"max_env_steps: means the same as max_turns"),
        (
            "alfworld_workflow",
            {"max_env_steps": 5, "environment_args": {"max_steps": 5}},
            r"environment_args\.max_steps: means the same as max_env_steps",
        ),
        (
            "alfworld_workflow",
            {"max_env_steps": 5, "branches": {"turns": [5]}},
            "branches: has the turn 5, must be below max_turns=5",
        ),
        ("frozen_lake_workflow", {"env_max_steps": 0}, r"env_max_steps: is 0, must be greater than or equal to 1"),
        ("frozen_lake_workflow", {"is_slippery": "no"}, r"is_slippery: is 'no', must be true or false"),
        ("frozen_lake_workflow", {"desc": ["SG"]}, r"desc: is a list, must be null: a map belongs into its row"),
        ("alfworld_workflow", {"is_slippery": True}, r"is_slippery: unknown key"),
    ],
)
def test_names_of_trinity_rft_that_cannot_be_are_refused(workflow: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=rf"workflow_args\.{message}"):
        ENVIRONMENT_WORKFLOWS[workflow](make_episode_task(json.dumps(args)), Toolbox(right))
    problems = list(config_workflows.workflow_problems(workflow, args))
    assert len(problems) == 1, "the YAML is refused when it is read, too"


def test_the_yaml_knows_exactly_the_workflows_there_are() -> None:
    assert sorted(config_workflows.WORKFLOWS) == sorted(ALL)
    assert OF_TRINITY_RFT.keys() == config_workflows.OF_TRINITY_RFT
    for name, rules in config_workflows.EPISODE_WORKFLOWS.items():
        assert ALL[name].rules == rules  # type: ignore[attr-defined]
    for name, rules in config_workflows.R3L_WORKFLOWS.items():
        assert ALL[name].rules == rules  # type: ignore[attr-defined]


def test_without_the_satellite_the_other_workflows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {name: find_workflow(name) for name in ALL} == ALL
    monkeypatch.setattr(satellites, "find", lambda hook: None)
    assert {name: found for name in ALL if (found := find_workflow(name))} == WORKFLOWS


def test_the_docs_have_every_workflow_and_every_rule(repository: Path) -> None:
    text = (repository / "docs/workflows.md").read_text()
    prefixes = ("async_", "grpo_baseline_", "R3L_")
    named = [name for name in ALL if not name.startswith(prefixes)]
    missing = [name for name in (*named, *config_workflows.ReflectionRules.model_fields) if f"`{name}" not in text]
    assert not missing
    for environment in config_workflows.R3L_RULES:
        assert environment in text
