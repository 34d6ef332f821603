"""A provider that is away is a state: its tasks wait without an attempt and without a slot, and others run."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from support.fakes.environments.environment_provider import ScriptedProvider, serving
from support.fakes.explorers.toolbox import Toolbox, make_episode_task
from trinity.data.experience import AttemptFailure, Group, Outcome, Task
from trinity.data.wire import task_to_proto
from trinity.explorer.environments import providers
from trinity.explorer.environments.client import EnvironmentCause, EnvironmentClient, EnvironmentFailed
from trinity.explorer.rollout import attempt, task_queue
from trinity.explorer.rollout.task_queue import TaskQueue
from trinity.runtime.broker import StreamSpec, connect, ensure_consumer, ensure_streams
from trinity.runtime.errors import FailureCause
from trinity.runtime.names import TASK_LEASE_SECONDS, TASKS_CONSUMER
from trinity.runtime.process import free_port
from trinity.sdk.contract import Response

pytestmark = pytest.mark.core

GAME = '{"environment": "good"}'


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "_AWAY_SECONDS", 0.2)
    monkeypatch.setattr(providers, "_POLL_SECONDS", 0.05)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as opened:
        yield opened


class Remote(Toolbox):
    """Plays at providers."""

    def __init__(self, client: EnvironmentClient) -> None:
        super().__init__(lambda _: "on")
        self._client = client
        self.waits = 0

    def episode(self, environment: str, task: dict[str, Any], args: dict[str, Any], seed: int) -> Any:
        return self._client.episode(environment, task, args, seed)

    async def until_served(self, failure: EnvironmentFailed) -> None:
        self.waits += 1
        await self._client.until_served(failure)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.02)


async def tools_for(stack: AsyncExitStack, address: str, own: str = "127.0.0.1:1", wait: float = 0.3) -> Remote:
    client = EnvironmentClient(own, [("good", address)] if address else [], wait, ["declared"])
    stack.push_async_callback(client.close)
    return Remote(client)


async def test_a_description_that_breaks_the_contract_is_no_absence(stack: AsyncExitStack) -> None:
    there = await stack.enter_async_context(serving(ScriptedProvider("good", step_seconds=0.0)))
    tools = await tools_for(stack, there.address)
    found = await attempt.explore(game(), 1, "me", tools)
    assert isinstance(found, AttemptFailure)
    assert "its description of 'good' breaks the contract: step_timeout_seconds: is 0.0, must be above 0" in found.error
    assert tools.waits == 0


def game(name: str = "good", **changes: Any) -> Task:
    return replace(
        make_episode_task(GAME.replace("good", name), 2, workflow="environment_workflow"),
        max_attempts=1,
        timeout_seconds=20.0,
        **changes,
    )


async def explored(tools: Remote, task: Task) -> Outcome:
    async with asyncio.timeout(30):
        return await attempt.explore(task, 1, "me", tools, aside=task_queue.aside)


async def test_a_task_waits_for_its_provider_and_no_attempt_is_used_up(stack: AsyncExitStack) -> None:
    address = f"127.0.0.1:{free_port()}"
    tools = await tools_for(stack, address)
    exploring = asyncio.create_task(explored(tools, game(row=3)))
    await until(lambda: bool(tools.waits))
    assert providers.AWAY.labels("good")._value.get() == 1
    await asyncio.sleep(0.5)
    assert not exploring.done()
    await stack.enter_async_context(serving(ScriptedProvider("good"), address))
    assert isinstance(await exploring, Group)
    assert providers.AWAY.labels("good")._value.get() == 0


@pytest.mark.parametrize("name", ["declared", "seen"])
async def test_a_name_that_is_known_is_waited_for_at_the_runs_own_service(stack: AsyncExitStack, name: str) -> None:
    """As one that attaches: declared in the YAML, or served before."""
    there = await stack.enter_async_context(serving(ScriptedProvider("seen")))
    tools = await tools_for(stack, "", own=there.address)
    if name == "seen":
        assert isinstance(await explored(tools, game("seen")), Group)
        await asyncio.sleep(0)
        there.names = ()
        for provider in tools._client._providers._by_address.values():
            provider._described_at = -1e9
    exploring = asyncio.create_task(explored(tools, game(name)))
    await until(lambda: bool(tools.waits))
    there.names = (name,)
    assert isinstance(await exploring, Group)


async def test_a_name_that_no_service_knows_is_refused(stack: AsyncExitStack) -> None:
    there = await stack.enter_async_context(serving(ScriptedProvider("good")))
    outcome = await explored(await tools_for(stack, "", own=there.address), game("goood"))
    assert isinstance(outcome, AttemptFailure)
    assert (outcome.cause, "known: good" in outcome.error) == (FailureCause.ENVIRONMENT_ERROR, True)


async def test_a_provider_that_is_lost_in_the_middle_of_an_episode_uses_up_no_attempt(stack: AsyncExitStack) -> None:
    first = AsyncExitStack()
    silent = ScriptedProvider("good", step_seconds=20)
    silent.acts_as["good"] = "silent"
    lost = await first.enter_async_context(serving(silent))
    tools = await tools_for(stack, lost.address)
    exploring = asyncio.create_task(explored(tools, game()))
    await until(lambda: silent.open == 2)
    await first.aclose()
    await until(lambda: bool(tools.waits))
    await stack.enter_async_context(serving(ScriptedProvider("good"), lost.address))
    assert isinstance(await exploring, Group)


async def test_a_task_that_loses_its_provider_again_and_again_fails(stack: AsyncExitStack) -> None:
    """Its own episode may be what kills it."""
    there = await stack.enter_async_context(serving(ScriptedProvider("good")))
    there.acts_as["good"] = "lost"
    tools = await tools_for(stack, there.address)
    outcome = await explored(tools, game())
    assert isinstance(outcome, AttemptFailure)
    assert (outcome.cause, "UNAVAILABLE" in outcome.error) == (FailureCause.ENVIRONMENT_ERROR, True)
    assert tools.waits == 3


@pytest.mark.parametrize(("acts_as", "waits"), [("lacks_item", 0), ("loses_item", 0), ("leaves", 3)])
async def test_an_item_that_a_served_environment_lacks_is_no_absence(
    stack: AsyncExitStack, acts_as: str, waits: int
) -> None:
    """It answers NOT_FOUND to each reset or action. Absences in the middle of an episode are counted."""
    there = await stack.enter_async_context(serving(ScriptedProvider("seen")))
    there.acts_as["seen"] = acts_as
    tools = await tools_for(stack, "", own=there.address)
    outcome = await explored(tools, game("seen"))
    assert isinstance(outcome, AttemptFailure)
    assert (outcome.cause, "no item 17" in outcome.error) == (FailureCause.ENVIRONMENT_ERROR, True)
    assert tools.waits == waits


async def test_an_item_that_a_served_scorer_lacks_is_no_absence(stack: AsyncExitStack) -> None:
    there = await stack.enter_async_context(serving(ScriptedProvider("good")))
    there.acts_as["good"] = "lacks_item"
    client = (await tools_for(stack, there.address))._client
    with pytest.raises(EnvironmentFailed, match="no item 17") as failed:
        await client.score("good", [Response("1 + 1", "2", "2")], {}, {})
    assert failed.value.cause is EnvironmentCause.REFUSED


async def test_other_tasks_have_the_slots_of_those_that_wait(stack: AsyncExitStack, nats_url: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    there = await stack.enter_async_context(serving(ScriptedProvider("here")))
    tools = await tools_for(stack, address, own=there.address)
    ended: list[tuple[str, int]] = []
    async with await connect(nats_url, "test") as broker:
        await ensure_streams(broker, [StreamSpec("TASKS", ("t.>",))])
        await ensure_consumer(broker, "TASKS", TASKS_CONSUMER, lease_seconds=TASK_LEASE_SECONDS)
        for number, name in enumerate(["good", "good", "here", "here", "here"]):
            data = task_to_proto(game(name, task_id=f"{name}/{number}")).SerializeToString()
            await broker.publish("t.x", data, message_id=str(number))

        async def work(task: Task, message: Any) -> None:
            outcome = await explored(tools, task)
            assert isinstance(outcome, Group), outcome
            ended.append((task.task_id.partition("/")[0], message.deliveries))
            await message.ack()

        queue = TaskQueue(broker, "TASKS", 1, work)
        running = asyncio.create_task(queue.run())
        async with asyncio.timeout(30):
            while len(ended) < 3 or queue.running or queue.waiting < 2:
                await asyncio.sleep(0.02)
            assert ended == [("here", 1)] * 3
            await stack.enter_async_context(serving(ScriptedProvider("good"), address))
            while len(ended) < 5 or queue.running:
                await asyncio.sleep(0.02)
        assert (ended[3:], queue.waiting) == ([("good", 1)] * 2, 0)
        running.cancel()


async def test_a_drain_does_not_wait_for_what_waits_itself(stack: AsyncExitStack, nats_url: str) -> None:
    tools = await tools_for(stack, f"127.0.0.1:{free_port()}")
    async with await connect(nats_url, "test") as broker:
        await ensure_streams(broker, [StreamSpec("TASKS", ("t.>",))])
        await ensure_consumer(broker, "TASKS", TASKS_CONSUMER, lease_seconds=TASK_LEASE_SECONDS)
        await broker.publish("t.x", task_to_proto(game()).SerializeToString(), message_id="1")
        queue = TaskQueue(broker, "TASKS", 1, lambda task, _: explored(tools, task))  # type: ignore[arg-type,return-value]
        running = asyncio.create_task(queue.run())
        async with asyncio.timeout(20):
            while not queue.waiting:
                await asyncio.sleep(0.02)
            assert await queue.drain(60) == (0, 1)
        running.cancel()
