"""`trinity check --deep` tries out rewards of plugins, environments of installed packages, and those of providers."""

import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.checks.deep_check import check, play
from support.servers.service import ServiceProcess
from trinity import plugins
from trinity.api.environment.v1 import environment_pb2, environment_pb2_grpc
from trinity.deep_check import tasksets
from trinity.runtime import rpc
from trinity.runtime.errors import InvalidInput
from trinity.runtime.process import free_port
from trinity.runtime.trust.identity import Identity
from trinity.runtime.trust.roles import Role
from trinity.runtime.trust.tokens import make_tokens

pytestmark = pytest.mark.core

ROW = {"question": "?", "answer": "2"}

TASKSET = "buffer.explorer_input.taskset"


GAME = """
from trinity.sdk import AsyncEnvironment, InvalidInput, Observation



class Die(AsyncEnvironment):
    async def reset(self, task, args, seed):
        if not isinstance(sides := args.get("sides", 6), int):
            raise InvalidInput("args.sides", f"is {sides!r}, must be a whole number")
        if task["question"] != "?":
            raise KeyError("a row of another game")
        return Observation("What does it show?")

    async def step(self, action):
        return Observation("", 0.0, True)


def far(item, args):
    return float(len(item.response) < args["limit"])
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with an installed package that offers an environment."""
    about = tmp_path / "site/die_games-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: die-games\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[trinity.environments]\ndie = die_games:Die\n")
    (about.parent / "die_games.py").write_text(GAME)
    return about.parent


@contextmanager
def provider(site: Path, code: str) -> Iterator[None]:
    """A process with the package, which runs `code`."""
    command = [sys.executable, "-c", f"from die_games import Die, far\nfrom trinity import sdk\n{code}"]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}"})
    try:
        yield
    finally:
        process.kill()
        process.wait(20)


def until_offered(address: str, identity: Identity | None) -> None:
    with rpc.blocking_channel(address, identity=identity) as channel:
        stub, deadline = environment_pb2_grpc.EnvironmentServiceStub(channel), time.monotonic() + 60
        while time.monotonic() < deadline:
            found = stub.Describe(environment_pb2.DescribeRequest(), timeout=60, wait_for_ready=True)
            if "die" in [one.name for one in found.environments]:
                return
            time.sleep(0.05)
    raise AssertionError("no provider offers it")


def limited(item: Any, args: dict[str, Any]) -> float:
    return float(len(item.response) < args["limit"])


LIMITED = f"{__file__}:{limited.__code__.co_firstlineno + 1}"


def unpacking(item: Any, args: dict[str, Any]) -> dict[str, float]:
    options = {"limit": 3, **args}
    return {"short": float(len(item.response) < options["limit"])}


def picky(item: Any, args: dict[str, Any]) -> float:
    if args.get("limit", 3) < 0:
        raise InvalidInput("args.limit", "is below 0")
    return float("nan") if item.response else 0.0


@pytest.mark.parametrize(
    ("function", "args", "code", "said"),
    [
        (limited, {"limit": 3}, 0, ""),
        (limited, {"limt": 3}, 2, f"type: mine could not score a reply to row 0: {LIMITED}: KeyError: 'limit'"),
        (limited, {"limit": 3, "other": 1}, 0, "reward_fn_args.other: mine does not read it"),
        (unpacking, {"limit": 3, "other": 1}, 0, ""),
        (picky, {"limit": -1}, 2, f"{TASKSET}.reward_fn_args.limit: is below 0"),
        (picky, {}, 2, "mine could not score a reply to row 0: ValueError: the scorer gave nan; rewards are finite"),
    ],
)
def test_a_reward_function_of_a_plugin_scores_two_replies(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: Callable[..., Any],
    args: dict[str, Any],
    code: int,
    said: str,
) -> None:
    monkeypatch.setitem(plugins.REWARD_FUNCTIONS, "mine", function)
    found, text = check(tmp_path, ROW, default_reward_fn_type="mine", reward_fn_args=args)
    assert (found, said in text) == (code, True), text
    assert said or "mine" not in text.replace("'mine'", ""), text


