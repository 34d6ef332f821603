"""Experiences of workflows through the log's bytes to advantages: groups within groups, steps, states, teachers."""

import json
from typing import Any

import numpy as np
import pytest

from support.fakes.explorers.toolbox import Toolbox, make_episode_task
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.config.algorithms import resolve
from trinity.config.schema.algorithm import AlgorithmConfig
from trinity.data.experience import Group, Task
from trinity.data.wire import encode_outcome
from trinity.explorer.rollout import attempt
from trinity.trainer.data.batch import TrainSequence, from_groups

pytestmark = pytest.mark.core

REPORT = {
    "trajectory_summary": "It turned round.",
    "root_cause_analysis": "It went left.",
    "trajectory_outcome": "failure",
    "improvement_suggestion": "Go right.",
    "retry_from_step": 1,
}


async def trained(algorithm: str, tools: Toolbox, *tasks: Task, **args: Any) -> list[TrainSequence]:
    groups = []
    for task in tasks:
        group = await attempt.explore(task, 1, "me", tools)
        assert isinstance(group, Group), group
        groups.append(encode_outcome(group))
    plan = resolve(AlgorithmConfig(algorithm_type=algorithm, **args))
    entry = pb.LedgerEntry(step=1, groups=[pb.LedgerGroup() for _ in groups])
    return list(from_groups(entry, groups, plan).sequences)


def task(workflow: str, args: dict[str, Any], n: int = 2, row: str = '{"length": 3}') -> Task:
    given = json.dumps({"environment": "corridor", **args})
    return make_episode_task(given, n, workflow=workflow, row_json=row, max_tokens=600)


def reflecting(seen: list[tuple[str, str]]) -> str:
    if seen[0][1].startswith("You review"):
        return json.dumps(REPORT)
    begun = any(role == "assistant" and text for role, text in seen[:-1])
    return "right" if not begun or any("Go right." in text for _, text in seen) else "left"


@pytest.mark.parametrize(("args", "best"), [({}, 1), ({"advantage_fn_args": {"best": 3}}, 3)], ids=["default", "best"])
async def test_what_r3l_distilled_from_is_reweighted_and_no_part_of_the_attempts_baseline(
    args: dict[str, Any], best: float
) -> None:
    sequences = await trained("opmd_reweight_adv", Toolbox(reflecting), task("R3L_workflow", {}, n=4), **args)
    assert [s.reward for s in sequences] == [0, 1, 1, 1] * 2
    assert [s.advantage for s in sequences] == [-0.5, best, best, best] * 2


async def test_turns_of_branches_are_compared_with_their_siblings() -> None:
    last = 0

    def policy(seen: list[tuple[str, str]]) -> str:
        """The episodes themselves lose at 2 of 3, the branches, which ask later, win."""
        nonlocal last
        third = sum(role == "assistant" for role, _ in seen) == 3
        last += third
        return "left" if third and last <= 2 else "right"

    given = {"branches": {"turns": [2]}, "max_turns": 3}
    made = await trained("tree", Toolbox(policy), task("environment_workflow", given, n=4))
    assert sorted(s.reward for s in made) == [0, 0, 1, 1]
    for s in made:
        tokens, branch = s.advantages[s.mask], len("right!")
        assert tokens[-5:].tolist() == [s.reward - 0.5] * 5, "against the other branch"
        assert not tokens[:-branch].any(), "both episodes have half"
        assert (s.mask.sum() > 2 * branch) == (json.loads(s.experience.info_json).get("parent") is None)  # type: ignore[union-attr]


async def test_steps_are_compared_with_those_in_the_same_state() -> None:
    turn = 0

    def wavering(seen: list[tuple[str, str]]) -> str:
        nonlocal turn
        turn += 1
        return "left" if turn == 1 else "right"  # one rollout loses a step at the beginning

    made = await trained(
        "gigpo",
        Toolbox(wavering),
        task("step_wise_environment_workflow", {"max_turns": 2}, row='{"length": 2}'),
        advantage_fn_args={"gamma": 0.5},
    )
    rewards = [s.reward for s in made]
    assert sorted(rewards) == [0, 0, 1, 1]
    for sequence in made:
        won, step = sequence.reward == 1, sequence.experience.step  # type: ignore[union-attr]
        episode = 0.5 if won else -0.5
        state = 0.0
        if (won, step) == (True, 0):
            state = 0.5 - 0.5 / 3  # discounted 0.5, against the two steps of the other rollout in the same state
        elif not won:
            state = -0.5 / 3
        assert sequence.advantage == pytest.approx(episode + state, abs=1e-4)


async def test_multi_step_grpo_spreads_the_last_steps_advantage() -> None:
    turn = 0

    def wavering(seen: list[tuple[str, str]]) -> str:
        nonlocal turn
        turn += 1
        return "left" if turn == 1 else "right"

    args = {"max_turns": 2}
    made = await trained(
        "multi_step_grpo", Toolbox(wavering), task("step_wise_environment_workflow", args, row='{"length": 2}')
    )
    assert [s.advantage for s in made] == pytest.approx(
        [np.sqrt(0.5) * (1 if s.reward else -1) for s in made], abs=1e-4
    )
