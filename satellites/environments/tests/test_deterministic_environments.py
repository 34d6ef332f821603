"""An environment that announces it is deterministic plays the same episode in another process, with other hashes."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from trinity.environments import ENVIRONMENTS
from trinity.sdk.environment import AsyncEnvironment

ANNOUNCED = sorted(name for name, kind in ENVIRONMENTS.items() if kind.description.deterministic)
SLOW = {"alfworld"}
ROWS = {
    "countdown": {"nums": [3, 4, 5, 6], "target": 42},
    "math": {"question": "What is 6 x 7?", "answer": "42"},
    "gym_card": {"game": "points24"},
}
PLAY = """
import dataclasses, json, random, sys
from trinity.environments import ENVIRONMENTS

name, row = sys.argv[1], json.loads(sys.argv[2])
for seed in range(5):
    actions = random.Random(seed)
    game = ENVIRONMENTS[name]()
    seen = [game.reset(row, {}, seed)]
    while not seen[-1].done and len(seen) < 12:
        known = sorted(game.actions() or ()) if hasattr(game, "actions") else ()
        word = actions.choice(known) if known else str(actions.randrange(50))
        seen.append(game.step(f"<answer>{word}</answer><action>{word}</action>"))
    game.close()
    print(json.dumps([dataclasses.asdict(one) for one in seen], sort_keys=True))
"""


def played(name: str, hashes: int) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": str(hashes)}
    row = json.dumps(ROWS.get(name, {}))
    return subprocess.run(
        [sys.executable, "-c", PLAY, name, row],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout


def check(name: str) -> None:
    first = played(name, 1)
    assert len(first.splitlines()) == 5
    assert first == played(name, 2)


@pytest.mark.core
@pytest.mark.parametrize("name", sorted({*ANNOUNCED} - SLOW))
def test_the_same_actions_give_the_same_episode(name: str) -> None:
    check(name)


@pytest.mark.extended
@pytest.mark.skipif(find_spec("alfworld") is None, reason="alfworld is not installed")
def test_a_generated_kitchen_is_played_the_same_way() -> None:
    assert "alfworld" in ANNOUNCED
    check("alfworld")


@pytest.mark.core
def test_those_that_reach_outside_do_not_announce_it() -> None:
    """A server, tools or a simulator elsewhere may remember what an interrupted episode did."""
    assert not {"webshop", "openenv", "mcp", "verifiers", "gymnasium"} & set(ANNOUNCED)
    assert not any(issubclass(ENVIRONMENTS[name], AsyncEnvironment) for name in ANNOUNCED)
