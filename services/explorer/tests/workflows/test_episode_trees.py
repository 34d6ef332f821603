"""Rollouts that are the leaves of trees: what they share, what is sampled and trained once, and where they branch."""

import json
from dataclasses import replace
from typing import Any

import pytest

from support.fakes.explorers.toolbox import Corridor, Toolbox, make_episode_task, play, right, turns
from trinity.data.experience import Experience, TaskKind
from trinity.explorer.environments.client import EnvironmentFailed
from trinity.runtime.errors import InvalidInput
from trinity.sdk.contract import Answer

pytestmark = pytest.mark.core

FOUR = '{"length": 4}'


class Restored(Corridor):
    """A corridor that announces snapshots, and is restored from its states."""

    deterministic, snapshots = False, True
    earned: float | None = None

    async def reset(self, keep_states: bool = False) -> Answer:
        assert keep_states
        return self._kept(await super().reset())

    async def restore(self, answer: Answer, earned: float) -> None:
        self.at, self.steps, self.earned = *json.loads(answer.state), earned

    async def step(self, action: str) -> Answer:
        return self._kept(await super().step(action))

    def _kept(self, step: Answer) -> Answer:
        return replace(step, state=json.dumps([self.at, self.steps]).encode())


async def leaves(tools: Toolbox, n: int, branches: dict[str, Any], row: str = FOUR, **args: Any) -> list[Experience]:
    given = json.dumps({"environment": "corridor", "branches": branches, **args})
    return await play(tools, make_episode_task(given, n, row_json=row))


def info(experience: Experience) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(experience.info_json)
    return found


def origins(made: list[Experience]) -> list[tuple[int, int] | None]:
    facts = [info(one) for one in made]
    return [(fact["parent"], fact["branch_turn"]) if "parent" in fact else None for fact in facts]


@pytest.mark.parametrize("environment", [Corridor, Restored])
async def test_shared_turns_are_sampled_and_trained_once(environment: type[Corridor]) -> None:
    tools = Toolbox(right, {"corridor": environment})
    made = await leaves(tools, 8, {"turns": [1, 3], "width": 2})
    assert [one.rollout for one in made] == list(range(8))
    # Two trees, each with 1, 2 and 4 branches.
    assert origins(made) == [None, (0, 3), (0, 1), (2, 3), None, (4, 3), (4, 1), (6, 3)]
    assert len(tools.prompts) == 2 * 1 + 4 * 2 + 8
    assert sum(int(one.action_mask.sum()) for one in made) == len(tools.prompts) * len("right!")
    for one in made:
        assert (one.reward, one.metrics["steps"], len(info(one)["turns"])) == (1.0, 4, 4)
        shared = info(one).get("branch_turn", 0)
        assert one.metrics["shared_tokens"] == shared * len("right!")
        for turn, (begin, end) in enumerate(info(one)["turns"]):
            assert one.action_mask[begin:end].all() == (turn >= shared)
            told = one.token_ids[one.prompt_length + begin : one.prompt_length + end]
            assert turns([3, *told]) == [("assistant", "right")]
    assert all(episode.closed for episode in tools.episodes)


async def test_step_by_step_shared_turns_have_empty_masks() -> None:
    made = await leaves(Toolbox(right), 2, {"turns": [2]}, step_wise=True)
    trained = [(one.rollout, one.step, bool(one.action_mask.any())) for one in made]
    assert trained == [(0, step, True) for step in range(4)] + [(1, step, step >= 2) for step in range(4)]
    assert info(made[4]) == info(made[4]) | {"parent": 0, "branch_turn": 2}


@pytest.mark.parametrize(("entropy", "expected"), [(0.4, [None, (0, 1), (0, 1), (2, 2)]), (0.6, [None] * 4)])
async def test_it_branches_at_uncertain_replies(entropy: float, expected: list[Any]) -> None:
    """Every reply has a surprisal of 0.5. Without branches the rollouts are played from the start."""
    tools = Toolbox(right)
    made = await leaves(tools, 4, {"entropy": entropy, "width": 3, "most": 2})
    assert origins(made) == expected
    assert sum(int(one.action_mask.sum()) for one in made) == sum(len(end) for end in ["right!"] * 4 * 4) - sum(
        6 * turn for _, turn in filter(None, expected)
    )


async def test_rollouts_of_an_episode_that_ends_early_begin_again() -> None:
    made = await leaves(Toolbox(right), 4, {"turns": [1, 4]}, row='{"length": 3}')
    assert origins(made) == [None, None, (0, 1), None]
    assert {one.reward for one in made} == {1.0}


async def test_rewards_so_far_are_restored() -> None:
    class Paying(Restored):
        async def step(self, action: str) -> Answer:
            return replace(await super().step(action), reward=0.25)

    tools = Toolbox(right, {"corridor": Paying})
    made = await leaves(tools, 2, {"turns": [3]})
    assert [episode.earned for episode in tools.episodes] == [None, 0.75]
    assert [one.reward for one in made] == [1.0, 1.0]


async def test_evaluations_do_not_branch() -> None:
    given = json.dumps({"environment": "corridor", "branches": {"turns": [1]}})
    made = await play(Toolbox(right), make_episode_task(given, 2, kind=TaskKind.EVALUATION))
    assert origins(made) == [None, None]
    assert all(one.action_mask.any() for one in made)


async def test_environments_that_cannot_branch_are_refused() -> None:
    class Random(Corridor):
        deterministic = False

    with pytest.raises(InvalidInput, match=r"branches: is set, and corridor announces neither snapshots nor determ"):
        await leaves(Toolbox(right, {"corridor": Random}), 2, {"turns": [1]})


async def test_an_environment_that_is_not_deterministic_as_announced_fails_the_attempt() -> None:
    class Liar(Corridor):
        lies = 0

        async def step(self, action: str) -> Answer:
            Liar.lies += 1
            answer = await super().step(action)
            return replace(answer, observation=f"{answer.observation} {Liar.lies}")

    with pytest.raises(EnvironmentFailed, match="answers the same actions otherwise"):
        await leaves(Toolbox(right, {"corridor": Liar}), 2, {"turns": [1]})


@pytest.mark.parametrize(
    ("branches", "problem"),
    [
        ([1], "must be a mapping"),
        ({"turn": [1]}, "unknown key; did you mean 'turns'"),
        ({"width": 2}, "must have turns: \\[1, ...\\] or entropy: nats, one of the two"),
        ({"turns": [1], "entropy": 1}, "one of the two"),
        ({"turns": [0]}, "is 0, must be greater than or equal to 1"),
        ({"turns": [1, 1]}, "must have different turns"),
        ({"turns": list(range(1, 10))}, "must have at most 8 entries"),
        ({"turns": [1, 100]}, "has the turn 100, must be below max_turns=100"),
        ({"turns": [1], "width": 1}, "is 1, must be greater than or equal to 2"),
        ({"entropy": 1, "most": 9}, "is 9, must be less than or equal to 8"),
        ({"entropy": True}, "is true, must be a number"),
        ({"turns": [1], "most": 2}, "no most, which is for entropy"),
    ],
)
async def test_rules_beyond_their_bounds_are_refused(branches: Any, problem: str) -> None:
    with pytest.raises(InvalidInput, match=rf"workflow_args\.branches(\.\w+)*: .*{problem}"):
        await leaves(Toolbox(right), 2, branches)
