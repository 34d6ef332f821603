"""Providers as processes of their own that are killed, frozen and started again, under a real environment service."""

import asyncio
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest

from support.programs.frozen import freeze, thaw
from support.servers.service import ServiceProcess
from trinity.explorer.environments import providers as environment_providers
from trinity.explorer.environments.client import EnvironmentCause, EnvironmentClient, EnvironmentFailed, Episode
from trinity.runtime.process import free_port

pytestmark = pytest.mark.core

TESTS = Path(__file__).parents[3] / "tests"
TOKEN = "secret"
IMPORT = "from support.fakes.environments.odd_environments import {kind}; from trinity.sdk import attach, serve; "
ATTACH = IMPORT + "attach({kind}, {options})"
SERVE = IMPORT + "serve({kind}, address={address!r})"


class Party:
    """A service, providers, and a client; all end with the test."""

    def __init__(self, folder: Path) -> None:
        self._metrics = f"127.0.0.1:{free_port()}"
        self.service = ServiceProcess("environment", folder, ATTACH_TOKEN=TOKEN, METRICS_LISTEN=self._metrics)
        self.providers: list[subprocess.Popen[bytes]] = []
        self.client = EnvironmentClient(self.service.address, wait_seconds=40)

    def attached(self, kind: str = "Odd", name: str = "") -> subprocess.Popen[bytes]:
        options = f"address={self.service.address!r}, token={TOKEN!r}, name={name!r}"
        return self._start(ATTACH.format(kind=kind, options=options))

    def serving(self, address: str, kind: str = "Odd") -> subprocess.Popen[bytes]:
        return self._start(SERVE.format(kind=kind, address=address))

    def _start(self, code: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(TESTS)})
        self.providers.append(process)
        return process

    def metric(self, name: str) -> float:
        text = urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=10).read().decode()
        (value,) = [line.split()[-1] for line in text.splitlines() if line.startswith(f"trinity_environment_{name} ")]
        return float(value)

    async def close(self) -> None:
        for process in self.providers:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(10)
        await self.client.close()
        self.service.stop()


@pytest.fixture
async def party(tmp_path: Path) -> AsyncIterator[Party]:
    made = Party(tmp_path)
    await asyncio.to_thread(made.service.start)
    yield made
    await made.close()


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.05)


async def opened(stack: AsyncExitStack, client: EnvironmentClient, count: int) -> list[Episode]:
    episodes = [await stack.enter_async_context(client.episode("odd", {})) for _ in range(count)]
    for episode in episodes:
        await episode.reset()
    return episodes


async def causes(episodes: list[Episode]) -> list[EnvironmentCause | None]:
    """Why the next step of each fails; None if it does not."""
    found: list[EnvironmentCause | None] = []
    for result in await asyncio.gather(*(episode.step("on") for episode in episodes), return_exceptions=True):
        found.append(result.cause if isinstance(result, EnvironmentFailed) else None)
    return found


async def test_an_attached_provider_is_killed_mid_episode_and_another_one_comes(party: Party) -> None:
    first = party.attached(name="first")
    async with AsyncExitStack() as stack:
        episodes = await opened(stack, party.client, 8)
        first.kill()
        assert await causes(episodes) == [EnvironmentCause.AWAY] * 8
    await until(lambda: party.metric("attached_episodes_open") == 0 and party.metric("providers_attached") == 0)
    party.attached(name="second")
    async with AsyncExitStack() as stack:
        episodes = await opened(stack, party.client, 8)
        assert await causes(episodes) == [None] * 8
        assert party.metric("attached_episodes_open") == 8
    await until(lambda: party.metric("attached_episodes_open") == 0)


