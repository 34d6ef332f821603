"""After its explorer dies, every branch of a tree continues from its last turn, by a real journal."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from support.fakes.environments.snapshots import Windy
from support.fakes.explorers.dying_explorer import LENGTH, Explorer, info, the_task
from support.fakes.explorers.toolbox import Corridor
from trinity.data.experience import AttemptFailure, Group
from trinity.explorer.environments.client import EnvironmentClient
from trinity.explorer.workflows import seeds
from trinity.runtime.broker import Broker
from trinity.sdk import InvalidInput, Observation, serving
from trinity.sdk.errors import Unavailable

pytestmark = pytest.mark.core

BRANCHES = {"branches": {"turns": [2, 4]}}
REPLIES = 2 + 2 * 2 + 4 * (LENGTH - 4)  # of one tree with four leaves


async def killed_and_continued(broker: Broker, dies_at: int, rollouts: int, **kind: Any) -> tuple[Group, int]:
    task = the_task(4, args=BRANCHES)
    dying = Explorer(broker, "a", dies_at=dies_at, rollouts=rollouts, **kind)
    await dying.explore_and_die(task, 1)
    heir = Explorer(broker, "heir", **kind)
    group = await heir.explore(task, 2)
    assert isinstance(group, Group), group
    for experience in group.experiences:
        experience.check("made")
    assert [info(one).get("parent") for one in group.experiences] == [None, 0, 0, 2]
    sampled = sum(int(one.action_mask.sum()) for one in group.experiences)
    assert sampled == REPLIES * len("right!"), "each turn is trained once"
    return group, heir.asked


@pytest.mark.parametrize("dies_at", [2, 4, 6, 8, 10])
async def test_each_branch_goes_on_from_its_last_state(broker: Broker, dies_at: int) -> None:
    async with serving(Windy, address="127.0.0.1:0") as address:
        client = EnvironmentClient("127.0.0.1:1", addressed=[("corridor", address)])
        group, asked = await killed_and_continued(broker, dies_at, 1, client=client)
        await client.close()
    assert REPLIES - (dies_at - 1) <= asked < REPLIES, "some branches may have died while they wrote a turn"
    moved = [move for one in group.experiences for move in info(one).get("moved", ())]
    assert moved
    assert {one.reward for one in group.experiences} == {0.25 * LENGTH}
    # Branches share the turns before them: the winds that the restored environment reported.
    first, second = (group.experiences[number].token_ids.tolist() for number in (0, 1))
    shared = group.experiences[1].prompt_length + info(group.experiences[1])["turns"][4][0]
    assert first[:shared] == second[:shared]


# The number of branches that wait for a reply when the explorer dies: the root, two, four.
@pytest.mark.parametrize(("dies_at", "rollouts"), [(2, 1), (4, 2), (6, 2), (8, 4)])
async def test_no_turn_is_sampled_again(broker: Broker, dies_at: int, rollouts: int) -> None:
    group, asked = await killed_and_continued(broker, dies_at, rollouts, environment=Corridor)
    assert asked == REPLIES - (dies_at - 1)
    assert {one.reward for one in group.experiences} == {1.0}


async def test_a_provider_that_takes_no_state_makes_the_group_anew(broker: Broker) -> None:
    """The attempt fails, and leaves nothing that a later one would continue."""

    class Newer(Windy):
        def restore(self, state: bytes) -> None:
            raise InvalidInput("state", "is of version 1; this is version 2")

    task = the_task(4, args=BRANCHES)
    async with serving(Windy, address="127.0.0.1:0") as old, serving(Newer, address="127.0.0.1:0") as new:
        before, after = (EnvironmentClient("127.0.0.1:1", addressed=[("corridor", address)]) for address in (old, new))
        await Explorer(broker, "a", dies_at=6, client=before).explore_and_die(task, 1)
        failed = await Explorer(broker, "bb", client=after).explore(task, 2)
        assert isinstance(failed, AttemptFailure)
        assert not failed.final
        third = Explorer(broker, "ccc", client=before)
        assert isinstance(await third.explore(task, 3), Group)
        assert third.asked == REPLIES
        await before.close()
        await after.close()


async def test_branches_play_shared_turns_again_where_there_is_no_state(broker: Broker) -> None:
    class Repeats(Windy):
        """Its states after two steps are too large, and it always draws the same winds."""

        description = replace(Windy.description, deterministic=True)

        def reset(self, *given: Any) -> Observation:
            super().reset(*given)
            self.winds = random.Random(1)
            return Observation("Calm.")

        def snapshot(self) -> bytes:
            return super().snapshot() if self.at <= 2 else b""

    async with serving(Repeats, address="127.0.0.1:0") as address:
        client = EnvironmentClient("127.0.0.1:1", addressed=[("corridor", address)])
        group = await Explorer(broker, "a", client=client).explore(the_task(2, args={"branches": {"turns": [4]}}), 1)
        await client.close()
    assert isinstance(group, Group), group
    assert [one.reward for one in group.experiences] == [0.25 * LENGTH] * 2
    assert info(group.experiences[1])["branch_turn"] == 4


@pytest.mark.parametrize("at", [1, 2, 3, 5])
async def test_a_provider_that_was_away_is_given_the_states_again(broker: Broker, at: int) -> None:
    class Away(Windy):
        lost = False

        def step(self, action: str) -> Any:
            if self.at == at and not Away.lost:
                Away.lost = True
                raise Unavailable("it went away")
            return super().step(action)

    async with serving(Away, address="127.0.0.1:0") as address:
        client = EnvironmentClient("127.0.0.1:1", addressed=[("corridor", address)])
        explorer = Explorer(broker, "a", client=client)
        group = await explorer.explore(the_task(4, args=BRANCHES), 1)
        await client.close()
    assert isinstance(group, Group), group
    assert Away.lost
    assert [info(one).get("parent") for one in group.experiences] == [None, 0, 0, 2]
    assert REPLIES <= explorer.asked <= REPLIES + 3, "only replies that were cut off are sampled again"


async def test_a_branch_that_wrote_nothing_is_restored_to_its_parents_state(broker: Broker) -> None:
    """In the next run of the attempt, whose parent has gone on since."""

    class Slow(Windy):
        lost = False

        def step(self, action: str) -> Any:
            if self.at == 4 and not Slow.lost:
                Slow.lost = True
                raise Unavailable("it went away")
            return super().step(action)

    class OneByOne(Explorer):
        async def generate(self, prompt_token_ids: Any, *args: Any) -> Any:
            if seeds.place() != "0" and not Slow.lost:
                await asyncio.Event().wait()
            return await super().generate(prompt_token_ids, *args)

    async with serving(Slow, address="127.0.0.1:0") as address:
        client = EnvironmentClient("127.0.0.1:1", addressed=[("corridor", address)])
        explorer = OneByOne(broker, "a", client=client)
        group = await asyncio.wait_for(explorer.explore(the_task(4, args=BRANCHES), 1), 30)
        await client.close()
    assert isinstance(group, Group), group
    assert explorer.asked == REPLIES
    first, third = (group.experiences[number] for number in (0, 2))
    shared = third.prompt_length + info(third)["turns"][2][0]
    assert first.token_ids[:shared].tolist() == third.token_ids[:shared].tolist()
    assert info(third)["branch_turn"] == 2
