"""KEDA's nats-jetstream scaler finds the tasks' consumer by what `trinity certs` and the chart give it."""

import asyncio
import time
from pathlib import Path

import pytest

from support.checks.keda import Autoscaler, lag_of
from support.servers.nats import NatsServer
from trinity.runtime.broker import PullConsumer, StreamSpec, connect, ensure_consumer, ensure_streams
from trinity.runtime.names import TASKS_CONSUMER
from trinity.runtime.trust import nats_users

pytestmark = pytest.mark.core

STREAM = "TRINITY_TASKS_r"


async def test_the_lag_is_what_waits_and_what_is_leased(nats_server: NatsServer) -> None:
    """Of the account by its key, which is the one name that the scaler takes."""
    assert nats_server.users is not None
    account, monitor = nats_users.account_id(nats_server.users), f"127.0.0.1:{nats_server.monitor}"

    async def lag(wanted: int) -> int:
        """What is read, at the latest after 20 seconds: the server counts what waits soon after it has it."""
        deadline = time.monotonic() + 20
        while (found := lag_of([monitor], account, STREAM, TASKS_CONSUMER)) != wanted and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return found

    async with await connect(nats_server.url, "test") as broker:
        assert await lag(0) == 0, "there is no stream"
        await ensure_streams(broker, [StreamSpec(STREAM, ("t.>",))])
        await ensure_consumer(broker, STREAM, TASKS_CONSUMER, lease_seconds=60)
        for index in range(5):
            await broker.publish("t.a", b"task", message_id=f"{index}")
        assert await lag(5) == 5
        consumer = await PullConsumer.open(broker, STREAM, TASKS_CONSUMER)
        leased = [message async for message in consumer.lease(2, 5.0)]
        assert await lag(5) == 5, "a leased task counts until it is done"
        for message in leased:
            assert await message.ack()
        assert await lag(3) == 3
        await consumer.close()
    assert lag_of([monitor], "trinity", STREAM, TASKS_CONSUMER) == 0, "another account"


def autoscaler() -> Autoscaler:
    return Autoscaler(0, 8, 10, 0, cooldown_seconds=60, scale_down_seconds=30)


@pytest.mark.parametrize(
    ("lags", "now", "wanted"),
    [
        pytest.param([0, 0], 0, 0, id="idle"),
        pytest.param([1, 0], 0, 1, id="the first"),
        pytest.param([40, 0], 1, 4, id="by the lag"),
        pytest.param([0, 35], 1, 4, id="the greater one"),
        pytest.param([500, 0], 4, 8, id="at most"),
        pytest.param([90, 0], 1, 5, id="at most four more at once"),
        pytest.param([43, 0], 4, 4, id="within the tolerance"),
    ],
)
def test_replicas_follow_the_greatest_lag(lags: list[int], now: int, wanted: int) -> None:
    assert autoscaler().replicas(lags, now, at=0.0) == wanted


def test_replicas_go_down_late() -> None:
    scaler = autoscaler()
    assert scaler.replicas([40], 4, at=0.0) == 4
    assert scaler.replicas([10], 4, at=20.0) == 4, "within the stabilization window"
    assert scaler.replicas([10], 4, at=31.0) == 1
    assert scaler.replicas([0], 1, at=50.0) == 1
    assert scaler.replicas([0], 1, at=92.0) == 0, "after the cooldown"


def test_what_certs_writes_for_keda_is_the_account(tmp_path: Path) -> None:
    from trinity.cluster.certs import certs

    certs.init(tmp_path / "identity")
    assert (tmp_path / "identity/nats/account").read_text() == nats_users.account_id(tmp_path / "identity/ca/nats")
