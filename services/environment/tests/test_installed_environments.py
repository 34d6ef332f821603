"""A package that is installed offers environments by entry points; a broken one is one sentence."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from support.servers.service import ServiceProcess
from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.environment.service import environments
from trinity.environments import ENVIRONMENTS
from trinity.plugins import PluginError
from trinity.plugins.environments import offers
from trinity.runtime.errors import EXIT_FOR_GOOD

pytestmark = pytest.mark.core

GAME = '''
from trinity.sdk import Environment, Observation


class Dice(Environment):
    """A die shows what the seed says."""

    {isolation}

    def reset(self, task, args, seed):
        self.shown = task["shown"]
        return Observation("What does the die show?")

    def step(self, action):
        return Observation("", float(action == str(self.shown)), True)
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Installs a distribution of one module in a folder that is on the path here and in processes."""

    def make(text: str, *points: str, name: str = "dice_games") -> Path:
        site = tmp_path / "site"
        about = site / f"{name}-1.0.dist-info"
        about.mkdir(parents=True)
        (site / f"{name}.py").write_text(text)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text("[trinity.environments]\n" + "\n".join(points) + "\n")
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
        monkeypatch.delitem(sys.modules, name, raising=False)
        return site

    return make


@pytest.mark.parametrize("isolation", ["", 'isolation = "process"'], ids=["thread", "process"])
def test_it_is_played_through_the_service(install: Callable[..., Path], tmp_path: Path, isolation: str) -> None:
    install(GAME.format(isolation=isolation), "dice = dice_games:Dice")
    service = ServiceProcess("environment", tmp_path).start()
    with grpc.insecure_channel(service.address) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        known = {one.name for one in stub.Describe(pb.DescribeRequest(), timeout=20).environments}
        reset = pb.Reset(environment="dice", task_json=json.dumps({"shown": 5}))
        messages = [pb.EpisodeRequest(reset=reset), pb.EpisodeRequest(action=pb.Action(text="5", turn=1))]
        first, last = stub.Episode(iter(messages), timeout=40)
    assert service.stop() == 0
    assert {"dice", *ENVIRONMENTS} == known
    assert first.observation == "What does the die show?"
    assert (last.reward, last.done) == (1.0, True)


DICE = GAME.format(isolation="")
BROKEN = [
    ("1 / 0", "dice = dice_games:Dice", "ZeroDivisionError: division by zero; mend or remove dice-games"),
    ("raise SystemExit('no\\nway')", "dice = dice_games:Dice", "SystemExit: no way; mend"),
    (DICE, "dice = dice_games:Cards", "AttributeError: module 'dice_games' has no attribute 'Cards'"),
    (DICE, "dice = no_games:Dice", "ModuleNotFoundError: No module named 'no_games'"),
    ("Dice = 3", "dice = dice_games:Dice", "is no class with reset, step and close"),
    (DICE.replace("def step", "def other"), "dice = dice_games:Dice", "does not define step"),
    (DICE, "cards = dice_games:Dice", "describes itself as 'dice'; give class and entry point one name"),
    (DICE.replace("Dice", "Countdown"), "countdown = dice_games:Countdown", "the name of a built-in environment"),
]


@pytest.mark.parametrize(("text", "point", "said"), BROKEN, ids=[said for *_, said in BROKEN])
def test_a_broken_entry_point_is_one_sentence(install: Callable[..., Path], text: str, point: str, said: str) -> None:
    install(text, point)
    with pytest.raises(PluginError) as caught:
        environments()
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_two_packages_with_one_name_are_refused(install: Callable[..., Path]) -> None:
    install(DICE, "dice = dice_games:Dice")
    install(DICE, "dice = more_games:Dice", name="more_games")
    with pytest.raises(PluginError, match="another package offers an environment of this name"):
        environments()


def test_service_and_check_say_it(install: Callable[..., Path], tmp_path: Path, repository: Path) -> None:
    site = install(DICE, "dice = dice_games:Dice")
    command = [
        sys.executable,
        "-m",
        "trinity.cli.main",
        "check",
        str(repository / "examples/quickstart/arithmetic.yaml"),
    ]
    there = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert (there.returncode, "environments of installed packages: dice" in there.stdout) == (0, True), there.stderr
    (site / "dice_games.py").write_text("1 / 0")
    broken = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert (broken.returncode, broken.stdout) == (2, "")
    assert broken.stderr.startswith(
        "trinity: entry point dice = dice_games:Dice of dice-games (trinity.environments): "
    )
    assert len(broken.stderr.splitlines()) == 1
    service = ServiceProcess("environment", tmp_path)
    service.start(wait_seconds=0)
    assert service.wait(60) == EXIT_FOR_GOOD
    assert "ZeroDivisionError: division by zero; mend or remove dice-games" in service.tail()


def test_the_status_has_versions_and_what_is_wrong(install: Callable[..., Path]) -> None:
    install(GAME.format(isolation=""), "dice = dice_games:Dice", "sokoban = dice_games:Dice", "gone = dice_games:Gone")
    found = {(one.name, one.source): one for one in offers()}
    assert {name for name, source in found if source == "built in"} == set(ENVIRONMENTS)
    assert (found["dice", "installed"].version, found["dice", "installed"].problem) == ("1.0", "")
    assert "describes itself as 'dice'" in found["sokoban", "installed"].problem
    assert "mend or remove dice-games" in found["gone", "installed"].problem
    for one in found.values():
        assert one.problem or not one.package or one.version
