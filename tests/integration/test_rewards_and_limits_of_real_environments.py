"""Workflows on the built-in environments: what the YAML's names and rewards mean there, and R3L up to its results."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.fakes.environments.in_process import InProcess
from support.fakes.explorers.toolbox import Toolbox, make_episode_task
from trinity.buffer.ledger.wire import Entry
from trinity.buffer.log.wire import LogEntry
from trinity.buffer.report import Reporter
from trinity.compat_rft.workflows import WORKFLOWS as OF_TRINITY_RFT
from trinity.config import make_plan
from trinity.config.load import parse
from trinity.data.experience import Experience, Group, Task, TaskKind
from trinity.data.wire import encode_outcome
from trinity.environments import ENVIRONMENTS
from trinity.environments.game import replies as written
from trinity.explorer.rollout import attempt
from trinity.explorer.workflows import WORKFLOWS
from trinity.explorer.workflows.player import seed_of
from trinity.study.results import collect

pytestmark = pytest.mark.core

Seen = list[tuple[str, str]]


def make_task(workflow: str, row: dict[str, Any], n: int = 1, args: dict[str, Any] | None = None) -> Task:
    kind = TaskKind.EVALUATION if n == 1 else TaskKind.TRAIN
    given = {"row_json": json.dumps(row), "max_tokens": 600, "kind": kind}
    return make_episode_task(json.dumps(args or {}), n, workflow=workflow, **given)


async def explored(task: Task, policy: Callable[[Seen], str]) -> Group:
    name = {**WORKFLOWS, **OF_TRINITY_RFT}[task.workflow].rules.environment  # type: ignore[attr-defined]
    tools = Toolbox(policy, {name: lambda *given: InProcess(name, *given)}, max_model_tokens=200_000)
    group = await attempt.explore(task, 1, "me", tools)
    assert isinstance(group, Group), group
    return group


async def played(task: Task, *replies: str) -> Experience:
    """The replies in turn, again and again."""

    def policy(seen: Seen) -> str:
        return replies[(sum(role == "assistant" for role, _ in seen) - 1) % len(replies)]

    return (await explored(task, policy)).experiences[0]


@pytest.mark.parametrize("workflow", ["gym_card_workflow", "grpo_baseline_gym_card_workflow", "R3L_gym_card_workflow"])
@pytest.mark.parametrize(("game", "reward"), [("blackjack", 1), ("ez_points", 10), ("points24", 10)])
async def test_every_card_game_is_played_and_won(game: str, reward: float, workflow: str) -> None:
    task = make_task(workflow, {"game": game, "seed": 3})
    won = await played(task, *ENVIRONMENTS[game].oracle(task.raw, {}, seed_of(task)))  # type: ignore[attr-defined]
    assert (won.reward, won.metrics["success"]) == (reward, 1)
    assert won.metrics["invalid_format"] == won.metrics["invalid_action"] == 0


@pytest.mark.parametrize("name", ["max_env_steps", "agent_max_steps"])
async def test_a_limit_of_steps_above_the_environments_own_is_reached(name: str) -> None:
    task = make_task("frozen_lake_workflow", {"desc": ["SFFFFFFG"]}, args={name: 40, "env_max_steps": 7})
    wandering = await played(task, *written(["Left", "Up"]))
    assert wandering.metrics["steps"] == 40
    assert wandering.metrics["end_done"] == 1


@pytest.mark.parametrize(
    ("workflow", "row", "actions", "needs"),
    [
        ("webshop_workflow", {"session_id": 0}, ["search[shoes]", "click[back to search]"], "trinity"),
        ("alfworld_workflow", {"seed": 1}, ["look", "inventory"], "textworld"),
        ("alfworld_workflow", {"seed": 1}, ["look"], "textworld"),  # three times the same
    ],
)
async def test_what_trinity_rft_takes_off_for_an_unsolved_task_is_taken_off(
    workflow: str, row: dict[str, Any], actions: list[str], needs: str
) -> None:
    pytest.importorskip(needs)
    failed = await played(make_task(workflow, row), *written(actions))
    assert failed.reward == pytest.approx(-0.1)
    assert failed.metrics["success"] == 0


@pytest.mark.parametrize(
    ("name", "row", "answer"),
    [
        ("countdown", {"nums": [1, 2, 3], "target": 6}, "1 + 2 + 3"),
        ("dapo", {"question": "What is 2 and 3?", "answer": "5"}, "5"),
    ],
)
async def test_r3l_takes_no_answer_without_a_thought_and_it_costs_an_attempt(
    name: str, row: dict[str, Any], answer: str
) -> None:
    bare, thought = f"<answer>{answer}</answer>", f"<think>So.</think><answer>{answer}</answer>"
    for workflow in (f"R3L_{name}_workflow", f"grpo_baseline_{name}_workflow"):
        refused = await played(make_task(workflow, row), bare)
        assert (refused.reward, refused.metrics["steps"], refused.metrics["invalid_format"]) == (0, 3, 3)
        second = await played(make_task(workflow, row), bare, thought)
        assert (second.reward, second.metrics["steps"]) == (1, 2)
    assert (await played(make_task(f"{name}_workflow", row), bare)).reward == 1


RUN = """
project: p
name: n
model: {model_path: m, max_prompt_tokens: 16, max_response_tokens: 16}
buffer: {batch_size: 1, explorer_input: {taskset: {name: sokoban, path: d.jsonl}}}
"""


class MonitorFile:
    def __init__(self, job: Path) -> None:
        self.path = job / "monitor/explorer.jsonl"
        self.path.parent.mkdir(parents=True)

    def log(self, metrics: Any, step: int) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")

    def close(self) -> None: ...


def reflecting() -> Callable[[Seen], str]:
    """Waits at the wall. Of its reflections every other one has the right advice; with that it pushes the box."""
    asked = 0

    def policy(seen: Seen) -> str:
        nonlocal asked
        if seen[0][1].startswith("You review"):
            asked += 1
            report = {
                "trajectory_summary": "It walked against the wall.",
                "root_cause_analysis": "It never pushed the box.",
                "trajectory_outcome": "failure",
                "improvement_suggestion": "Push the box to the right." if asked % 2 else "Wait.",
                "retry_from_step": 2,
            }
            return f"```json\n{json.dumps(report)}\n```"
        pushes = any("Push the box" in text for _, text in seen)
        return written(["right" if pushes else "up"])[0]

    return policy


async def test_r3ls_second_attempts_are_measured_up_to_the_results_table(tmp_path: Path) -> None:
    task = make_task("R3L_sokoban_workflow", {"level": "#######\n#P_X_O#\n#######"}, n=8)
    group = await explored(task, reflecting())
    seconds = [e.metrics for e in group.experiences if "second_success" in e.metrics]
    assert [e.metrics["reflect_valid"] for e in group.experiences if "reflect_valid" in e.metrics] == [1] * 4
    assert sorted(m["second_improve"] for m in seconds) == [0, 0, 1, 1]
    better = next(m for m in seconds if m["second_improve"])
    assert better == {
        "second_success": 1,
        "second_steps": 5,
        "second_reward": 1,
        "second_improve": 1,
        "second_reward_diff": 1,
        "retry_from_step": 2,
        "replay_differs": 0,
    }
    reporter = Reporter(make_plan(parse(RUN)), None)
    reporter.monitor = MonitorFile(tmp_path / "job")
    entry = LogEntry.parse(encode_outcome(group))
    stored = entry.summary(task.ordinal)
    reporter.stored(stored, entry.rollout_values())
    reporter.written(Entry("run", 1, "fifo", 0.0, groups=(stored,)))
    found = {(curve.taskset, curve.metric): curve.points for curve in collect([tmp_path / "job"], [])}
    assert found == {("rollout", "second_improve"): ((1, 0.5),), ("rollout", "second_success"): ((1, 0.5),)}