def test_a_reward_function_of_verl_is_called_by_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is that of docs/plugins.md."""
    seen = []

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return {"score": float(solution_str == ground_truth), "pred": solution_str}

    page = (Path(__file__).parents[3] / "docs/plugins.md").read_text()
    (line,) = [line for line in page.splitlines() if "return compute_score(" in line]
    found: dict[str, Any] = {"compute_score": compute_score, "__name__": __name__}
    exec(f"def mine(item, args):\n{line}", found)
    monkeypatch.setitem(plugins.REWARD_FUNCTIONS, "mine", found["mine"])
    row = {**ROW, "data_source": "sums", "extra_info": {"split": "train"}}
    code, text = check(tmp_path, row, default_reward_fn_type="mine")
    assert code == 0 and "mine" not in text.replace("'mine'", ""), text
    assert seen[:2] == [("sums", reply, "2", {"split": "train"}) for reply in ("", "2")]


def test_a_reward_function_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setitem(plugins.REWARD_FUNCTIONS, "mine", lambda *_: released.wait(60))
    monkeypatch.setattr(tasksets, "_MOST_SECONDS", 0.1)
    code, text = check(tmp_path, ROW, default_reward_fn_type="mine")
    released.set()
    assert (code, "mine scored no reply within 0.1 s" in text) == (0, True), text


@pytest.mark.parametrize(
    ("question", "args", "code", "said"),
    [
        ("?", {"sides": 8}, 0, ""),
        ("?", {"sides": "8"}, 2, f"{TASKSET}.workflow_args.environment_args.sides: is '8', must be a whole number"),
        ("6 x 7", {}, 2, "no episode of 'die' could begin: KeyError: 'a row of another game'"),
    ],
)
def test_an_environment_of_an_installed_package_begins_an_episode(
    tmp_path: Path,
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    question: str,
    args: dict[str, Any],
    code: int,
    said: str,
) -> None:
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "die_games", raising=False)
    found, text = check(tmp_path, {**ROW, "question": question}, **play("die", **args))
    assert (found, said in text) == (code, True), text
    assert said or "episode" not in text, text


def misread(task: dict[str, Any]) -> None:
    """Lacks `args`."""


def unread(task: dict[str, Any], args: dict[str, Any]) -> None:
    raise InvalidInput("task.answer", "is '2', must be a word")


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (misread, f"{TASKSET}: 'die' cannot read row 1: TypeError: misread() takes 1 positional argument"),
        (unread, f"{TASKSET}: row 1, as die reads it: task.answer: is '2', must be a word"),
    ],
)
def test_an_environment_reads_every_row(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[..., None], said: str
) -> None:
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "die_games", raising=False)
    die = importlib.import_module("die_games").Die
    monkeypatch.setattr(die, "read_row", staticmethod(read))
    code, text = check(tmp_path, ROW, **play("die"))
    assert (code, said in text) == (2, True), text


@pytest.mark.parametrize(
    ("name", "taskset", "code", "said"),
    [
        ("die", play("die", sides=8), 0, ""),
        ("die", play("die", sides="8"), 2, f"{TASKSET}.workflow_args.environment_args.sides: is '8', must be a whole"),
        ("dice", play("dice"), 2, "explorer.environments.0.name: is 'dice', which the provider at"),
        ("far", {"default_reward_fn_type": "far", "reward_fn_args": {"limit": 3}}, 0, ""),
        ("far", {"default_reward_fn_type": "far"}, 2, "default_reward_fn_type: far at 127.0.0.1:"),
    ],
)
def test_the_provider_at_an_address_begins_an_episode(
    tmp_path: Path, site: Path, name: str, taskset: dict[str, Any], code: int, said: str
) -> None:
    address = f"127.0.0.1:{free_port()}"
    with provider(site, f"sdk.serve(Die, address={address!r}, scorers={{'far': far}})"):
        until_offered(address, None)
        found, text = check(tmp_path, ROW, f"explorer.environments=[{{name: {name}, address: '{address}'}}]", **taskset)
    assert (found, said in text) == (code, True), text
    assert said or "refused" not in text, text


def test_a_provider_that_is_away_is_said_once(tmp_path: Path) -> None:
    provided = f"explorer.environments=[{{name: die, address: '127.0.0.1:{free_port()}'}}]"
    code, text = check(tmp_path, ROW, provided, **play("die"))
    assert (code, text.count("does not answer"), text.count("refused by")) == (0, 1, 0), text


ATTACHED = "explorer.environments=[{name: die, address: attached}]"


def test_without_a_live_run_nothing_is_asked_of_who_will_attach(tmp_path: Path) -> None:
    code, text = check(tmp_path, ROW, ATTACHED, **play("die", sides="8"))
    assert (code, "die attaches to a live run" in text) == (0, True), text


def test_in_a_live_run_who_attached_begins_an_episode(tmp_path: Path, site: Path) -> None:
    job = tmp_path / "tests/job"
    make_tokens(job / "identity")
    service = ServiceProcess("environment", tmp_path, IDENTITY_FOLDER=str(job / "identity"), ATTACH_TOKEN="secret")
    service.start()
    process = {"name": "environment", "service": "environment", "pid": service.pid, "address": service.address}
    record = {"pid": os.getpid(), "mode": "both", "run": "r", "stage": "", "nats_url": "", "processes": [process]}
    (job / "run").mkdir()
    (job / "run/main.json").write_text(json.dumps(record))
    try:
        with provider(site, f"sdk.attach(Die, address={service.address!r}, token='secret')"):
            until_offered(service.address, Identity(Role.EXPLORER, job / "identity"))
            good = check(tmp_path, ROW, ATTACHED, **play("die", sides=8))
            bad = check(tmp_path, ROW, ATTACHED, **play("die", sides="8"))
        away = check(tmp_path, ROW, ATTACHED, **play("die", sides="8"))
    finally:
        service.kill()
    assert (good[0], "refused" in good[1]) == (0, False), good[1]
    assert (bad[0], "environment_args.sides: is '8', must be a whole number" in bad[1]) == (2, True), bad[1]
    assert (away[0], "die was refused by its provider" in away[1]) == (0, True), away[1]
