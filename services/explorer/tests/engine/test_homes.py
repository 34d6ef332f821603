"""A conversation stays with the engine that has its key-value blocks, unless that engine has too much to do."""

import random

import pytest

from trinity.explorer.engine import pool
from trinity.explorer.engine.pool import Homes

pytestmark = pytest.mark.core


def turns(seed: int, number: int = 5, tokens: int = 100) -> list[list[int]]:
    """Prompts of a conversation: each begins with the one before it."""
    drawn = random.Random(seed)
    whole = [drawn.randrange(1000) for _ in range(number * tokens)]
    return [whole[: (turn + 1) * tokens] for turn in range(number)]


def asked(found: Homes, prompt: list[int]) -> int:
    """One request, from its begin to its end."""
    engine = found.enter(prompt, 1)
    found.leave(engine, 1)
    return engine


def test_each_turn_goes_to_the_engine_of_the_turn_before() -> None:
    found, drawn = Homes(4), random.Random(0)
    conversations = [turns(seed) for seed in range(40)]
    first: dict[int, int] = {}
    for turn in range(5):
        running = []
        for index in drawn.sample(range(40), 40):  # all run at once, and begin in any order
            engine = found.enter(conversations[index][turn], 1)
            running.append(engine)
            assert first.setdefault(index, engine) == engine
        assert [running.count(engine) for engine in range(4)] == [10] * 4
        for engine in running:
            found.leave(engine, 1)
    assert list(found.running) == [0] * 4


def test_an_overloaded_engine_gives_a_conversation_away_and_it_stays_there() -> None:
    found, talk = Homes(2), turns(1)
    home = asked(found, talk[0])
    crowd = 0
    while (engine := asked(found, talk[1])) == home and crowd < 100:
        found.enter(talk[0], 1)
        crowd += 1
    assert 3 < crowd < 20
    assert engine != home
    for _ in range(crowd):
        found.leave(home, 1)
    assert asked(found, talk[2]) == engine


@pytest.mark.parametrize(("shared", "stays"), [(100, False), (400, True)])
def test_a_shared_beginning_binds_only_what_is_mostly_shared(shared: int, stays: bool) -> None:
    found, beginning = Homes(2), list(range(shared))
    first = found.enter(beginning + [9] * 300, 1)
    second = found.enter(beginning + [8] * 300, 1)
    assert (first == second) is stays


def test_prompts_of_one_system_prompt_are_spread_over_all_engines() -> None:
    found, system = Homes(4), list(range(2000))
    placed = [found.enter(system + [seed] * 50, 8) for seed in range(64)]
    counts = [placed.count(engine) for engine in range(4)]
    assert max(counts) <= 1.25 * 16 + 1, counts


def test_old_conversations_are_forgotten_and_short_prompts_go_to_the_least_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "_KEPT", 10)
    found = Homes(2)
    home = found.enter(turns(1)[3], 1)
    for seed in range(10, 14):
        asked(found, turns(seed)[2])
    assert asked(found, turns(1)[4]) != home
    assert len(found._engine_of) <= 10
    assert found.enter([1, 2, 3], 1) != home
