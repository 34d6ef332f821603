"""A class in a plugin folder is an environment of the run's own service; a broken one is one sentence."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from support.servers.service import ServiceProcess
from trinity import plugins
from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.environments import ENVIRONMENTS
from trinity.plugins import PluginError
from trinity.runtime.errors import EXIT_FOR_GOOD

pytestmark = pytest.mark.core

GUESS = """
from trinity.plugins import environment
from trinity.sdk import Environment, Observation


@environment("{name}")
class OfPlugin(Environment):
    isolation = "{isolation}"

    def reset(self, task, args, seed):
        self.number = task["number"]
        return Observation("Guess a number.")

    def step(self, action):
        return Observation("", float(action == str(self.number)), True)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "ENVIRONMENTS", {})
    (tmp_path / "plugins").mkdir()
    yield tmp_path / "plugins"
    sys.modules.pop("games_of_plugin", None)


@pytest.mark.parametrize("isolation", ["none", "thread", "process"])
def test_it_is_played_by_the_service(folder: Path, isolation: str, tmp_path: Path) -> None:
    (folder / "games_of_plugin.py").write_text(GUESS.format(name="guess_it", isolation=isolation))
    service = ServiceProcess("environment", tmp_path, PLUGIN_DIRS=str(folder)).start()
    try:
        with grpc.insecure_channel(service.address) as channel:
            stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
            known = {one.name for one in stub.Describe(pb.DescribeRequest(), timeout=20).environments}
            reset = pb.Reset(environment="guess_it", task_json=json.dumps({"number": 7}))
            messages = [pb.EpisodeRequest(reset=reset), pb.EpisodeRequest(action=pb.Action(text="7", turn=1))]
            first, last = stub.Episode(iter(messages), timeout=40)
    finally:
        service.stop()
    assert known == {"guess_it", *ENVIRONMENTS}
    assert (first.observation, last.reward, last.done) == ("Guess a number.", 1.0, True)


def test_the_name_of_a_built_in_one_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "games_of_plugin.py").write_text(GUESS.format(name="sudoku", isolation="none"))
    service = ServiceProcess("environment", tmp_path, PLUGIN_DIRS=str(folder)).start(wait_seconds=0)
    try:
        assert service.wait(60) == EXIT_FOR_GOOD
        assert "a plugin offers 'sudoku', the name of a built-in environment" in service.tail()
    finally:
        service.kill()


IMPORTS = "from trinity.plugins import environment\nfrom trinity.sdk import Environment\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("environment('x')(lambda: 1)", "is no class with reset, step and close"),
        ("environment('x')(type('X', (Environment,), {}))", "does not define reset, step"),
        (
            "X = type('X', (Environment,), {'reset': 1, 'step': 1})\nenvironment('x')(X)\nenvironment('y')(X)",
            "which is 'x' already",
        ),
    ],
)
def test_what_is_no_environment_is_refused(folder: Path, text: str, problem: str) -> None:
    (folder / "games_of_plugin.py").write_text(f"{IMPORTS}{text}\n")
    with pytest.raises(PluginError, match=rf"games_of_plugin.py:\d+: .*{problem}"):
        plugins.load([folder])
