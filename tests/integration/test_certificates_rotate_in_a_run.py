"""Certificates and their authority are replaced during a run: no call fails, and nothing stalls."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest

from support.fakes import peers
from support.servers.buffer_run import BufferRun
from support.servers.certificates import identity_of, make_certificates, tls_settings
from support.servers.nats import NatsServer
from support.servers.service import ServiceProcess
from trinity.api.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from trinity.api.environment.v1 import environment_pb2, environment_pb2_grpc
from trinity.api.sync.v1 import sync_pb2, sync_pb2_grpc
from trinity.cluster.certs import certs
from trinity.runtime import rpc
from trinity.sdk import Environment, Observation, Tls, attaching

pytestmark = pytest.mark.extended

STEPS, GROUPS = 16, 4
LONGEST_STALL_SECONDS = 10.0
TOKEN = "for-attaching"
HEALTH = "/grpc.health.v1.Health/Check"


class Parrot(Environment):
    """Three actions; what was said is observed."""

    isolation = "none"

    def reset(self, task: dict[str, object], args: dict[str, object], seed: int) -> Observation:
        self.turns = 0
        return Observation("say something")

    def step(self, action: str) -> Observation:
        self.turns += 1
        return Observation(action, reward=1.0, done=self.turns == 3)


class Pulse:
    """Does one thing again and again; `longest` is the longest time from one end to the next, in seconds."""

    def __init__(self, name: str, beat: Callable[[], Awaitable[None]]) -> None:
        self.name, self.count, self.longest = name, 0, 0.0
        self._beat = beat

    async def run(self) -> None:
        last = time.monotonic()
        while True:
            await self._beat()
            now = time.monotonic()
            self.longest, last = max(self.longest, now - last), now
            self.count += 1
            await asyncio.sleep(0.02)


async def _episode(stub: environment_pb2_grpc.EnvironmentServiceStub) -> None:
    call = stub.Episode(timeout=60)
    await call.write(environment_pb2.EpisodeRequest(reset=environment_pb2.Reset(environment="parrot")))
    answer = await call.read()
    for turn in range(1, 4):
        action = environment_pb2.Action(text=f"turn {turn}", turn=turn)
        await call.write(environment_pb2.EpisodeRequest(action=action))
        answer = await call.read()
        assert answer.observation == f"turn {turn}"
    assert answer.done
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK


async def _code(address: str, identity: rpc.Shown) -> grpc.StatusCode:
    async with rpc.channel(address, identity=identity) as channel:
        return await channel.unary_unary(HEALTH)(b"", timeout=20).code()


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[tuple[BufferRun, ServiceProcess, Path]]:
    folder = make_certificates(tmp_path / "identity")
    nats = NatsServer(tmp_path / "nats")
    nats.start()
    run = BufferRun(tmp_path, nats, steps=STEPS, groups=GROUPS, certificates=folder).start()
    settings = {"ATTACH_TOKEN": TOKEN, **tls_settings(folder, "environment")}
    environment = ServiceProcess("environment", tmp_path, **settings).start()
    yield run, environment, folder
    environment.kill()
    run.stop()
    nats.stop()


@pytest.mark.timeout(300)
async def test_an_authority_is_replaced_in_the_middle_of_a_run(
    services: tuple[BufferRun, ServiceProcess, Path], tmp_path: Path
) -> None:
    run, environment, folder = services
    shutil.copytree(folder / "operator", tmp_path / "old")
    explorer, operator = identity_of(folder, "explorer"), identity_of(folder, "operator")
    channels = [
        rpc.channel(environment.address, identity=explorer),
        rpc.channel(run.sync.address, identity=explorer),
        rpc.channel(run.buffer.address, identity=operator),
    ]
    play = environment_pb2_grpc.EnvironmentServiceStub(channels[0])
    sync = sync_pb2_grpc.SyncServiceStub(channels[1])
    buffer = buffer_pb2_grpc.BufferServiceStub(channels[2])

    async def version() -> None:
        await sync.GetVersion(sync_pb2.GetVersionRequest(run=run.run, version=0), timeout=60)

    async def stats() -> None:
        await buffer.Stats(buffer_pb2.StatsRequest(run=run.run), timeout=60)

    pulses = [Pulse("episode", lambda: _episode(play)), Pulse("version", version), Pulse("stats", stats)]
    provider_files = Tls(*tls_settings(folder, "provider").values())
    trainer, lost, steps = run.trainer(), 0, Pulse("step", lambda: asyncio.sleep(0))
    await trainer.begin()
    async with (
        attaching(Parrot, address=environment.address, token=TOKEN, tls=provider_files) as provider,
        peers.explorer(run.nats.url, run.run),
        asyncio.TaskGroup() as group,
    ):
        running = [group.create_task(pulse.run()) for pulse in pulses]
        rotations = {
            4: lambda: certs.rotate(None, folder, new_authority=True),
            8: lambda: certs.rotate(None, folder),
            12: lambda: certs.rotate(None, folder, drop_old=True),
        }
        last = time.monotonic()
        for step in range(1, STEPS + 1):
            if step in rotations:
                await asyncio.to_thread(rotations[step])
                counts = [pulse.count for pulse in pulses]
                while any(pulse.count < count + 3 for pulse, count in zip(pulses, counts, strict=True)):
                    await asyncio.sleep(0.02)
            await trainer.batch(step)
            await trainer.publish(step, tmp_path / "weights" / str(step))
            lost += not provider.attached.is_set()
            steps.longest, last = max(steps.longest, time.monotonic() - last), time.monotonic()
        for task in running:
            task.cancel()
    told = await buffer.Stats(buffer_pb2.StatsRequest(run=run.run), timeout=60)
    assert (told.stored, told.dead_letters, told.failed_attempts) == (STEPS * GROUPS, 0, 0)
    assert lost == 0, "the provider's one stream lived through it"
    stalls = {pulse.name: round(pulse.longest, 2) for pulse in [*pulses, steps]}
    print(f"longest seconds between two ends: {stalls}")
    assert max(stalls.values()) < LONGEST_STALL_SECONDS, stalls
    for address in (run.sync.address, run.buffer.address, environment.address):
        assert await _code(address, identity_of(folder, "operator")) is grpc.StatusCode.OK, "by the new authority alone"
        assert await _code(address, identity_of(tmp_path, "old")) is grpc.StatusCode.UNAVAILABLE, "the old one is gone"
    await trainer.close()
    for channel in channels:
        await channel.close()
