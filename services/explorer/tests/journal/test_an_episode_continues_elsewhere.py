"""On a real JetStream: the next holder of a lease continues an episode at its first turn that is not finished."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from support.fakes.data.experience import make_task
from support.fakes.explorers.dying_explorer import LENGTH, RUN, Explorer, info, only, the_task
from support.fakes.explorers.toolbox import Corridor
from trinity.data.experience import (
    AttemptFailure,
    Group,
    SamplingParams,
    Task,
    TaskKind,
)
from trinity.explorer.environments.types import EnvironmentCause, EnvironmentFailed
from trinity.explorer.journal import journal
from trinity.explorer.types import Completion
from trinity.runtime.broker import Broker, PublishRefused
from trinity.runtime.names import owner_of
from trinity.sdk.contract import Answer

pytestmark = pytest.mark.core


async def test_only_the_open_turn_is_sampled_again(broker: Broker) -> None:
    whole = only(await Explorer(broker, "alone").explore(the_task(ordinal=2), 1))
    dying, next_one = Explorer(broker, "a", dies_at=5), Explorer(broker, "next")
    await dying.explore_and_die(the_task(), 1)
    continued = only(await next_one.explore(the_task(), 2))
    assert (dying.asked, next_one.asked) == (5, LENGTH - 4)
    assert continued.token_ids.tolist() == whole.token_ids.tolist()
    assert (continued.reward, continued.metrics) == (whole.reward, whole.metrics)
    trained = continued.logprobs[continued.action_mask]
    each = len(trained) // LENGTH
    assert trained.tolist() == [-1.0] * each * 4 + [-4.0] * each * (LENGTH - 4)
    assert info(continued) == {"moved": [{"turn": 4, "from": owner_of("a"), "to": owner_of("next")}]}
    assert info(whole) == {}


WORD = len("right") + 1  # tokens of a reply: of the word, and its end


async def test_a_long_reply_continues_at_its_last_flush(broker: Broker) -> None:
    """Parts of two tokens: a dies in the third one of turn 1, b in the second one after that."""
    a, b = Explorer(broker, "a", dies_at=6, flush=2), Explorer(broker, "bb", dies_at=2, flush=2)
    b.version = 1
    last = Explorer(broker, "last", flush=2)
    last.version = 2
    await a.explore_and_die(the_task(), 1)
    await b.explore_and_die(the_task(), 2)
    made = only(await last.explore(the_task(), 3))
    made.check("made")
    assert (a.asked, b.asked, last.asked) == (6, 2, 3 * (LENGTH - 2))
    marks = made.logprobs[made.action_mask]
    assert marks.tolist() == [-1.0] * (WORD + 4) + [-2.0] * 2 + [-4.0] * WORD * (LENGTH - 2)
    assert [span.version for span in made.version_spans] == [0, 1, 2]
    assert info(made)["moved"] == [
        {"turn": 1, "from": owner_of("a"), "to": owner_of("bb"), "token": 4},
        {"turn": 2, "from": owner_of("bb"), "to": owner_of("last")},
    ]
    calm = only(await Explorer(broker, "calm").explore(the_task(ordinal=2), 1))
    assert made.token_ids.tolist() == calm.token_ids.tolist()


async def test_an_episode_of_one_long_turn_continues_within_it(broker: Broker) -> None:
    task = the_task(args={"max_turns": 1})
    await Explorer(broker, "a", dies_at=2, flush=4).explore_and_die(task, 1)
    next_one = Explorer(broker, "next", flush=4)
    made = only(await next_one.explore(task, 2))
    assert next_one.asked == 1
    assert info(made)["moved"] == [{"turn": 0, "from": owner_of("a"), "to": owner_of("next"), "token": 4}]


async def test_a_reply_with_stop_texts_is_kept_whole(broker: Broker) -> None:
    task = the_task()
    task = replace(task, sampling=replace(task.sampling, stop=("never",)))
    explorer = Explorer(broker, "a", flush=2)
    only(await explorer.explore(task, 1))
    assert explorer.asked == LENGTH


async def test_weights_that_go_back_within_a_reply_begin_the_episode_again(broker: Broker) -> None:
    class GoesBack(Explorer):
        async def generate(self, prompt_token_ids: Any, sampling: SamplingParams, images: Any = ()) -> list[Completion]:
            self.version = 0 if self.asked == 1 else 1
            return await super().generate(prompt_token_ids, sampling)

    explorer = GoesBack(broker, "a", flush=3)
    made = only(await explorer.explore(the_task(), 1))
    assert {span.version for span in made.version_spans} == {1}
    assert explorer.asked == 2 + 2 * LENGTH


@pytest.mark.parametrize("step_wise", [False, True])
async def test_an_episode_moves_again_and_again(broker: Broker, step_wise: bool) -> None:
    """Each explorer finishes one turn. Deaths that got further do not count: the task may fail once alone."""
    task = the_task(max_attempts=1, args={"step_wise": step_wise, "max_turns": 8})
    task = replace(task, row_json=json.dumps({"length": 8}))
    for number in range(1, 8):
        dying = Explorer(broker, f"e{number}", dies_at=2)
        await dying.explore_and_die(task, number)
        assert dying.asked == 2
    last = Explorer(broker, "last")
    group = await last.explore(task, 8)
    assert isinstance(group, Group), group
    assert last.asked == 1
    assert [move["turn"] for move in info(group.experiences[-1])["moved"]] == list(range(1, 8))
    assert len(group.experiences) == (8 if step_wise else 1)


async def test_each_rollout_of_a_group_continues_on_its_own(broker: Broker) -> None:
    dying, next_one = Explorer(broker, "a", dies_at=8, rollouts=3), Explorer(broker, "next")
    await dying.explore_and_die(the_task(3), 1)
    group = await next_one.explore(the_task(3), 2)
    assert isinstance(group, Group)
    assert next_one.asked == 3 * LENGTH - 7
    assert [e.reward for e in group.experiences] == [1.0] * 3


class Duel(Corridor):
    """Two players act in turn."""

    players = ("white", "black")

    async def reset(self, keep_states: bool = False) -> Answer:
        return Answer("Begin.", player="white")

    async def step(self, action: str) -> Answer:
        actor, self.steps = self.players[self.steps % 2], self.steps + 1
        done = self.steps == LENGTH
        acts_next = "" if done else self.players[self.steps % 2]
        return Answer(f"Step {self.steps}: {action}.", done=done, player=acts_next, rewards={actor: 0.25})


class DuelWithLuck(Duel):
    deterministic = False


def the_games(**args: Any) -> Task:
    return replace(the_task(2, args=args), workflow="players_workflow")


async def test_both_seats_of_a_game_against_itself_continue(broker: Broker) -> None:
    dying, next_one = Explorer(broker, "a", Duel, dies_at=8, rollouts=2), Explorer(broker, "next", Duel)
    await dying.explore_and_die(the_games(), 1)
    group = await next_one.explore(the_games(), 2)
    assert isinstance(group, Group), group
    assert next_one.asked == 2 * LENGTH - 7
    assert [(info(one)["player"], one.reward) for one in group.experiences] == [("white", 0.75), ("black", 0.75)] * 2
    assert all(info(one)["moved"] for one in group.experiences)


@pytest.mark.parametrize(("kind", "seats"), [(DuelWithLuck, {}), (Duel, {"black": "older"})])
async def test_a_game_of_luck_or_of_others_is_not_kept(broker: Broker, kind: type[Duel], seats: dict[str, str]) -> None:
    explorer = Explorer(broker, "a", kind)
    explorer.olders = {3: Explorer(broker, "old", kind)}
    assert isinstance(await explorer.explore(the_games(seats=seats), 1), Group)
    assert (await broker.state(RUN.turns_stream)).messages == 0


class Forgetful(Corridor):
    """It says how often it was reset: no episode is the same."""

    resets = 0

    async def reset(self, keep_states: bool = False) -> Answer:
        Forgetful.resets += 1
        step = await super().reset()
        return replace(step, observation=f"{step.observation} Round {Forgetful.resets}.")


class LateForgetful(Corridor):
    """Its third answer differs in each process."""

    reward = 0.0

    async def step(self, action: str) -> Answer:
        made = await super().step(action)
        return replace(made, reward=LateForgetful.reward) if self.steps == 2 else made


class Undeclared(Corridor):
    deterministic = False


async def test_an_environment_that_answers_otherwise_is_played_again_from_there(broker: Broker) -> None:
    await Explorer(broker, "a", Forgetful, dies_at=4).explore_and_die(the_task(), 1)
    next_one = Explorer(broker, "next", Forgetful)
    assert info(only(await next_one.explore(the_task(), 2))) == {}
    assert next_one.asked == LENGTH
    LateForgetful.reward = 0.0
    await Explorer(broker, "a", LateForgetful, dies_at=5).explore_and_die(the_task(ordinal=2), 1)
    LateForgetful.reward = 0.25
    later = Explorer(broker, "next", LateForgetful)
    made = only(await later.explore(the_task(ordinal=2), 2))
    assert later.asked == LENGTH - 2
    assert made.reward == 1.25
    assert [move["turn"] for move in info(made)["moved"]] == [2]


async def test_without_the_declaration_or_with_one_turn_nothing_is_kept(broker: Broker) -> None:
    only(await Explorer(broker, "a", Undeclared).explore(the_task(), 1))
    only(await Explorer(broker, "a").explore(the_task(ordinal=2, args={"max_turns": 1}), 1))
    evaluation = replace(the_task(ordinal=3), kind=TaskKind.EVALUATION)
    only(await Explorer(broker, "a").explore(evaluation, 1))
    simple = replace(make_task(ordinal=4), workflow="no_such")
    await Explorer(broker, "a").explore(simple, 1)
    assert (await broker.state(RUN.turns_stream)).messages == 0


async def test_withdrawn_versions_are_sampled_again(broker: Broker) -> None:
    dying = Explorer(broker, "a", dies_at=5)
    await dying.explore_and_die(the_task(), 1)
    assert dying.waited_for == []
    next_one = Explorer(broker, "next")
    next_one.withdrawn, next_one.version = {0}, 1
    made = only(await next_one.explore(the_task(), 2))
    assert next_one.asked == LENGTH
    assert {span.version for span in made.version_spans} == {1}


async def test_an_explorer_with_older_weights_waits_for_newer_ones_or_begins_again(broker: Broker) -> None:
    dying = Explorer(broker, "a", dies_at=5)
    dying.version = 3
    await dying.explore_and_die(the_task(), 1)
    behind = Explorer(broker, "behind")
    behind.reachable, behind.version = False, 2
    made = only(await behind.explore(the_task(), 2))
    assert behind.waited_for == [3]
    assert {span.version for span in made.version_spans} == {2}


async def test_spans_keep_the_versions_that_sampled(broker: Broker) -> None:
    dying, next_one = Explorer(broker, "a", dies_at=5), Explorer(broker, "next")
    dying.version, next_one.version = 1, 2
    await dying.explore_and_die(the_task(), 1)
    made = only(await next_one.explore(the_task(), 2))
    made.check("made")
    assert [span.version for span in made.version_spans] == [1, 2]


async def test_a_failed_attempt_is_not_continued(broker: Broker) -> None:
    class Breaks(Corridor):
        async def step(self, action: str) -> Answer:
            if self.steps == 3:
                raise EnvironmentFailed("it broke", EnvironmentCause.CRASH)
            return await super().step(action)

    failed = await Explorer(broker, "a", Breaks).explore(the_task(), 1)
    assert isinstance(failed, AttemptFailure)
    next_one = Explorer(broker, "next")
    only(await next_one.explore(the_task(), 2))
    assert next_one.asked == LENGTH


async def test_the_loss_of_a_provider_costs_no_turn(broker: Broker) -> None:
    class Away(Corridor):
        lost = False

        async def step(self, action: str) -> Answer:
            if self.steps == 3 and not Away.lost:
                Away.lost = True
                raise EnvironmentFailed("it went away", EnvironmentCause.AWAY, environment="corridor", begun=True)
            return await super().step(action)

    explorer = Explorer(broker, "a", Away)
    made = only(await explorer.explore(the_task(), 1))
    assert explorer.asked == LENGTH
    assert info(made) == {}


async def test_an_episode_that_kills_its_explorers_begins_again_and_ends_as_a_dead_letter(broker: Broker) -> None:
    task = the_task(max_attempts=1)
    first_asked: list[int] = []  # tokens of each explorer's first prompt
    for number in range(1, 8):
        dying = Explorer(broker, f"e{number}", dies_at=3 if number == 1 else 1)
        await dying.explore_and_die(task, number)
        first_asked.append(dying.first_asked)
    assert [tokens == first_asked[0] for tokens in first_asked] == [True, False, False, False, True, True, True]
    last = await Explorer(broker, "last").explore(task, 8)
    assert isinstance(last, AttemptFailure)
    assert (last.cause, last.final) == ("lease_lost", True)


@pytest.mark.parametrize("data", [b"\xff\xff", b""])
async def test_a_damaged_journal_begins_again(broker: Broker, data: bytes) -> None:
    await Explorer(broker, "a", dies_at=5).explore_and_die(the_task(), 1)
    await broker.publish(RUN.turn(1, 1, "a"), data, message_id="damage")
    next_one = Explorer(broker, "next")
    only(await next_one.explore(the_task(), 2))
    assert next_one.asked == LENGTH


@pytest.mark.parametrize("bound", ["_MOST_ENTRIES", "_MOST_BYTES"])
async def test_a_flooded_journal_begins_again(broker: Broker, monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    await Explorer(broker, "a", dies_at=5).explore_and_die(the_task(), 1)
    monkeypatch.setattr(journal, bound, 2)
    next_one = Explorer(broker, "next")
    only(await next_one.explore(the_task(), 2))
    assert next_one.asked == LENGTH


async def test_what_cannot_be_written_fails_no_attempt(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_SECONDS", 0.2)
    await broker.js.delete_stream(RUN.turns_stream)
    group = await Explorer(broker, "a").explore(the_task(3), 1)
    assert isinstance(group, Group)
    assert [e.reward for e in group.experiences] == [1.0] * 3


async def test_no_turn_is_written_after_one_that_could_not_be(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two rollouts that write at the same moment, the first is refused and the second ends well."""
    both, refused, publish, calls = asyncio.Event(), asyncio.Event(), broker.publish, iter(range(100))

    async def refuses_one(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 0:
            await asyncio.wait_for(both.wait(), 5)
            refused.set()
            raise PublishRefused("no room")
        both.set()
        await asyncio.wait_for(refused.wait(), 5)
        return await publish(*args, **kwargs)

    monkeypatch.setattr(broker, "publish", refuses_one)
    assert isinstance(await Explorer(broker, "a").explore(the_task(2), 1), Group)
    assert (await broker.state(RUN.turns_stream)).messages == 1
