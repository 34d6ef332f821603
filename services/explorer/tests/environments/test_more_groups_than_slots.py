"""Far more episodes are wanted than an environment plays at a time: they wait for a slot, and no group fails."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from support.fakes.environments.environment_provider import ScriptedProvider, serving
from support.fakes.explorers.toolbox import Toolbox, make_episode_task
from trinity.data.experience import Group, Outcome
from trinity.explorer.environments import slots as episode_slots
from trinity.explorer.environments.client import EnvironmentClient
from trinity.explorer.environments.slots import EpisodeSlots
from trinity.explorer.rollout import attempt

pytestmark = pytest.mark.core

LONG = 30.0
GAME = '{"environment": "good"}'


class Remote(Toolbox):
    """Plays at providers."""

    def __init__(self, client: EnvironmentClient) -> None:
        super().__init__(lambda _: "on")
        self._client = client

    def episode(self, environment: str, task: dict[str, Any], args: dict[str, Any], seed: int) -> Any:
        return self._client.episode(environment, task, args, seed)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as opened:
        yield opened


async def provider(stack: AsyncExitStack, slots: int) -> ScriptedProvider:
    return await stack.enter_async_context(serving(ScriptedProvider("good", step_seconds=LONG, slots=slots)))


async def explorer(stack: AsyncExitStack, *there: ScriptedProvider) -> Remote:
    """Waits hardly at all for an unavailable provider."""
    client = EnvironmentClient("127.0.0.1:1", [("good", one.address) for one in there], wait_seconds=0.2)
    stack.push_async_callback(client.close)
    return Remote(client)


async def explored(tools: Remote, groups: int, rollouts: int, workflow: str = "environment_workflow") -> list[Outcome]:
    tasks = [make_episode_task(GAME, rollouts, row=row, workflow=workflow) for row in range(groups)]
    async with asyncio.timeout(LONG):
        return await asyncio.gather(*(attempt.explore(task, 1, "me", tools) for task in tasks))


async def test_the_limit_returns_where_another_episode_of_the_attempt_waits() -> None:
    """One episode waits for its slot, another gets one at once and starts the limit."""
    full, free = EpisodeSlots("full"), EpisodeSlots("free")
    await full.acquire(1)
    async with asyncio.timeout(LONG) as limit:
        with episode_slots.attempt(limit, LONG):
            waiting = asyncio.create_task(full.acquire(1))
            await asyncio.sleep(0)
            assert limit.when() is None
            await free.acquire(1)
            full.release()
            await waiting
        assert limit.when() is not None


def assert_stored(outcomes: list[Outcome], rollouts: int) -> None:
    assert [type(one) for one in outcomes] == [Group] * len(outcomes), outcomes
    assert all(len(one.experiences) == rollouts for one in outcomes if isinstance(one, Group))


@pytest.mark.parametrize("workflow", ["environment_workflow", "R3L_workflow"])
async def test_every_group_ends_with_all_its_rollouts_though_one_alone_is_larger_than_the_slots(
    stack: AsyncExitStack, workflow: str
) -> None:
    there = await provider(stack, slots=3)
    assert_stored(await explored(await explorer(stack, there), 24, 8, workflow), 8)
    assert there.most_open <= 3


async def test_two_explorers_share_the_slots_of_a_provider(stack: AsyncExitStack) -> None:
    there = await provider(stack, slots=3)
    both = [await explorer(stack, there), await explorer(stack, there)]
    found = await asyncio.gather(*(explored(tools, 6, 4) for tools in both))
    assert_stored([outcome for outcomes in found for outcome in outcomes], 4)
    assert there.most_open <= 3


async def test_the_slots_of_several_providers_add_up(stack: AsyncExitStack) -> None:
    small, large = await provider(stack, slots=1), await provider(stack, slots=6)
    assert_stored(await explored(await explorer(stack, small, large), 10, 8), 8)
    assert small.most_open == 1
    assert 1 < large.most_open <= 6


async def test_a_full_provider_is_waited_for_longer_than_one_that_is_away(stack: AsyncExitStack) -> None:
    there = await provider(stack, slots=0)
    there.full = True
    waiting = asyncio.create_task(explored(await explorer(stack, there), 1, 1))
    async with asyncio.timeout(LONG):
        while there.refused < 6:  # by then much more than wait_seconds is over
            await asyncio.sleep(0.01)
    there.full = False
    assert_stored(await waiting, 1)


async def some_turns() -> None:
    """Lets every task go as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_oldest_attempt_is_next_also_with_what_it_asks_for_later() -> None:
    slots, came = EpisodeSlots("game"), []
    begin_again = asyncio.Event()

    async def play(name: str) -> None:
        await slots.acquire(1)
        came.append(name)
        await asyncio.sleep(0)
        slots.release()

    async def older(limit: asyncio.Timeout) -> None:
        with episode_slots.attempt(limit, LONG):
            await play("old")
            await begin_again.wait()
            await play("old again")

    async def younger(limit: asyncio.Timeout) -> None:
        with episode_slots.attempt(limit, LONG):
            await asyncio.gather(*(play("young") for _ in range(3)))

    async with asyncio.timeout(LONG) as limit, asyncio.TaskGroup() as group:
        group.create_task(older(limit))
        await asyncio.sleep(0)
        await slots.acquire(1)
        group.create_task(younger(limit))
        await some_turns()
        begin_again.set()
        await some_turns()
        slots.release()
    assert came == ["old", "old again", "young", "young", "young"]
    assert slots.in_use == 0


async def test_the_time_of_an_attempt_begins_with_its_first_slot() -> None:
    slots = EpisodeSlots("game")
    await slots.acquire(1)
    async with asyncio.timeout(LONG) as limit:
        with episode_slots.attempt(limit, LONG):
            waiting = [asyncio.create_task(slots.acquire(1)) for _ in range(2)]
            await asyncio.sleep(0)
            assert limit.when() is None
            slots.release()
            await waiting[0]
            assert limit.when() is not None
            before = limit.when()
            slots.release()
            await waiting[1]
            assert limit.when() == before, "later waits count"


async def test_a_cancelled_wait_for_a_slot_restores_the_time_limit() -> None:
    slots = EpisodeSlots("game")
    await slots.acquire(1)
    async with asyncio.timeout(LONG) as limit:
        with episode_slots.attempt(limit, LONG):
            waiting = asyncio.create_task(slots.acquire(1))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert limit.when() is not None


@pytest.mark.parametrize("granted", [False, True])
async def test_a_wait_that_is_cancelled_leaves_no_slot_in_use(granted: bool) -> None:
    slots = EpisodeSlots("game")
    await slots.acquire(1)
    leaving = asyncio.create_task(slots.acquire(1))
    await asyncio.sleep(0)
    if granted:
        slots.release()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    if not granted:
        slots.release()
    assert slots.in_use == 0
    async with asyncio.timeout(LONG):
        await slots.acquire(1)
