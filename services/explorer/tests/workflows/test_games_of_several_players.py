"""Games of several players: who acts, what each seat sees and earns, and what becomes an experience."""

import asyncio
import json
from typing import Any

import pytest

from support.fakes.explorers.toolbox import Toolbox, make_episode_task, turns
from trinity.compat_rft.workflows import WORKFLOWS as OF_TRINITY_RFT
from trinity.data.experience import Experience, Group, TaskKind
from trinity.explorer.workflows import WORKFLOWS
from trinity.explorer.workflows.players import NoTurn
from trinity.runtime.errors import InvalidInput
from trinity.sdk.contract import Answer

pytestmark = pytest.mark.core


class Count:
    """Players say the next number in turn, from 1 on; who says `last` wins, and a wrong number loses.

    Each `again` of the arguments is a number after which the same player acts again.
    """

    players: tuple[str, ...] = ("white", "black")
    deterministic = snapshots = False

    def __init__(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> None:
        self.last, self.again, self.at, self.acting = task.get("last", 4), args.get("again", ()), 0, 0
        self.closed = False

    async def __aenter__(self) -> "Count":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.closed = True

    def _show(self, **others: Any) -> Answer:
        return Answer(f"It is {self.at}.", player=self.players[self.acting], **others)

    async def reset(self, keep_states: bool = False) -> Answer:
        return self._show(info_json='{"instructions": "Count."}')

    async def step(self, action: str) -> Answer:
        await asyncio.sleep(0)
        me, right = self.players[self.acting], action == str(self.at + 1)
        self.at += right
        metrics = {"said": float(self.at)}
        if not right or self.at == self.last:
            winners = [player for player in self.players if (player == me) == right]
            rewards = {player: 1.0 if player in winners else -1.0 for player in self.players}
            return Answer("Over.", done=True, metrics=metrics, rewards=rewards)
        if self.at not in self.again:
            self.acting = (self.acting + 1) % len(self.players)
        return self._show(metrics=metrics, rewards={me: 0.25})


class Three(Count):
    players = ("a", "b", "c")


class Alone(Count):
    players = ()

    def _show(self, **others: Any) -> Answer:
        return Answer("Alone.", **others)


def counting(heard: list[tuple[str, str]]) -> str:
    """The next number."""
    return str(int(heard[-2][1].removeprefix("It is ").removesuffix(".")) + 1)


def wrong(_: object) -> str:
    return "never"


def toolbox(policy: Any = counting, kind: type[Count] = Count, **others: Any) -> Toolbox:
    return Toolbox(policy, {"count": kind}, **others)


async def play(
    tools: Toolbox, n: int = 2, row: str = "{}", changes: dict[str, Any] | None = None, **args: Any
) -> list[Experience]:
    task = make_episode_task(json.dumps({"environment": "count", **args}), n, row_json=row, **(changes or {}))
    made = await WORKFLOWS["players_workflow"](task, tools).run()
    Group(task, 1, "explorer", tuple(made), 1.0, 2.0).check()
    return made


def info(one: Experience) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(one.info_json)
    return found


def said(one: Experience) -> list[tuple[str, str]]:
    return [turn for turn in turns(one.token_ids) if turn[1]]


async def test_in_self_play_each_seat_is_an_experience_with_its_own_reward_and_group() -> None:
    tools = toolbox()
    made = await play(tools, n=2)
    assert [(one.rollout, info(one)["group"], one.reward) for one in made] == [
        (0, "white", 0.5 - 1.0), (1, "black", 0.25 + 1.0), (2, "white", -0.5), (3, "black", 1.25),
    ]  # fmt: skip
    white, black = made[:2]
    assert said(white) == [
        ("system", "Count."), ("user", "It is 0."), ("assistant", "1"), ("user", "It is 2."), ("assistant", "3"),
    ]  # fmt: skip
    assert said(black) == [
        ("system", "Count."), ("user", "It is 1."), ("assistant", "2"), ("user", "It is 3."), ("assistant", "4"),
    ]  # fmt: skip
    assert (white.metrics["said"], black.metrics["said"]) == (3.0, 4.0), "of the player's own last action"
    assert (white.metrics["success"], black.metrics["success"]) == (0.0, 1.0)
    assert "score" not in white.metrics, "both are the policy"
    assert info(white)["seats"] == {"white": "policy", "black": "policy"}
    assert int(white.action_mask.sum()) == len("1!3!")
    assert all(episode.closed for episode in tools.episodes)


async def test_a_player_may_act_again_and_one_without_a_turn_gives_no_experience() -> None:
    made = await play(toolbox(), n=1, row='{"last": 2}', environment_args={"again": [1]})
    assert [(info(one)["player"], one.reward) for one in made] == [("white", 1.25)]
    assert [text for role, text in said(made[0]) if role == "assistant"] == ["1", "2"]


async def test_only_the_seats_of_the_policy_are_trained() -> None:
    tools = toolbox(wrong)
    tools.version, tools.olders = 9, {4: toolbox(), 6: toolbox()}
    made = await play(tools, n=3, seats={"white": "older"}, rotate=True)
    (version,) = {int(seat.split()[1]) for one in made for seat in info(one)["seats"].values() if seat != "policy"}
    assert [info(one)["player"] for one in made] == ["black", "white", "black"]
    assert [one.rollout for one in made] == [1, 2, 5]
    for one in made:
        assert [text for role, text in said(one) if role == "assistant"] == ["never"]
        assert [span.version for span in one.version_spans] == [9]
        assert (one.metrics["score"], one.metrics[f"score_against_{version}"]) == (0.0, 0.0)
    assert len(tools.olders[version].prompts) == 2, "it acted before the policy in two of three games"
    assert not tools.olders[({4, 6} - {version}).pop()].prompts, "one opponent for the whole group"


async def test_an_auxiliary_model_plays_by_text() -> None:
    asked: list[list[Any]] = []

    def judged(messages: list[dict[str, Any]]) -> str:
        asked.append([(m["role"], m["content"]) for m in messages])
        return counting([("user", messages[-1]["content"]), ("assistant", "")])

    tools = toolbox(judged=judged)
    made = await play(tools, n=1, seats={"black": "judge"})
    assert [(info(one)["player"], one.reward, one.metrics["score"]) for one in made] == [("white", -0.5, 0.0)]
    assert info(made[0])["seats"] == {"white": "policy", "black": "judge"}
    assert asked[1] == [
        ("system", "Count."), ("user", "It is 1."), ("assistant", "2"), ("user", "It is 3."),
    ]  # fmt: skip
    tools.judged_step = 20
    made = await play(tools, n=1, seats={"black": "judge"})
    assert info(made[0])["seats"]["black"] == "judge 20", "it follows another run"


async def test_an_early_end_of_one_seat_ends_the_game_of_all() -> None:
    made = await play(toolbox(), n=1, row='{"last": 9}', max_turns=1)
    assert [(one.reward, one.metrics["end_turn_limit"], one.metrics["end_done"]) for one in made] == [
        (0.25, 1.0, 0.0), (0.25, 0.0, 1.0),
    ]  # fmt: skip
    made = await play(toolbox(), n=1, action_form="action", early_end_reward=-2.0)
    assert [(info(one)["player"], one.reward) for one in made] == [("white", -2.0)]


async def test_who_leaves_a_game_has_lost_it() -> None:
    made = await play(toolbox(judged=wrong), n=1, seats={"black": "judge"}, action_form="action")
    assert [one.metrics["score"] for one in made] == [0.0], "the policy's first reply is no action"


async def test_games_without_a_turn_of_the_policy_are_played_again() -> None:
    with pytest.raises(NoTurn, match=r"no seat of the policy had a turn in 2 game\(s\)"):
        await play(toolbox(judged=lambda _: "never"), seats={"white": "judge"})


async def test_turn_by_turn_and_in_evaluations() -> None:
    made = await play(toolbox(), n=1, step_wise=True)
    assert [(one.rollout, one.step, info(one)["group"]) for one in made] == [
        (0, 0, "white"), (0, 1, "white"), (1, 0, "black"), (1, 1, "black"),
    ]  # fmt: skip
    assert [bool(one.metrics) for one in made] == [False, True] * 2
    made = await play(toolbox(), n=1, step_wise=True, changes={"kind": TaskKind.EVALUATION})
    assert [(one.rollout, one.step) for one in made] == [(0, 1), (1, 1)]


async def test_games_of_a_group_are_played_at_the_same_time() -> None:
    """Each game waits for the other's first turn."""
    begun: list[int] = []
    both = asyncio.Event()

    class Met(Count):
        async def reset(self, keep_states: bool = False) -> Answer:
            begun.append(1)
            if len(begun) == 2:
                both.set()
            await asyncio.wait_for(both.wait(), 5)
            return await super().reset()

    assert len(await play(toolbox(kind=Met), n=2)) == 4


async def test_more_than_two_players() -> None:
    made = await play(toolbox(kind=Three), n=2, row='{"last": 3}')
    assert [(one.rollout, info(one)["player"], one.reward) for one in made[:3]] == [
        (0, "a", -0.75), (1, "b", -0.75), (2, "c", 1.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "seats", "message"),
    [
        (Count, {"red": "policy"}, r"workflow_args.seats.red: is given, and the players of count are white, black"),
        (Count, {"white": "judge", "black": "judge"}, "workflow_args.seats: leaves the policy no seat"),
        (Alone, {}, "workflow_args.environment: is 'count', of one player; use environment_workflow"),
        (
            Count,
            {"white": 3},
            "workflow_args.seats.white: is 3, must be text",
        ),
        (Count, ["white"], "workflow_args.seats: is .*must be a mapping"),
    ],
)
async def test_seats_that_do_not_fit_are_refused(kind: type[Count], seats: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        await play(toolbox(kind=kind, judged=lambda _: "1"), seats=seats)


async def test_branches_are_refused() -> None:
    with pytest.raises(
        InvalidInput, match=r"workflow_args\.branches: .*must be left out: games of several players do not branch"
    ):
        await play(toolbox(), branches={"turns": [1]})


@pytest.mark.parametrize("workflow", ["environment_workflow", "R3L_workflow", "tool_call_workflow"])
async def test_other_workflows_refuse_games_of_several_players(workflow: str) -> None:
    task = make_episode_task(json.dumps({"environment": "count"}), 2)
    with pytest.raises(InvalidInput, match=r"use players_workflow"):
        await {**WORKFLOWS, **OF_TRINITY_RFT}[workflow](task, toolbox()).run()
