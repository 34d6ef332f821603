"""The explorer's side of an episode: every failure has its cause, load is spread, bad providers are avoided."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from types import SimpleNamespace

import pytest

from support.fakes.environments.environment_provider import ScriptedProvider, serving
from trinity.explorer.environments import providers as environment_providers
from trinity.explorer.environments.client import (
    EnvironmentCause,
    EnvironmentClient,
    EnvironmentFailed,
    Episode,
    ScorerFailed,
)
from trinity.runtime.process import free_port
from trinity.sdk.contract import Answer, Response

pytestmark = pytest.mark.core

ANSWER = Response("prompt", "response", "truth", response_tokens=3)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as opened:
        yield opened


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_providers, "_GRACE_SECONDS", 0.1)


async def provider(stack: AsyncExitStack, *names: str, **options: object) -> ScriptedProvider:
    return await stack.enter_async_context(serving(ScriptedProvider(*names, **options)))  # type: ignore[arg-type]


async def client(
    stack: AsyncExitStack, *addressed: ScriptedProvider, own: str = "", wait: float = 1.0
) -> EnvironmentClient:
    named = [(name, one.address) for one in addressed for name in one.names]
    made = EnvironmentClient(own or "127.0.0.1:1", named, wait, reward_bound=1e6)
    stack.push_async_callback(made.close)
    return made


async def play(episode: Episode) -> list[Answer]:
    steps = [await episode.reset()]
    while not steps[-1].done:
        steps.append(await episode.step("on"))
    return steps


async def until(condition: object, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


async def test_an_episode_of_the_runs_own_service(stack: AsyncExitStack) -> None:
    there = await provider(stack, "good")
    environment = await client(stack, own=there.address)
    async with environment.episode("good", {"nums": [1]}, {"max": 2}, seed=7) as episode:
        steps = await play(episode)
        with pytest.raises(RuntimeError):
            await episode.step("after done")
    assert steps[0].observation == '{"nums": [1]}'
    assert [step.reward for step in steps] == [0, 0.5, 0.5, 0.5]
    assert [step.done for step in steps] == [False, False, False, True]
    await until(lambda: there.open == 0)


@pytest.mark.parametrize(
    ("name", "cause", "said"),
    [
        ("silent", EnvironmentCause.TIMEOUT, "no answer to action 1"),
        ("crash", EnvironmentCause.CRASH, "broken inside"),
        ("end", EnvironmentCause.CRASH, "the stream ended"),
        ("refuse", EnvironmentCause.REFUSED, "task.nums: is missing"),
        ("nan", EnvironmentCause.CONTRACT_VIOLATION, "reward is nan"),
        ("told", EnvironmentCause.CONTRACT_VIOLATION, "reward is nan"),
        ("infinite", EnvironmentCause.CONTRACT_VIOLATION, "reward is inf"),
        ("huge", EnvironmentCause.CONTRACT_VIOLATION, "observation is longer"),
        ("order", EnvironmentCause.CONTRACT_VIOLATION, "turn 7 instead of 1"),
        ("garbage", EnvironmentCause.CONTRACT_VIOLATION, "info_json is not JSON"),
        ("list", EnvironmentCause.CONTRACT_VIOLATION, "must be a JSON object"),
        ("nan_metric", EnvironmentCause.CONTRACT_VIOLATION, "metric steps is nan"),
        ("many_metrics", EnvironmentCause.CONTRACT_VIOLATION, "101 metrics"),
        (
            "beyond",
            EnvironmentCause.CONTRACT_VIOLATION,
            "is -2e+06, must be in [-1e+06, 1e+06]; scale it, or raise expl",
        ),
        ("long_name", EnvironmentCause.CONTRACT_VIOLATION, "a name of 10000 characters, at most 256"),
        ("wide_metric", EnvironmentCause.CONTRACT_VIOLATION, "metric steps is 1e+300"),
        ("wordy", EnvironmentCause.CONTRACT_VIOLATION, "metadata size exceeds"),
    ],
)
@pytest.mark.usefixtures("short_grace")
async def test_a_failed_step_has_its_cause(
    stack: AsyncExitStack, name: str, cause: EnvironmentCause, said: str
) -> None:
    there = await provider(stack, name, "good")
    environment = await client(stack, there)
    async with environment.episode("good", {}) as neighbour:
        await neighbour.reset()
        async with environment.episode(name, {}) as episode:
            await episode.reset()
            with pytest.raises(EnvironmentFailed) as failed:
                await episode.step("x")
            with pytest.raises(RuntimeError):
                await episode.step("x")
        assert failed.value.cause is cause
        assert said in str(failed.value)
        await until(lambda: there.open == 1)
        assert (await neighbour.step("x")).reward == 0.5


@pytest.mark.parametrize(
    ("name", "turns", "said"),
    [("adding", 2, "the sum of its episode's rewards is 1.2e+06"), ("renaming", 10, "have 1000 metrics, at most 900")],
)
async def test_an_episode_that_breaks_a_bound_answer_by_answer_is_the_providers_failure(
    stack: AsyncExitStack, name: str, turns: int, said: str
) -> None:
    there = await provider(stack, name)
    environment = await client(stack, there)
    async with environment.episode(name, {}) as episode:
        await episode.reset()
        for _ in range(turns - 1):
            await episode.step("x")
        with pytest.raises(EnvironmentFailed, match=said.replace("+", "[+]")) as failed:
            await episode.step("x")
    assert failed.value.cause is EnvironmentCause.CONTRACT_VIOLATION


async def test_an_answer_that_came_twice_is_out_of_order(stack: AsyncExitStack) -> None:
    there = await provider(stack, "twice")
    environment = await client(stack, there)
    async with environment.episode("twice", {}) as episode:
        await episode.reset()
        await episode.step("x")
        with pytest.raises(EnvironmentFailed, match="turn 1 instead of 2") as failed:
            await episode.step("x")
    assert failed.value.cause is EnvironmentCause.CONTRACT_VIOLATION


async def test_leaving_an_episode_ends_it_on_the_other_side(stack: AsyncExitStack) -> None:
    there = await provider(stack, "good")
    environment = await client(stack, there)
    async with environment.episode("good", {}) as episode:
        await episode.reset()
        assert there.open == 1
    await until(lambda: there.open == 0)


async def test_load_goes_to_the_provider_with_the_fewest_open_episodes(stack: AsyncExitStack) -> None:
    one, two = await provider(stack, "good"), await provider(stack, "good")
    environment = await client(stack, one, two)
    async with AsyncExitStack() as episodes:
        for _ in range(8):
            await (await episodes.enter_async_context(environment.episode("good", {}))).reset()
        assert (one.open, two.open) == (4, 4)
    await until(lambda: one.open + two.open == 0)


async def test_what_attaches_shares_the_load_of_those_with_an_address(stack: AsyncExitStack) -> None:
    attached, addressed = await provider(stack, "good"), await provider(stack, "good")
    environment = EnvironmentClient(attached.address, [("good", addressed.address)], 1.0, ["good"])
    stack.push_async_callback(environment.close)
    async with AsyncExitStack() as episodes:
        for _ in range(8):
            await (await episodes.enter_async_context(environment.episode("good", {}))).reset()
        assert (attached.open, addressed.open) == (4, 4)


async def test_a_bad_provider_is_avoided_and_asked_again_later(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_providers, "_FIRST_AVOIDED_SECONDS", 30.0)
    bad, good = await provider(stack, "game"), await provider(stack, "game")
    bad.acts_as = {"game": "nan"}
    environment = await client(stack, bad, good)

    async def failures(episodes: int) -> int:
        failed = 0
        for _ in range(episodes):
            async with environment.episode("game", {}) as episode:
                try:
                    await play(episode)
                except EnvironmentFailed:
                    failed += 1
        return failed

    assert await failures(10) <= 1
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 60.0)
    monkeypatch.setattr(environment_providers, "time", later)
    assert await failures(20) >= 1  # at random one of the two, and both are free
    assert len(bad.begun) <= 3
    assert len(good.begun) >= 27


async def test_a_full_provider_sends_to_the_other_one(stack: AsyncExitStack) -> None:
    full, free = await provider(stack, "good"), await provider(stack, "good")
    full.full = True
    environment = await client(stack, full, free)
    for _ in range(4):
        async with environment.episode("good", {}) as episode:
            await play(episode)
    assert (len(full.begun), len(free.begun)) == (0, 4)


async def test_a_provider_that_starts_late_is_waited_for(stack: AsyncExitStack) -> None:
    address = f"127.0.0.1:{free_port()}"
    environment = await client(stack, own=address, wait=20.0)
    late = ScriptedProvider("good")

    async def start() -> None:
        await asyncio.sleep(0.5)
        await stack.enter_async_context(serving(late, address))

    starting = asyncio.create_task(start())
    async with environment.episode("good", {}) as episode:
        await episode.reset()
    await starting


@pytest.mark.parametrize("own", [True, False])
async def test_an_unreachable_provider_is_reported_after_the_wait(stack: AsyncExitStack, own: bool) -> None:
    there = await provider(stack, "good")
    environment = await client(stack, own=there.address if own else f"127.0.0.1:{free_port()}", wait=0.3)
    begin = time.monotonic()
    async with environment.episode("goood", {}) as episode:
        with pytest.raises(EnvironmentFailed) as failed:
            await episode.reset()
    assert failed.value.cause is (EnvironmentCause.REFUSED if own else EnvironmentCause.AWAY)
    assert ("known: good" in str(failed.value)) is own
    assert time.monotonic() - begin < 5


async def test_another_version_of_the_contract_is_refused(stack: AsyncExitStack) -> None:
    there = await provider(stack, "good", protocol_version=1)
    environment = await client(stack, there)
    async with environment.episode("good", {}) as episode:
        with pytest.raises(EnvironmentFailed, match="version 1") as failed:
            await episode.reset()
    assert failed.value.cause is EnvironmentCause.REFUSED


async def test_a_provider_that_dies_mid_episode_is_away_and_the_next_episode_goes_elsewhere(
    stack: AsyncExitStack,
) -> None:
    other = await provider(stack, "good")
    async with AsyncExitStack() as mortal:
        dying = await provider(mortal, "good")
        environment = await client(stack, other, dying)
        episodes = [await stack.enter_async_context(environment.episode("good", {})) for _ in range(2)]
        for episode in episodes:
            await episode.reset()
        (victim,) = [episode for episode in episodes if episode.provider == dying.address]
    with pytest.raises(EnvironmentFailed) as failed:
        await victim.step("x")
    assert failed.value.cause is EnvironmentCause.AWAY
    for _ in range(3):
        async with environment.episode("good", {}) as episode:
            await play(episode)
            assert episode.provider == other.address


async def test_a_hundred_episodes_cancelled_at_once_leave_nothing(stack: AsyncExitStack) -> None:
    there = await provider(stack, "good", step_seconds=30)
    environment = await client(stack, there)
    before = len(asyncio.all_tasks())

    async def forever() -> None:
        async with environment.episode("good", {}) as episode:
            await episode.reset()
            await asyncio.sleep(60)

    tasks = [asyncio.create_task(forever()) for _ in range(100)]
    await until(lambda: there.open == 100)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: there.open == 0 and len(asyncio.all_tasks()) <= before)


async def test_scores_come_from_the_named_provider_and_a_wrong_count_is_a_violation(
    stack: AsyncExitStack,
) -> None:
    there = await provider(stack, "good", "short")
    environment = await client(stack, there)
    (score,) = await environment.score("good", [ANSWER], {}, {})
    assert score.reward == 0.25
    with pytest.raises(ScorerFailed, match="0 scores for 1 items"):
        await environment.score("short", [ANSWER], {}, {})


@pytest.mark.parametrize(
    ("scorer", "said"),
    [
        ("beyond", "a reward is 1.1e[+]06, must be in .*; scale it, or raise explorer.reward_bound"),
        ("long_name", "a name of 10000 characters, at most 256"),
        ("wide_metric", "metric x is -1e[+]39"),
        ("many_metrics", "901 metrics, at most 900"),
    ],
)
async def test_scores_beyond_the_bounds_are_the_providers_failure(
    stack: AsyncExitStack, scorer: str, said: str
) -> None:
    there = await provider(stack, scorer)
    environment = await client(stack, there)
    with pytest.raises(ScorerFailed, match=said):
        await environment.score(scorer, [ANSWER], {}, {})
    assert environment._providers.choose(scorer).avoided_until(scorer) > time.monotonic()
