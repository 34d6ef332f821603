"""Episodes that no replay could continue: the environment is restored after the last answer, and no step that was
answered is done again. By gRPC, on a real journal."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from support.fakes.environments.snapshots import Windy, WindyInCoroutines
from support.fakes.explorers.dying_explorer import LENGTH, RUN, Explorer, info, only, the_task
from trinity.api.common.v1 import experience_pb2
from trinity.data.experience import AttemptFailure, Group
from trinity.explorer.environments.client import EnvironmentClient
from trinity.explorer.types import EngineFailed
from trinity.explorer.workflows import seeds
from trinity.runtime.broker import Broker, on_subject
from trinity.runtime.errors import FailureCause
from trinity.runtime.names import owner_of
from trinity.sdk import Description, InvalidInput, Observation, serving
from trinity.sdk.errors import Unavailable

pytestmark = pytest.mark.core

# Where explorers die: replies 0 to 3 are written, and the answers to them.
DIES_AT = 5


@pytest.fixture
async def windy() -> AsyncIterator[EnvironmentClient]:
    Windy.calls.clear()
    async for client in client_of(Windy):
        yield client


async def client_of(
    kind: type[Windy | WindyInCoroutines], reward_bound: float = 0.0
) -> AsyncIterator[EnvironmentClient]:
    async with serving(kind, address="127.0.0.1:0") as address:
        client = EnvironmentClient("127.0.0.1:1", addressed=[("corridor", address)], reward_bound=reward_bound)
        yield client
        await client.close()


async def test_the_state_is_restored_and_no_action_is_played_again(broker: Broker, windy: EnvironmentClient) -> None:
    dying = Explorer(broker, "a", dies_at=DIES_AT, client=windy)
    await dying.explore_and_die(the_task(), 1)
    assert Windy.calls == ["reset", *["step"] * 4]
    Windy.calls.clear()
    next_one = Explorer(broker, "next", client=windy)
    made = only(await next_one.explore(the_task(), 2))
    assert Windy.calls == ["restore", *["step"] * (LENGTH - 4)]
    assert next_one.asked == LENGTH - 4
    assert info(made) == {"moved": [{"turn": 4, "from": owner_of("a"), "to": owner_of("next")}]}
    assert (made.reward, made.metrics["steps"]) == (0.25 * LENGTH, LENGTH)
    told = dying.prompts[-1]
    assert made.token_ids.tolist()[: len(told)] == told


async def test_the_step_that_was_open_alone_is_done_again(broker: Broker) -> None:
    class Stuck(WindyInCoroutines):
        """Acts for the fourth time, and its answer does not arrive while it is open."""

        async def step(self, action: str) -> Observation:
            made = await super().step(action)
            if Windy.calls.count("step") == 4:
                dying.died.set()
                await asyncio.Event().wait()
            return made

    Windy.calls.clear()
    async for client in client_of(Stuck):
        dying = Explorer(broker, "a", client=client)
        await dying.explore_and_die(the_task(), 1)
        next_one = Explorer(broker, "next", client=client)
        only(await next_one.explore(the_task(), 2))
    assert Windy.calls == ["reset", *["step"] * 4, "restore", *["step"] * (LENGTH - 3)]
    assert next_one.asked == LENGTH - 4, "its reply had been written"


async def test_a_finished_episode_of_an_open_group_is_not_played_again(
    broker: Broker, windy: EnvironmentClient
) -> None:
    class SecondWaits(Explorer):
        async def generate(self, *args: Any) -> Any:
            if seeds.place() == "1":
                while (await broker.state(RUN.turns_stream)).messages < 2 * LENGTH:
                    await asyncio.sleep(0.01)
                self.died.set()
                await asyncio.Event().wait()
            return await super().generate(*args)

    await SecondWaits(broker, "a", client=windy).explore_and_die(the_task(2), 1)
    Windy.calls.clear()
    next_one = Explorer(broker, "next", client=windy)
    group = await next_one.explore(the_task(2), 2)
    assert isinstance(group, Group), group
    assert (next_one.asked, Windy.calls) == (LENGTH, ["reset", *["step"] * LENGTH])
    assert [(one.reward, one.metrics["steps"]) for one in group.experiences] == [(0.25 * LENGTH, LENGTH)] * 2
    assert [info(one) for one in group.experiences] == [{}, {}], "each has one explorer"


async def test_a_journal_without_answers_after_the_replies_is_continued(
    broker: Broker, windy: EnvironmentClient
) -> None:
    """Older explorers wrote the answer before each reply, with the reply."""
    await Explorer(broker, "a", dies_at=DIES_AT, client=windy).explore_and_die(the_task(), 1)
    answer = None
    for number, stored in enumerate(
        [m async for m in on_subject(broker, RUN.turns_stream, RUN.turns(1), read_ahead=8)]
    ):
        entry = experience_pb2.TurnEntry.FromString(stored.data)
        if entry.WhichOneof("entry") == "answered":
            answer = entry.answered.answer
            continue
        if answer is not None:
            entry.turn.answer.CopyFrom(answer)
        await broker.publish(RUN.turn(2, 1, owner_of("a")), entry.SerializeToString(), message_id=f"old{number}")
    Windy.calls.clear()
    next_one = Explorer(broker, "next", client=windy)
    made = only(await next_one.explore(the_task(ordinal=2), 2))
    assert (next_one.asked, Windy.calls) == (LENGTH - 4, ["restore", *["step"] * (LENGTH - 3)])
    assert made.reward == 0.25 * LENGTH


async def test_answers_are_written_before_a_failed_engine_ends_the_attempt(
    broker: Broker, windy: EnvironmentClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = broker.publish

    async def slow(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0.1)
        return await publish(*args, **kwargs)

    class Fails(Explorer):
        async def generate(self, *args: Any) -> Any:
            if self.asked == 1:
                raise EngineFailed("it is gone")
            return await super().generate(*args)

    monkeypatch.setattr(broker, "publish", slow)
    with pytest.raises(EngineFailed):
        await Fails(broker, "a", client=windy).explore(the_task(), 1)
    assert (await broker.state(RUN.turns_stream)).messages == 2, "a reply, and the answer to it"


async def test_rewards_before_the_state_count_toward_the_bound(broker: Broker, windy: EnvironmentClient) -> None:
    await Explorer(broker, "a", dies_at=DIES_AT, client=windy).explore_and_die(the_task(), 1)
    async for client in client_of(Windy, reward_bound=0.25 * LENGTH - 0.1):
        failed = await Explorer(broker, "next", client=client).explore(the_task(), 2)
    assert isinstance(failed, AttemptFailure)
    assert (failed.cause, failed.final) == (FailureCause.ENVIRONMENT_ERROR, False)
    assert f"the sum of its episode's rewards is {0.25 * LENGTH:g}" in failed.error


async def test_it_continues_again_at_another_provider(broker: Broker, windy: EnvironmentClient) -> None:
    await Explorer(broker, "a", dies_at=3, client=windy).explore_and_die(the_task(), 1)
    async for elsewhere in client_of(Windy):
        await Explorer(broker, "bb", dies_at=2, client=elsewhere).explore_and_die(the_task(), 2)
    Windy.calls.clear()
    last = Explorer(broker, "last", client=windy)
    made = only(await last.explore(the_task(), 3))
    made.check("made")
    assert Windy.calls == ["restore", *["step"] * (LENGTH - 3)]
    assert [move["turn"] for move in info(made)["moved"]] == [2, 3]


async def test_a_long_reply_goes_on_within_it(broker: Broker, windy: EnvironmentClient) -> None:
    await Explorer(broker, "a", dies_at=6, flush=2, client=windy).explore_and_die(the_task(), 1)
    Windy.calls.clear()
    made = only(await Explorer(broker, "next", flush=2, client=windy).explore(the_task(), 2))
    assert Windy.calls == ["restore", *["step"] * (LENGTH - 1)]
    assert info(made)["moved"] == [{"turn": 1, "from": owner_of("a"), "to": owner_of("next"), "token": 4}]


async def test_withdrawn_versions_are_sampled_again_in_the_state_before_them(
    broker: Broker, windy: EnvironmentClient
) -> None:
    dying = Explorer(broker, "a", dies_at=DIES_AT, client=windy)
    dying.version = 0
    await dying.explore_and_die(the_task(), 1)
    Windy.calls.clear()
    next_one = Explorer(broker, "next", client=windy)
    next_one.withdrawn, next_one.version = {0}, 1
    made = only(await next_one.explore(the_task(), 2))
    assert (next_one.asked, Windy.calls) == (LENGTH, ["restore", *["step"] * LENGTH])
    assert {span.version for span in made.version_spans} == {1}
    assert made.token_ids.tolist()[: len(dying.prompts[0])] == dying.prompts[0]
    # What was sampled again is written with the answer before it, too: the next one goes on from there.
    task = the_task(ordinal=2)
    await Explorer(broker, "a", dies_at=DIES_AT, client=windy).explore_and_die(task, 1)
    second = Explorer(broker, "bb", dies_at=3, client=windy)
    second.withdrawn, second.version = {0}, 1
    await second.explore_and_die(task, 2)
    Windy.calls.clear()
    third = Explorer(broker, "ccc", client=windy)
    third.withdrawn, third.version = {0}, 1
    only(await third.explore(task, 3))
    assert (third.asked, Windy.calls) == (LENGTH - 2, ["restore", *["step"] * (LENGTH - 2)])


class Small(Windy):
    """Its states after two steps are too large, it says."""

    def snapshot(self) -> bytes:
        return super().snapshot() if self.at <= 2 else b""


async def test_without_a_state_it_continues_at_an_earlier_turn(broker: Broker) -> None:
    async for client in client_of(Small):
        await Explorer(broker, "a", dies_at=DIES_AT, client=client).explore_and_die(the_task(), 1)
        Windy.calls.clear()
        next_one = Explorer(broker, "next", client=client)
        only(await next_one.explore(the_task(), 2))
    assert (next_one.asked, Windy.calls) == (LENGTH - 3, ["restore", *["step"] * (LENGTH - 2)])


class Newer(Windy):
    """Of a version that takes no older states."""

    def restore(self, state: bytes) -> None:
        raise InvalidInput("state", "is of version 1; this is version 2")


class Older(Windy):
    description = Description("corridor", "Windy.", 20, step_timeout_seconds=3.0)


@pytest.mark.parametrize("kind", [Newer, Older])
async def test_a_provider_that_takes_no_state_begins_again(
    broker: Broker, windy: EnvironmentClient, kind: type[Windy]
) -> None:
    await Explorer(broker, "a", dies_at=DIES_AT, client=windy).explore_and_die(the_task(), 1)
    Windy.calls.clear()
    async for client in client_of(kind):
        next_one = Explorer(broker, "next", client=client)
        made = only(await next_one.explore(the_task(), 2))
    assert (next_one.asked, Windy.calls) == (1 + LENGTH, ["reset", *["step"] * LENGTH])
    assert info(made) == {}


@pytest.mark.parametrize("damage", ["state", "size", "turn", "place", "done"])
async def test_a_damaged_journal_begins_again(broker: Broker, windy: EnvironmentClient, damage: str) -> None:
    await Explorer(broker, "a", dies_at=DIES_AT, client=windy).explore_and_die(the_task(), 1)
    entries = [m async for m in on_subject(broker, RUN.turns_stream, RUN.turns(1), read_ahead=8)]
    assert len(entries) == 8
    first, last = (experience_pb2.TurnEntry.FromString(entries[at].data) for at in (0, -1))
    entry, answer = last, last.answered.answer
    if damage == "state":
        answer.state = answer.state[:-1] + bytes([answer.state[-1] ^ 1])
    elif damage == "size":
        answer.state += bytes(1 << 20)
    elif damage == "turn":
        answer.turn = -1
    elif damage == "place":
        last.answered.turn = -1
    else:  # a reply follows it
        entry = first
        first.turn.answer.done = True
    # A later attempt wrote it, so that it replaces the entry.
    await broker.publish(RUN.turn(1, 2, "b"), entry.SerializeToString(), message_id="damage")
    Windy.calls.clear()
    next_one = Explorer(broker, "next", client=windy)
    only(await next_one.explore(the_task(), 3))
    # A state is refused after the next reply.
    assert (next_one.asked, Windy.calls) == (LENGTH + (damage == "state"), ["reset", *["step"] * LENGTH])


async def test_the_loss_of_a_provider_costs_no_turn(broker: Broker) -> None:
    class Away(Windy):
        lost = False

        def step(self, action: str) -> Any:
            if self.at == 3 and not Away.lost:
                Away.lost = True
                raise Unavailable("it went away")
            return super().step(action)

    Windy.calls.clear()
    async for client in client_of(Away):
        explorer = Explorer(broker, "a", client=client)
        made = only(await explorer.explore(the_task(), 1))
    assert explorer.asked == LENGTH
    assert Windy.calls == ["reset", *["step"] * 3, "restore", *["step"] * (LENGTH - 3)]
    assert info(made) == {}


async def test_states_are_asked_for_where_a_journal_is_kept_alone(broker: Broker, windy: EnvironmentClient) -> None:
    task = the_task(args={"max_turns": 1})
    only(await Explorer(broker, "a", client=windy).explore(replace(task, ordinal=2), 1))
    assert (await broker.state(RUN.turns_stream)).messages == 0
    async with windy.episode("corridor", {"length": 2}) as episode:
        assert ((await episode.reset()).state, (await episode.step("right")).state) == (b"", b"")
