"""After the loss of a server: what no process received comes again at once; what is leased stays so."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from support.servers.nats import NatsCluster
from trinity.runtime.broker import (
    Broker,
    Message,
    PullConsumer,
    StreamSpec,
    connect,
    ensure_consumer,
    ensure_streams,
    return_undelivered,
)
from trinity.runtime.broker.undelivered import _Queue

pytestmark = [pytest.mark.core, pytest.mark.slow]

MESSAGES, LOST = 6, 3
LEASE_SECONDS = 60.0


@pytest.mark.parametrize("kills_leader", [True, False])
async def test_only_what_no_process_received_is_returned(kills_leader: bool, tmp_path: Path) -> None:
    with NatsCluster(tmp_path) as cluster:
        async with await connect(cluster.url, "explorer") as explorer, await connect(cluster.url, "buffer") as buffer:
            await ensure_streams(buffer, [StreamSpec("TASKS", ("t.>",), replicas=3)])
            await ensure_consumer(buffer, "TASKS", "workers", lease_seconds=LEASE_SECONDS)
            returning = asyncio.create_task(return_undelivered(buffer, "TASKS", "workers"))
            consumer = await PullConsumer.open(explorer, "TASKS", "workers")
            await _leader_of(explorer)
            await asyncio.sleep(2)  # until the queue was looked at once
            for index in range(MESSAGES):
                await buffer.publish("t.x", b"work", message_id=str(index))
            for message in await _take(consumer, MESSAGES):
                if message.sequence != LOST:
                    assert await message.extend()
            leader = await _leader_of(explorer)
            next(node for node in cluster.nodes if (node.folder.name == leader) == kills_leader).kill()
            (again,) = await _take(consumer, 1)  # long before its lease ends
            assert (again.sequence, again.deliveries) == (LOST, 2)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(3):
                    pytest.fail(f"{await _take(consumer, 1)} was leased")
            assert not returning.done()
            returning.cancel()


async def test_what_was_heard_of_finished_messages_is_forgotten_on_one_server_too(nats_url: str) -> None:
    async with await connect(nats_url, "explorer") as explorer, await connect(nats_url, "buffer") as buffer:
        await ensure_streams(buffer, [StreamSpec("TASKS", ("t.>",))])
        await ensure_consumer(buffer, "TASKS", "workers", lease_seconds=LEASE_SECONDS)
        queue = _Queue(buffer, "TASKS", "workers")
        await buffer.client.subscribe(f"{queue.subject}.>", cb=queue.hear)
        consumer = await PullConsumer.open(explorer, "TASKS", "workers")
        for index in range(MESSAGES):
            await buffer.publish("t.x", b"work", message_id=str(index))
        for message in await _take(consumer, MESSAGES):
            assert await (message.extend() if message.sequence == MESSAGES else message.ack())
        async with asyncio.timeout(30):
            while len(queue._heard) < MESSAGES:
                await asyncio.sleep(0.05)
        await queue.look(await buffer.js.consumer_info("TASKS", "workers"))
        assert queue._heard == {MESSAGES}, "only what is still leased"


async def _take(consumer: PullConsumer, number: int) -> list[Message]:
    taken: list[Message] = []
    async with asyncio.timeout(LEASE_SECONDS / 2):
        while len(taken) < number:
            taken += [message async for message in consumer.lease(number - len(taken), 1.0)]
    return taken


async def _leader_of(broker: Broker) -> str:
    async with asyncio.timeout(30):
        while True:
            info = await broker.request(lambda: broker.js.consumer_info("TASKS", "workers"), "the consumer")
            if info.cluster.leader:
                return str(info.cluster.leader)
            await asyncio.sleep(0.1)
