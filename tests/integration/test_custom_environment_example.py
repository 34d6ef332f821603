"""examples/custom_environment, in Python and in JavaScript: served, attached, played to the end, one like the other."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from support.servers.service import ServiceProcess
from trinity.conformance import Verdict, check_provider
from trinity.conformance.episodes import Sample
from trinity.explorer.environments.client import EnvironmentClient, EnvironmentFailed
from trinity.runtime.process import free_port

pytestmark = pytest.mark.core

TOKEN = "example"
LANGUAGES = ("python", "javascript")
Command = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def folder(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example, so that npm installs nothing into the repository."""
    copy = tmp_path_factory.mktemp("example") / "custom_environment"
    shutil.copytree(repository / "examples/custom_environment", copy, ignore=shutil.ignore_patterns("node_modules"))
    return copy


@pytest.fixture(scope="module")
def command(folder: Path) -> Command:
    """What runs the example in a language; skips where the language or its packages are out of reach."""

    def make(language: str) -> list[str]:
        if language == "python":
            return [sys.executable, str(folder / "guess.py")]
        if shutil.which("node") is None or shutil.which("npm") is None:
            pytest.skip("node and npm are not installed")
        if not (folder / "node_modules").exists():
            install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"]
            done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=300)
            if done.returncode:
                shutil.rmtree(folder / "node_modules", ignore_errors=True)
                if os.environ.get("CI"):
                    pytest.fail(done.stderr)
                pytest.skip(f"npm cannot install @grpc/grpc-js: {done.stderr.strip()[-200:]}")
        return ["node", str(folder / "guess.js")]

    return make


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    running = ServiceProcess("environment", tmp_path_factory.mktemp("service"), ATTACH_TOKEN=TOKEN).start()
    yield running
    assert running.stop() == 0


@asynccontextmanager
async def running(repository: Path, *arguments: str, token: str = TOKEN) -> AsyncIterator[Process]:
    settings = {"TRINITY_ENVIRONMENT_ATTACH_TOKEN": token, "TRINITY_PROTOS": str(repository / "proto")}
    process = await asyncio.create_subprocess_exec(
        *arguments, env={**os.environ, **settings}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            await process.communicate()


async def win(client: EnvironmentClient, seed: int, highest: int = 10) -> tuple[list[str], float]:
    """Everything seen in an episode that halves the numbers left, and its reward."""
    async with client.episode("guess", {"highest": highest}, {"guesses": 6}, seed) as episode:
        low, high = 1, highest
        step = await episode.reset()
        seen, reward = [step.observation], 0.0
        while not step.done:
            middle = (low + high) // 2
            step = await episode.step(f"it is <answer>{middle}</answer>")
            low, high = (middle + 1, high) if step.observation == "Higher." else (low, middle - 1)
            seen.append(step.observation)
            reward += step.reward
        return seen, reward


@pytest.mark.parametrize("language", LANGUAGES)
async def test_it_keeps_the_contract(repository: Path, command: Command, language: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with running(repository, *command(language), "serve", address) as process:
        await process.stdout.readline()
        results = [result async for result in check_provider(address, Sample(action="<answer>3</answer>"))]
    assert [result for result in results if result.verdict is Verdict.FAILED] == []
    assert len(results) >= 20


@pytest.mark.parametrize("language", LANGUAGES)
async def test_attached_it_is_won_and_lost_through_the_service(
    repository: Path, command: Command, service: ServiceProcess, language: str
) -> None:
    client = EnvironmentClient(service.address, wait_seconds=60)
    async with running(repository, *command(language), "attach", service.address, language):
        games = await asyncio.gather(*(win(client, seed) for seed in range(30)))
        assert [reward for _, reward in games] == [1.0] * 30
        assert games[0][0][0] == "I think of a number from 1 to 10. Reply with <answer>number</answer>."
        async with client.episode("guess", {"highest": 0}) as episode:
            with pytest.raises(EnvironmentFailed, match=r"task\.highest: is 0, must be an integer"):
                await episode.reset()
    await client.close()


async def test_both_languages_play_the_same_game(repository: Path, command: Command, service: ServiceProcess) -> None:
    games = []
    for language in LANGUAGES:
        client = EnvironmentClient(service.address, wait_seconds=60)
        async with running(repository, *command(language), "attach", service.address, language):
            games.append([await win(client, seed, highest=40) for seed in (0, 1, 5, -3, 2**40)])
        await client.close()
    assert games[0] == games[1]


@pytest.mark.parametrize("language", LANGUAGES)
async def test_a_wrong_token_ends_it_with_the_reason(
    repository: Path, command: Command, service: ServiceProcess, language: str
) -> None:
    async with running(repository, *command(language), "attach", service.address, token="guess") as process:
        async with asyncio.timeout(60):
            code = await process.wait()
            err = (await process.stderr.read()).decode()
    assert code == 1
    assert "offer.token: is not the service's TRINITY_ENVIRONMENT_ATTACH_TOKEN" in err


@pytest.mark.parametrize("language", LANGUAGES)
async def test_it_comes_back_after_the_service_was_killed(
    repository: Path, command: Command, tmp_path: Path, language: str
) -> None:
    mortal = ServiceProcess("environment", tmp_path, ATTACH_TOKEN=TOKEN).start()
    client = EnvironmentClient(mortal.address, wait_seconds=40)
    async with running(repository, *command(language), "attach", mortal.address):
        async with client.episode("guess", {}) as episode:
            await episode.reset()
            await asyncio.to_thread(mortal.kill)
            with pytest.raises(EnvironmentFailed):
                await episode.step("<answer>1</answer>")
        await asyncio.to_thread(mortal.start)
        assert (await win(client, 3))[1] == 1.0
    await client.close()
    mortal.stop()
