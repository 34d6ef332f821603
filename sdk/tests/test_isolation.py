"""Where an episode's calls run, and how a call that hangs, dies or exceeds its memory ends."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from support.fakes.environments import odd_environments as odd
from trinity.sdk import AsyncEnvironment, Description, Environment, Observation, memory
from trinity.sdk.arena import Arena, Episode
from trinity.sdk.contract import Action, Answer, Reset
from trinity.sdk.environment import EnvironmentClass
from trinity.sdk.errors import Full, InvalidInput, status_of

pytestmark = pytest.mark.core

ALL = (odd.Odd, odd.OddInLoop, odd.OddInProcess, odd.OddShared, odd.OddCoroutine, odd.OddCoroutineInProcess)
SEPARATE = (odd.Odd, odd.OddInProcess, odd.OddCoroutine, odd.OddCoroutineInProcess)
IN_PROCESSES = (odd.OddInProcess, odd.OddCoroutineInProcess)


@pytest.fixture
async def arena(request: pytest.FixtureRequest) -> AsyncIterator[Arena]:
    made = Arena([request.param])
    yield made
    await made.drain(2)


def reset(**task: Any) -> Reset:
    return Reset("odd", json.dumps(task), seed=7)


async def step(episode: Episode, text: str, turn: int = 1) -> Answer:
    return await episode.step(Action(text, turn))


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_class_without_a_description_has_the_name_of_its_own() -> None:
    class CardGame(odd.Odd):
        description = Description("cards")

    class Table(Environment):
        def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
            return Observation("")

        def step(self, action: str) -> Observation:
            return Observation("", done=True)

    class Poker(Table):
        """Cards for many."""

    class Whist(CardGame):
        pass

    found = [kind.description for kind in (Table, Poker, Whist)]
    assert found == [Description("table"), Description("poker", "Cards for many."), Description("cards")]


def test_a_description_that_breaks_the_contract_is_refused_at_once() -> None:
    class Endless(odd.Odd):
        description = Description("endless", step_timeout_seconds=0)

    with pytest.raises(TypeError, match=r"Endless\.description\.step_timeout_seconds: is 0, must be above 0"):
        Arena([Endless])


@pytest.mark.parametrize("arena", [odd.OddInLoop], indirect=True)
async def test_half_a_character_of_an_observation_is_replaced(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(odd.OddInLoop, "step", lambda self, action: Observation("a\ud83d"))
    async with arena.enter("odd") as episode:
        await episode.reset(reset())
        assert (await step(episode, "on")).observation == "a?"


@pytest.mark.parametrize("arena", ALL, indirect=True)
async def test_an_episode_is_played_and_closed_once(arena: Arena, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    async with arena.enter("odd") as episode:
        first = await episode.reset(reset(closed_file=str(closed)))
        assert json.loads(first.info_json) == {"seed": 7}
        second = await step(episode, "on")
        assert (second.reward, second.turn, second.done) == (0.5, 1, False)
        assert (await step(episode, "done", 2)).done
    await until(lambda: arena.open == 0)
    assert closed.read_text() == "closed\n"


@pytest.mark.parametrize("arena", ALL, indirect=True)
@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("raise", "odd: ValueError: broken inside"),
        ("exit", "SystemExit: 3"),
        ("cancel", "CancelledError: "),
        ("half", "ValueError: half a pair: [?]"),
        ("unreadable", "odd: Unreadable: its text cannot be read: RuntimeError"),
    ],
)
async def test_what_the_environment_raises_is_reported_and_it_is_closed(
    arena: Arena, action: str, said: str, tmp_path: Path
) -> None:
    closed = tmp_path / "closed"
    with pytest.raises(Exception, match=said) as failed:
        async with arena.enter("odd") as episode:
            await episode.reset(reset(closed_file=str(closed)))
            await step(episode, action)
    assert status_of(failed.value)[0] is grpc.StatusCode.INTERNAL
    await until(lambda: arena.open == 0)
    assert closed.read_text() == "closed\n"


@pytest.mark.parametrize("arena", ALL, indirect=True)
async def test_a_bad_task_is_refused_by_its_field(arena: Arena) -> None:
    with pytest.raises(Exception, match=r"task\.bad: is true") as failed:
        async with arena.enter("odd") as episode:
            await episode.reset(reset(bad=True))
    assert status_of(failed.value)[0] is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("arena", SEPARATE, indirect=True)
async def test_a_call_that_hangs_fails_its_episode_at_the_limit_and_leaves_nothing(arena: Arena) -> None:
    begin = time.monotonic()
    with pytest.raises(Exception, match=r"longer than 1 s for one step") as failed:
        async with arena.enter("odd") as episode:
            await episode.reset(reset())
            begin = time.monotonic()
            await step(episode, "hang")
    assert time.monotonic() - begin > 0.9
    assert status_of(failed.value)[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: arena.open == 0)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("episode-")]
    async with arena.enter("odd") as episode:
        await episode.reset(reset())
        assert (await step(episode, "on")).reward == 0.5


@pytest.mark.parametrize("arena", IN_PROCESSES, indirect=True)
async def test_a_worker_that_dies_is_started_again(arena: Arena) -> None:
    with pytest.raises(Exception, match=r"worker process died \(exit code 7\)"):
        async with arena.enter("odd") as episode:
            await episode.reset(reset())
            await step(episode, "die")
    async with arena.enter("odd") as episode:
        await episode.reset(reset())
        assert (await step(episode, "on")).reward == 0.5


@pytest.mark.parametrize("arena", [odd.OddHungry], indirect=True)
async def test_a_worker_over_its_memory_is_killed_and_its_neighbour_continues(arena: Arena) -> None:
    async with arena.enter("odd") as neighbour:
        await neighbour.reset(reset())
        with pytest.raises(Exception, match="more than 300 MiB"):
            async with arena.enter("odd") as episode:
                await episode.reset(reset())
                await step(episode, "eat")
        assert (await step(neighbour, "on")).reward == 0.5


@pytest.mark.parametrize("arena", [odd.OddInProcess], indirect=True)
async def test_what_a_worker_started_is_killed_with_it(arena: Arena) -> None:
    with pytest.raises(Exception, match="longer than"):
        async with arena.enter("odd") as episode:
            await episode.reset(reset())
            pid = int((await step(episode, "spawn")).observation)
            assert psutil.pid_exists(pid)
            await step(episode, "hang", 2)
    await until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize("arena", [odd.OddInProcess], indirect=True)
async def test_workers_are_reused_limited_and_gone_after_the_drain(arena: Arena) -> None:
    assert arena.sources["odd"].description.max_parallel_episodes == 2
    pids = set()
    for _ in range(3):
        async with arena.enter("odd") as episode:
            pids.add((await episode.reset(reset())).observation.split()[0])
        await until(lambda: arena.open == 0)
    assert len(pids) == 1
    assert str(os.getpid()) not in pids
    async with arena.enter("odd") as one, arena.enter("odd") as two:
        pids = {(await episode.reset(reset())).observation.split()[0] for episode in (one, two)}
        assert len(pids) == 2
        with pytest.raises(Full, match="its limit"):
            arena.enter("odd")
    await arena.drain(2)
    assert not any(psutil.pid_exists(int(pid)) for pid in pids)


@pytest.mark.parametrize("arena", [odd.OddShared], indirect=True)
async def test_episodes_that_share_a_worker_keep_their_time_and_end_with_it(arena: Arena) -> None:
    async with arena.enter("odd") as one, arena.enter("odd") as two, arena.enter("odd") as three:
        pids = {(await episode.reset(reset())).observation.split()[0] for episode in (one, two, three)}
        assert len(pids) == 1
        await asyncio.gather(*(step(episode, "on") for episode in (one, two)))
        hung = asyncio.create_task(step(three, "hang"))
        await asyncio.sleep(0.05)
        with pytest.raises(Exception, match="worker process was killed: an episode was over its time limit"):
            await step(one, "on", 2)
        with pytest.raises(Exception, match="longer than"):
            await hung
    async with arena.enter("odd") as episode:
        await episode.reset(reset())


@pytest.mark.parametrize("arena", [odd.OddInProcess], indirect=True)
async def test_an_episode_is_not_put_behind_the_close_of_another(arena: Arena) -> None:
    for turns in range(1, 6):  # of the event loop, after which the close has come so far
        one = arena.enter("odd")
        await one.reset(reset())
        closing = asyncio.create_task(one.__aexit__(None, None, None))
        for _ in range(turns):
            await asyncio.sleep(0)
        async with arena.enter("odd") as two:
            await two.reset(reset())
        await closing


@pytest.mark.parametrize("arena", [odd.OddShared], indirect=True)
async def test_a_call_behind_slow_neighbours_says_that_it_waited_for_its_turn(arena: Arena) -> None:
    announced = arena.sources["odd"].description
    assert announced.step_timeout_seconds == 1 + 10 + 60, "its own time, and the longest call of another episode"
    assert announced.reset_timeout_seconds == 2 * (10 + 60)
    async with arena.enter("odd") as slow, arena.enter("odd") as behind:
        for episode in (slow, behind):
            await episode.reset(reset())
        player: Any = behind._player
        turn: asyncio.Lock = player._worker._turn
        await turn.acquire()  # another episode occupies the worker
        player._wait_seconds = 0.2
        with pytest.raises(Exception, match=r"longer than 0\.2 s for its turn: .* lower episodes_per_pro") as failed:
            await step(behind, "on")
        turn.release()
        assert status_of(failed.value)[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (await step(slow, "on")).reward == 0.5, "the worker continues"


@pytest.mark.parametrize("arena", [odd.OddInProcess], indirect=True)
async def test_a_worker_that_cannot_load_its_class_says_why(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(odd.OddInProcess, "__module__", "no_such_module")
    with pytest.raises(Exception, match="cannot load OddInProcess: ModuleNotFoundError: No module named 'no_such_mod"):
        async with arena.enter("odd") as episode:
            await episode.reset(reset())


async def test_memory_is_polled_once_for_all_workers_and_only_while_one_is_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[tuple[int, ...]] = []
    threads: set[int] = set()

    def resident_mib(leaders: Collection[int]) -> dict[int, float]:
        looks.append(tuple(leaders))
        threads.add(threading.get_ident())
        return dict.fromkeys(leaders, 100.0)

    monkeypatch.setattr(memory, "resident_mib", resident_mib)
    monkeypatch.setattr(memory, "_LOOKS_SECONDS", 0.01)
    watch, busy, over = memory.MemoryWatch(), [False], list[int]()

    def remember(pid: int) -> None:
        over.append(pid)
        watch.remove(pid)

    for pid, limit in ((1, 200), (2, 50), (3, 200)):
        watch.add(pid, limit, lambda: busy[0], partial(remember, pid))
    await asyncio.sleep(0.1)
    assert not looks
    busy[0] = True
    await until(lambda: len(looks) >= 2)
    assert looks[:2] == [(1, 2, 3), (1, 3)]
    assert over == [2]
    assert threading.get_ident() not in threads
    for pid in (1, 3):
        watch.remove(pid)
    assert watch._polling is not None
    await asyncio.wait_for(watch._polling, 10)


def test_memory_is_counted_for_each_session() -> None:
    command = [sys.executable, "-c", "print('here', flush=True); input()"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    child.stdout.readline()
    found = memory.resident_mib([child.pid, os.getsid(0), -5])
    assert 1 < found[child.pid] < 1000
    assert found[-5] == 0
    child.communicate(b"\n")


@pytest.mark.parametrize("arena", [odd.OddInProcess, odd.Odd], indirect=True)
async def test_a_client_that_leaves_mid_call_frees_the_slot_when_the_call_ends(arena: Arena, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    episode = arena.enter("odd")
    await episode.reset(reset(closed_file=str(closed)))

    async def play() -> None:
        async with episode:
            await step(episode, "hang")

    playing = asyncio.create_task(play())
    await asyncio.sleep(0.2)
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    await until(lambda: arena.open == 0)


@pytest.mark.parametrize("arena", [odd.Odd], indirect=True)
async def test_all_calls_of_an_episode_run_in_one_thread_of_its_own(arena: Arena) -> None:
    async with arena.enter("odd") as one, arena.enter("odd") as two:
        first = {(await episode.reset(reset())).observation for episode in (one, two)}
        second = {(await step(episode, "on")).observation for episode in (one, two)}
    assert first == second
    assert len(first) == 2
    assert f"{os.getpid()} {threading.get_ident()}" not in first


def declared(base: Any, **attributes: Any) -> EnvironmentClass:
    methods = {name: (lambda self, *_: Observation("")) for name in ("reset", "step")}
    return type("Declared", (base,), {**methods, **attributes})


@pytest.mark.parametrize(
    ("base", "attributes", "said"),
    [
        (Environment, {"isolation": "vm"}, "isolation is 'vm'"),
        (AsyncEnvironment, {"isolation": "thread"}, "coroutines run in an event loop"),
        (Environment, {"memory_limit_mib": 5}, "needs isolation = 'process'"),
        (Environment, {"isolation": "process", "__qualname__": "f.<locals>.Declared"}, "move it out"),
        (object, {}, "must be a subclass"),
    ],
)
def test_a_declaration_that_cannot_hold_is_refused(base: Any, attributes: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        Arena([declared(base, **attributes)])


def test_a_class_without_a_description_gets_its_name_and_first_line() -> None:
    class GuessANumber(Environment):
        """Guess it.

        More words.
        """

        def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
            return Observation("")

        def step(self, action: str) -> Observation:
            return Observation("")

    assert GuessANumber.description == Description("guess_anumber", "Guess it.")


async def test_a_turn_that_is_not_the_next_one_is_refused() -> None:
    arena = Arena([odd.OddInLoop])
    async with arena.enter("odd") as episode:
        with pytest.raises(InvalidInput, match="before reset"):
            await step(episode, "on")
        await episode.reset(reset())
        with pytest.raises(InvalidInput, match="is 3, must be 1"):
            await step(episode, "on", 3)
    await arena.drain(0)