async def test_an_attached_provider_that_freezes_is_away_and_comes_back_by_itself(party: Party) -> None:
    frozen = party.attached(name="frozen")
    await until(lambda: party.metric("providers_attached") == 1)
    async with AsyncExitStack() as stack:
        (stuck,) = await opened(stack, party.client, 1)
        party.attached(name="lively")
        await until(lambda: party.metric("providers_attached") == 2)
        freeze(frozen.pid)
        assert await causes([stuck]) == [EnvironmentCause.AWAY]
    await until(lambda: party.metric("providers_attached") == 1)
    async with AsyncExitStack() as stack:
        assert await causes(await opened(stack, party.client, 5)) == [None] * 5
    thaw(frozen.pid)
    await until(lambda: party.metric("providers_attached") == 2)
    await until(lambda: party.metric("attached_episodes_open") == 0)


async def test_an_addressed_provider_is_killed_frozen_and_started_again(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_providers, "_GRACE_SECONDS", 0.5)
    monkeypatch.setattr(environment_providers, "_DESCRIBE_SECONDS", 2.0)
    one, two = (f"127.0.0.1:{free_port()}" for _ in range(2))
    processes = {address: party.serving(address) for address in (one, two)}
    client = EnvironmentClient("127.0.0.1:1", [("odd", one), ("odd", two)], wait_seconds=40)
    async with AsyncExitStack() as stack:
        episodes = await opened(stack, client, 8)
        victim = episodes[0].provider
        processes[victim].kill()
        processes[victim].wait(10)
        dead = [episode.provider == victim for episode in episodes]
        assert await causes(episodes) == [EnvironmentCause.AWAY if is_dead else None for is_dead in dead]
        assert any(dead)
    party.serving(victim)
    (other,) = {one, two} - {victim}
    freeze(processes[other].pid)
    played, failures = set(), set()
    for _ in range(6):
        async with client.episode("odd", {}) as episode:
            try:
                await episode.reset()
                played.add(episode.provider)
            except EnvironmentFailed as failure:
                failures.add(failure.cause)
    assert played == {victim}
    assert failures <= {EnvironmentCause.TIMEOUT, EnvironmentCause.AWAY}
    await client.close()


async def test_a_hundred_episodes_cancelled_at_once_leave_no_stream_thread_or_process(party: Party) -> None:
    provider = party.attached(kind="OddInLoop")
    await until(lambda: party.metric("providers_attached") == 1)
    async with AsyncExitStack() as stack:  # what the first episodes bring stays: connections, pools
        await opened(stack, party.client, 100)
    await until(lambda: party.metric("attached_episodes_open") == 0)
    both = [psutil.Process(party.service.pid), psutil.Process(provider.pid)]
    before = [(one.num_threads(), one.num_fds(), len(one.children())) for one in both]

    async def play() -> None:
        async with party.client.episode("odd", {}) as episode:
            await episode.reset()
            while True:
                await episode.step("on")

    tasks = [asyncio.create_task(play()) for _ in range(100)]
    await until(lambda: party.metric("attached_episodes_open") == 100)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: party.metric("attached_episodes_open") == 0)
    after = [(one.num_threads(), one.num_fds(), len(one.children())) for one in both]
    for (threads, files, children), (threads_after, files_after, children_after) in zip(before, after, strict=True):
        assert threads_after <= threads + 2  # gRPC's own come and go
        assert files_after <= files + 2
        assert children_after == children


async def test_workers_die_with_their_provider(party: Party) -> None:
    provider = party.attached(kind="OddInProcess")
    async with AsyncExitStack() as stack:
        await opened(stack, party.client, 2)
        workers = psutil.Process(provider.pid).children()
        assert len(workers) == 2
        provider.kill()
        provider.wait(10)
        await until(lambda: not any(worker.is_running() for worker in workers))


async def test_a_service_that_ends_lets_episodes_end_and_exits_with_0(party: Party) -> None:
    party.attached()
    async with AsyncExitStack() as stack:
        (episode,) = await opened(stack, party.client, 1)
        stopping = asyncio.create_task(asyncio.to_thread(party.service.stop))
        await asyncio.sleep(0.3)
        assert (await episode.step("done")).done
    assert await stopping == 0
