"""Rewards of recorded calls become tasks of a run, each once, over restarts; what is stale, wrong or gone does not."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from support.fakes.data.experience import make_group, make_task
from support.fakes.peers import FakeTrainer, explorer
from support.servers.buffer_run import BufferRun
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.data.experience import Group
from trinity.data.traffic import CallReward, RecordedCall
from trinity.data.wire import encode_call, encode_reward, task_to_proto
from trinity.runtime.broker import Broker, Bucket, connect
from trinity.runtime.names import VERSIONS_BUCKET, RunNames
from trinity.weights.pointer import Live, decode_live

pytestmark = pytest.mark.core

Started = Callable[..., AbstractAsyncContextManager[tuple[BufferRun, FakeTrainer]]]
STEPS, GROUPS = 4, 2
TRAFFIC: dict[str, Any] = {
    "algorithm": {"algorithm_type": "reinforceplusplus", "repeat_times": 1},
    "buffer": {"batch_size": GROUPS, "explorer_input": {}},
    "explorer": {"record": True, "traffic": {"keep_mib": 1}, "reward_bound": 10.0},
    "synchronizer": {"sync_interval": 1, "sync_offset": 2, "versions_to_keep": 5},
}


class Clients:
    """What explorers store of calls and of what clients say of them."""

    def __init__(self, broker: Broker, names: RunNames) -> None:
        self.broker, self.names = broker, names

    async def call(self, name: str, version: int = 0) -> str:
        group = make_group(make_task(repeat_times=1), version=version)
        assert isinstance(group, Group)
        data = encode_call(RecordedCall(group.experiences[0], bytes(32), time.time()))
        await self.broker.publish(self.names.call(name, "tester"), data, message_id=f"call/{name}")
        return name

    async def reward(self, name: str, version: int = 0, reward: float = 1.0, subject: str = "") -> None:
        data = encode_reward(CallReward(name, reward, version, version))
        place = self.names.call_reward(subject or name)
        await self.broker.publish(place, data, message_id=f"reward/{subject or name}")

    async def rewarded(self, *calls: str, version: int = 0) -> None:
        for name in calls:
            await self.reward(await self.call(name, version), version)


async def trained(trainer: FakeTrainer, step: int) -> list[str]:
    return [group.task_id.removeprefix("traffic/") for group in (await trainer.entry(step)).groups]


async def test_every_reward_is_trained_once_and_in_order(started: Started, tmp_path: Path) -> None:
    async with (
        started(steps=STEPS, groups=GROUPS, **TRAFFIC) as (run, trainer),
        await connect(run.nats.url, "tests") as broker,
        explorer(run.nats.url, run.run),
    ):
        clients = Clients(broker, RunNames(run.run))
        await clients.rewarded("a")
        await clients.reward("never-recorded")
        await clients.reward(await clients.call("too-large"), reward=11.0)
        await clients.reward(await clients.call("of-another"), subject="other")
        await clients.call("not-rewarded")
        await clients.rewarded("b", "c")
        await trainer.batch(1)
        assert await trained(trainer, 1) == ["a", "b"]
        run.buffer.kill()
        await asyncio.to_thread(run.buffer.start)
        await trainer.publish(1, tmp_path / "1")
        await clients.rewarded("d")
        await trainer.batch(2)
        assert await trained(trainer, 2) == ["c", "d"], "none twice after a restart"
        for step in (2, 3):
            await trainer.publish(step, tmp_path / str(step))
        await clients.rewarded("e", "f", "stale")  # batch 4 takes version 1 or newer
        await clients.rewarded("g", version=1)
        await clients.rewarded("h", version=3)
        await trainer.batch(3)
        await trainer.batch(4)
        assert [await trained(trainer, step) for step in (3, 4)] == [["e", "f"], ["g", "h"]]


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_version_that_clients_reward_less_is_withdrawn(
    started: Started, tmp_path: Path, restarted: bool
) -> None:
    explorer_of = {**TRAFFIC["explorer"], "traffic": {"keep_mib": 1, "guard": {}}}
    async with (
        started(steps=STEPS, groups=GROUPS, **{**TRAFFIC, "explorer": explorer_of}) as (run, trainer),
        await connect(run.nats.url, "tests") as broker,
    ):
        clients, names = Clients(broker, RunNames(run.run)), iter(map(str, range(10_000)))
        bucket = await Bucket.open(broker, VERSIONS_BUCKET)

        async def live() -> Live:
            return decode_live((await bucket.get(clients.names.live_key)).value)

        async def rewards(version: int, values: list[float]) -> None:
            for value in values:
                await clients.reward(next(names), version, value)

        await trainer.publish(1, tmp_path / "1")
        await rewards(0, [0.0, 1.0] * 50)
        await rewards(1, [1.0, 1.0, 1.0, 0.0] * 100)
        await trainer.publish(2, tmp_path / "2")
        if restarted:
            run.buffer.kill()
            await asyncio.to_thread(run.buffer.start)
        for _ in range(20):
            assert (await live()).version == 2
            await rewards(2, [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
            await asyncio.sleep(1.0)
            if (found := (await live()).rollback) is not None:
                break
        assert found is not None, "200 rewards of a version that is right a tenth of the time"
        assert (found.version, found.newest_version) == (1, 2) and "version 2: clients' rewards of" in found.reason
        await rewards(2, [0.0] * 20)
        await asyncio.sleep(1.0)
        assert len((await live()).rollbacks) == 1, "none for rewards that come later"


async def test_such_a_run_takes_no_other_tasks_under_its_names(started: Started) -> None:
    async with started(steps=STEPS, groups=GROUPS, **TRAFFIC) as (run, trainer):
        task = make_task(run=run.run, task_id="traffic/mine", repeat_times=1)
        for request, problem in (
            (pb.PublishTasksRequest(run=run.run, tasks=[task_to_proto(task)]), "traffic/mine"),
            (pb.PublishTasksRequest(run=run.run, joined=pb.JoinedTaskset(name="x", weight=1.0)), "live traffic"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=problem):
                await trainer.buffer.PublishTasks(request, timeout=20)
