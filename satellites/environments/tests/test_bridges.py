"""Environments of other libraries and protocols: Gymnasium, reasoning-gym, OpenEnv, MCP tools."""

import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.fakes.environments.playing import play
from trinity.environments import ENVIRONMENTS
from trinity.environments.arguments import Arguments
from trinity.environments.bridges import mcp
from trinity.environments.bridges.gymnasium import Gymnasium, without_colours
from trinity.environments.bridges.mcp import McpTools
from trinity.environments.bridges.openenv import OpenEnv
from trinity.environments.bridges.reasoning_gym import ReasoningGym
from trinity.environments.bridges.verifiers_v1 import Tasks
from trinity.environments.extras import require
from trinity.environments.game import ToolGame, Turn, TurnRules
from trinity.environments.replies import write
from trinity.runtime.errors import Conflict, Full, InvalidInput, TimedOut, Unavailable
from trinity.sdk import Description

pytestmark = pytest.mark.core


def needs(module: str, extra: str) -> pytest.MarkDecorator:
    reason = f"{module} is not installed: pip install -e '.[{extra}]'"
    return pytest.mark.skipif(find_spec(module) is None, reason=reason)


LAKE = {"id": "FrozenLake-v1", "make_args": {"is_slippery": False, "desc": ["SF", "HG"]}}
NAMES = {"action_names": ["Left", "Down", "Right", "Up"]}


@needs("gymnasium", "gym")
class TestGymnasium:
    def test_a_numbered_action_has_a_name(self) -> None:
        played = play(Gymnasium(), [write("Right"), write("Jump"), write("Down")], LAKE, NAMES)
        assert "[S]F\nHG" in played.observations[0].text
        assert "'Jump' is not among" in played.observations[2].text
        assert "H[G]" in played.last.text
        assert (played.reward, played.won) == (1, True)

    def test_without_names_the_numbers_are_the_names(self) -> None:
        assert play(Gymnasium(), [write("2"), write("1")], LAKE).won

    def test_taxi_shows_taxi_passenger_and_goal(self) -> None:
        import gymnasium

        text = play(Gymnasium(), [], {"id": "Taxi-v4", "seed": 1}).last.text
        game: Any = gymnasium.make("Taxi-v4").unwrapped
        game.reset(seed=1)
        row, column, passenger, goal = game.decode(game.s)
        letter = "RGYB"
        lines = text.splitlines()
        board = lines.index("+---------+") + 1
        plain = [re.sub(r"[\[\]()<>]", "", line) for line in lines[board : board + 5]]
        assert [len(line) for line in plain] == [11] * 5
        assert f"({letter[passenger]})" in text
        assert f"<{letter[goal]}>" in text
        cell = plain[row][2 * column + 1]
        assert f"[{cell}]" in lines[board + row]
        assert "Marks: (x) the passenger, <x> the goal, [x] the taxi, empty." in text

    @pytest.mark.parametrize(
        ("rendered", "shown"),
        [
            ("a\x1b[41mS\x1b[0mb", "a[S]b"),
            (
                "\x1b[34;1m\x1b[43mR\x1b[0m\x1b[0m \x1b[35mG\x1b[0m",
                "([R]) <G>\nMarks: (x) blue, <x> magenta, [x] yellow",
            ),
            ("\x1b[31m\x1b[1mX\x1b[0m.", "{X}."),
            ("\x1b[2J\x1b[1;1Hx\x1b[m", "x"),
            ("\x1b[mx\x1b[0m", "x"),
        ],
    )
    def test_colours_become_marks(self, rendered: str, shown: str) -> None:
        assert without_colours(rendered).startswith(shown)
        assert "\x1b" not in without_colours(rendered)

    def test_an_episode_that_ends_without_the_reward_is_no_success(self) -> None:
        played = play(Gymnasium(), [write("1")], LAKE)
        assert (played.last.done, played.won) == (True, False)

    def test_other_observations_are_shown_as_they_are_and_the_seed_counts(self) -> None:
        task = {"id": "Blackjack-v1"}
        first, same, other = (play(Gymnasium(), [], task, seed=seed).last.text for seed in (1, 1, 2))
        assert first == same != other

    @pytest.mark.parametrize(
        ("task", "args", "field"),
        [
            ({}, {}, "args.id"),
            ({"id": "Nope-v1"}, {}, "args.id"),
            ({"id": "Pendulum-v1"}, {}, "args.id"),
            ({"id": "FrozenLake-v1", "make_args": {"x": 1}}, {}, "args.id"),
            (LAKE, {"action_names": ["a", "b"]}, "args.action_names"),
            (LAKE, {"action_names": ["a", "a", "b", "c"]}, "args.action_names"),
        ],
    )
    def test_what_cannot_be_made_is_refused(self, task: dict[str, Any], args: dict[str, Any], field: str) -> None:
        with pytest.raises(InvalidInput) as refused:
            play(Gymnasium(), [], task, args)
        assert refused.value.field == field


@needs("reasoning_gym", "reasoning-gym")
class TestReasoningGym:
    @pytest.mark.parametrize("name", ["basic_arithmetic", "gsm_symbolic", "chain_sum", "tower_of_hanoi", "gcd"])
    def test_the_oracle_answers(self, name: str) -> None:
        task = {"dataset": name, "seed": 3, "index": 2}
        assert play(ReasoningGym(), ReasoningGym.oracle(task, {}, 0), task).won

    def test_a_partial_score_is_a_reward_only_when_asked_for(self) -> None:
        task, args = {"dataset": "countdown", "seed": 1}, {"partial_credit": True}
        wrong = [write("1 + 1", "answer")]
        assert play(ReasoningGym(), wrong, task).reward == 0
        played = play(ReasoningGym(), wrong, task, args)
        assert 0 < played.reward < 0.99
        assert played.last.metrics["score"] == played.reward
        assert not played.won
        again = play(ReasoningGym(), wrong * 3, task, {**args, "max_attempts": 4})
        assert [one.reward for one in again.observations] == [0, played.reward, 0, 0]
        right = ReasoningGym.oracle(task, {}, 0)
        assert play(ReasoningGym(), wrong + right, task, {**args, "max_attempts": 2}).reward == pytest.approx(1)

    @pytest.mark.parametrize(
        ("task", "said"),
        [
            ({"dataset": "nope"}, "task.dataset"),
            ({"dataset": "gcd", "config": {"nope": 1}}, "task.config"),
            ({"dataset": "gcd", "index": -1}, "task.index"),
            ({}, "args.dataset"),
        ],
    )
    def test_a_bad_row_is_refused(self, task: dict[str, Any], said: str) -> None:
        with pytest.raises(InvalidInput, match=said.replace(".", r"\.")):
            ReasoningGym().reset(task, {}, 0)

    @pytest.mark.parametrize("name", ["string_insertion", "spiral_matrix", "binary_matrix", "countdown", "puzzle24"])
    @pytest.mark.parametrize("answer", ["9**9**9", "(9**9)**9**9", "999999999!", "[open('{path}', 'w')]", "'x'*10**12"])
    def test_an_answer_is_never_run_as_a_program(self, name: str, answer: str, tmp_path: Path) -> None:
        path = tmp_path / "written"
        begin = time.monotonic()
        played = play(ReasoningGym(), [f"<answer>{answer.format(path=path)}</answer>"], {"dataset": name, "seed": 1})
        assert (played.last.done, played.reward) == (True, 0)
        assert time.monotonic() - begin < 5
        assert not path.exists()

    @pytest.mark.parametrize(
        "name",
        ["simple_integration", "number_sorting", "polynomial_multiplication", "simple_equations", "puzzle24"],
    )
    def test_the_answers_of_formulas_are_harmless(self, name: str) -> None:
        for index in range(8):
            task = {"dataset": name, "seed": 5, "index": index}
            assert play(ReasoningGym(), ReasoningGym.oracle(task, {}, 0), task).won


@needs("websockets", "openenv")
class TestOpenEnv:
    @pytest.fixture
    def server(self) -> Iterator[tuple[str, Any]]:
        from support.servers.openenv_server import openenv_server

        with openenv_server() as running:
            yield running

    def test_an_episode_is_a_session(self, server: tuple[str, Any]) -> None:
        url, game = server
        args = {"url": url, "observation_field": "text"}
        played = play(OpenEnv(), [write("1"), write("3")], {"seed": 3}, args)
        assert [o.info["observation"] for o in played.observations] == ["Guess a digit.", "no", "yes"]
        assert (played.reward, played.won) == (1, True)
        deadline = time.monotonic() + 5
        while game.open and time.monotonic() < deadline:
            time.sleep(0.02)
        assert (game.open, game.closed) == (0, 1)

    def test_a_json_object_is_sent_as_it_is(self, server: tuple[str, Any]) -> None:
        args = {"url": server[0].replace("http", "ws") + "/ws"}
        assert play(OpenEnv(), [write('{"guess": "3"}')], {"seed": 3}, args).won

    def test_a_full_server_raises_full(self, server: tuple[str, Any]) -> None:
        url, game = server
        game.places = 0
        with pytest.raises(Full):
            play(OpenEnv(), [], {}, {"url": url})

    @pytest.mark.parametrize(
        ("code", "error"),
        [("CAPACITY_REACHED", Full), ("FACTORY_ERROR", Unavailable), ("SESSION_ERROR", Unavailable)],
    )
    def test_a_server_without_an_environment_is_not_the_rows_fault(
        self, server: tuple[str, Any], code: str, error: type[Exception]
    ) -> None:
        url, game = server
        game.says["reset"] = json.dumps({"type": "error", "data": {"message": "no", "code": code}})
        with pytest.raises(error, match="openenv"):
            play(OpenEnv(), [], {}, {"url": url})

    @pytest.mark.parametrize(("reward", "number"), [("true", 1), ("false", 0), ("null", 0)])
    def test_a_reward_may_be_true_or_missing(self, server: tuple[str, Any], reward: str, number: float) -> None:
        url, game = server
        game.says["step"] = (
            f'{{"type": "observation", "data": {{"observation": {{}}, "reward": {reward}, "done": true}}}}'
        )
        assert play(OpenEnv(), [write("1")], {}, {"url": url}).reward == number

    @pytest.mark.parametrize(
        ("says", "error"),
        [
            ("nonsense", InvalidInput),
            ('{"type": "observation", "data": {"observation": {}, "reward": "1", "done": false}}', InvalidInput),
            ('{"type": "observation", "data": {"observation": {}, "reward": 1}}', InvalidInput),
            ("x" * 5_000_000, Unavailable),
            (None, TimedOut),
        ],
    )
    def test_a_server_that_answers_nonsense_is_named(
        self, server: tuple[str, Any], says: str | None, error: type[Exception]
    ) -> None:
        url, game = server
        game.says["step"] = says
        with pytest.raises(error, match="openenv"):
            play(OpenEnv(), [write("1")], {}, {"url": url, "timeout_seconds": 0.5})

    def test_an_error_of_a_step_is_a_refused_action_under_the_rules_of_the_yaml(self, server: tuple[str, Any]) -> None:
        url, game = server
        game.says["step"] = '{"type": "error", "data": {"message": "no such move"}}'
        args: dict[str, Any] = {"url": url, "on_invalid_action": "penalty", "penalty": 0.25}
        played = play(OpenEnv(), [write("1"), write("2")], {"seed": 3}, args)
        assert "no such move" in played.last.text
        assert "no such move" in played.last.info["problem"]
        assert (played.last.done, played.reward, played.last.metrics["invalid_action"]) == (False, -0.5, 2)
        ended = play(OpenEnv(), [write("1")], {"seed": 3}, {**args, "on_invalid_action": "end", "end_penalty": 1})
        assert (ended.last.done, ended.reward) == (True, -1)

    def test_an_error_of_a_reset_is_the_rows_fault(self, server: tuple[str, Any]) -> None:
        url, game = server
        game.says["reset"] = '{"type": "error", "data": {"message": "no such level"}}'
        with pytest.raises(InvalidInput, match="no such level"):
            play(OpenEnv(), [], {"reset": {"level": 99}}, {"url": url})

    @given(st.one_of(st.text(max_size=300), st.recursive(st.text() | st.floats(), st.lists).map(json.dumps)))
    @example('{"a": ' * 100_000)
    @example("[" * 10_000_000)
    @example('{"guess": ' + "7" * 10_000_000 + "}")
    @settings(deadline=None)
    def test_any_reply_becomes_the_fields_of_an_action(self, reply: str) -> None:
        game = OpenEnv()
        game._action_field = "guess"
        begin = time.process_time()
        fields = game._fields(reply)
        assert time.process_time() - begin < 5
        assert fields == {"guess": reply} or fields == json.loads(reply)

    def test_what_is_missing_is_named(self, server: tuple[str, Any]) -> None:
        url, game = server
        game.required = ["a", "b"]
        with pytest.raises(InvalidInput, match=r"args\.action_field"):
            play(OpenEnv(), [], {}, {"url": url})
        assert play(OpenEnv(), [write("3")], {"seed": 3}, {"url": url, "action_field": "guess"}).won
        with pytest.raises(Unavailable, match="does not answer"):
            play(OpenEnv(), [], {}, {"url": "http://127.0.0.1:9"})
        with pytest.raises(InvalidInput, match=r"args\.url"):
            play(OpenEnv(), [], {}, {"url": "file:///etc/passwd"})


MCP_SERVER = '''
import os, sys, time
try:
    from mcp.server import MCPServer as Server
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server
server = Server("sums")

@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b

@server.tool()
def fail() -> str:
    """Fails."""
    raise RuntimeError("no")

@server.tool()
def hang() -> str:
    """Takes its time."""
    time.sleep(30)

@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)

server.run("stdio")
'''
MARKS = ("<answer>", "</answer>", "<tool_call>", "</tool_call>", "<think>", "</think>")
SUM = {"question": "What is 19 + 23?", "answer": "42"}


def call(name: str, **arguments: Any) -> str:
    return f"<think>hm</think><tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Look(ToolGame):
    description = Description("look")
    tools: ClassVar[list[dict[str, Any]]] = [{"name": "look"}]

    def begin(self, task: Arguments, args: Arguments, seed: int) -> str:
        return ""

    def play(self, action: str) -> Turn:
        return Turn("")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"name": "look", "arguments": {"at": "\\ud83d\\ude00"}}', ""),
        ('{"name": "look", "arguments": {"at": "\\ud83d"}}', "the <tool_call> has half of a surrogate pair"),
        ('{"name": "look", "arguments": []}', ""),
        ("[]", "the <tool_call> is no JSON object with a name"),
    ],
)
def test_calls_of_tools_that_no_server_could_read_are_refused(text: str, problem: str) -> None:
    found = Look().parse_call(text)[2]
    assert found.startswith(problem)
    assert bool(found) == bool(problem)


@needs("mcp", "mcp")
class TestMcp:
    @pytest.fixture(autouse=True)
    def _servers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "server.py").write_text(MCP_SERVER)
        servers = {
            "sums": {"command": sys.executable, "args": [str(tmp_path / "server.py")]},
            "broken": {"command": sys.executable, "args": ["-c", "1 / 0"]},
            "silent": {"command": sys.executable, "args": ["-c", "import time; time.sleep(600)  # silent"]},
        }
        (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": servers}))
        monkeypatch.setenv("MCP_SERVERS_FILE", str(tmp_path / "servers.json"))

    def test_tools_are_called_and_the_answer_is_judged(self) -> None:
        replies = [call("add", a=19, b=23), "<answer>42</answer>"]
        played = play(McpTools(), replies, SUM, {"server": "sums"})
        assert '"name": "add"' in played.observations[0].text
        assert "<tool_response>\n42\n</tool_response>" in played.observations[1].text
        assert (played.reward, played.won) == (1, True)
        assert played.last.metrics["tool_calls"] == 1
        assert not [child for child in psutil.Process().children() if "server.py" in " ".join(child.cmdline())]

    def test_the_answer_of_a_row_may_be_a_number(self) -> None:
        assert play(McpTools(), ["<answer>42</answer>"], {**SUM, "answer": 42}, {"server": "sums"}).won
        with pytest.raises(InvalidInput, match=r"task\.answer: is None, must be a text or a number"):
            play(McpTools(), [], {"question": "What?"}, {"server": "sums"})

    def test_what_goes_wrong_is_told_to_the_policy(self) -> None:
        replies = [call("fail"), call("nope"), "<tool_call>{</tool_call>", call("add", a="x"), "hm"]
        played = play(McpTools(), replies, SUM, {"server": "sums"})
        fail, nope, brace, wrong, nothing = played.observations[1:]
        assert "rror" in fail.text
        assert "there is no tool 'nope'; known: add" in nope.text
        assert "no JSON object" in brace.text
        assert "<tool_response>" in wrong.text
        assert "neither a <tool_call>" in nothing.text
        assert (played.last.metrics["tool_errors"], played.last.metrics["invalid_action"]) == (2, 2)
        assert not played.last.done

    def test_a_slow_tool_and_a_dying_server_end_the_episode(self) -> None:
        with pytest.raises(TimedOut, match="hang"):
            play(McpTools(), [call("hang")], SUM, {"server": "sums", "timeout_seconds": 0.5})
        with pytest.raises((Unavailable, TimedOut), match="mcp"):
            play(McpTools(), [call("die"), call("add", a=1, b=2)], SUM, {"server": "sums", "timeout_seconds": 5})

    def test_a_server_that_starts_and_is_silent_leaves_nothing_behind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mcp, "START_SECONDS", 1.0)
        before = {thread.ident for thread in threading.enumerate()}
        with pytest.raises(Unavailable, match="does not start: no answer in 1 s"):
            play(McpTools(), [], SUM, {"server": "silent"})
        assert not [child for child in psutil.Process().children() if "# silent" in " ".join(child.cmdline())]
        assert not [thread for thread in threading.enumerate() if thread.ident not in before and thread.name == "mcp"]

    def test_only_the_librarys_own_word_means_that_the_server_is_gone(self) -> None:
        def error(code: int, message: str) -> Exception:
            made = RuntimeError(message)
            made.error = SimpleNamespace(code=code, message=message)  # type: ignore[attr-defined]
            return made

        assert mcp._is_connection_lost(error(-32000, "Connection closed"))
        assert not mcp._is_connection_lost(error(-32603, "Connection closed"))
        assert not mcp._is_connection_lost(error(-32000, "the account is closed"))
        assert not mcp._is_connection_lost(ValueError("the shop is closed"))

    @given(st.text() | st.lists(st.sampled_from([*MARKS, "x", "\x00", "{}", "\n"])).map("".join))
    @example("<answer>" * 1_250_000)
    @example("<tool_call>" + "{" * 10_000_000 + "</tool_call>")
    @settings(deadline=None)
    def test_any_reply_is_a_call_an_answer_or_neither(self, reply: str) -> None:
        game = McpTools()
        game.rules = TurnRules()
        begin = time.process_time()
        found = game.read(reply)
        assert time.process_time() - begin < 5
        kind, _, text = found.action.partition(" ")
        assert bool(found.problem) != (kind in ("answer", "tool_call") and text in reply and bool(text))

    def test_a_server_must_be_known_to_the_service_and_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(InvalidInput, match="one of broken, silent, sums"):
            play(McpTools(), [], SUM, {"server": "rm"})
        with pytest.raises(Unavailable, match="does not start"):
            play(McpTools(), [], SUM, {"server": "broken"})
        monkeypatch.setenv("MCP_SERVERS_FILE", "/nowhere.json")
        with pytest.raises(Conflict, match="nowhere"):
            play(McpTools(), [], SUM, {"server": "sums"})
        monkeypatch.delenv("MCP_SERVERS_FILE")
        with pytest.raises(Conflict, match="set MCP_SERVERS_FILE"):
            play(McpTools(), [], SUM, {"server": "sums"})


@pytest.mark.parametrize(
    ("name", "module", "extra", "task", "args"),
    [
        ("gymnasium", "gymnasium", "gym", LAKE, {}),
        ("reasoning_gym", "reasoning_gym", "reasoning-gym", {"dataset": "gcd"}, {}),
        ("verifiers", "verifiers", "verifiers", {"index": 0}, {"env_id": "x"}),
        ("openenv", "websockets.sync.client", "openenv", {}, {"url": "http://127.0.0.1:9"}),
        ("alfworld", "alfworld", "alfworld", {}, {}),
        ("scienceworld", "scienceworld.constants", "scienceworld", {"task_name": "boil"}, {}),
    ],
)
def test_what_is_not_installed_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str, extra: str, task: dict[str, Any], args: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    if name == "scienceworld":
        from trinity.environments.scienceworld import simulator

        monkeypatch.setattr(simulator, "_idle", [])
    with pytest.raises(Conflict) as refused:
        play(ENVIRONMENTS[name](), [], task, args)  # type: ignore[arg-type]
    assert f".[{extra}]" in str(refused.value)


def test_the_module_is_given_when_it_is_there() -> None:
    assert require("json", "none") is json


def test_a_taskset_that_raised_is_read_anew() -> None:
    """It may load data that are not there for a moment."""
    missing = [OSError("no data")]

    class Words:
        def __iter__(self) -> Iterator[str]:
            yield "first"
            if missing:
                raise missing.pop()
            yield "second"

    tasks = Tasks(Words())
    with pytest.raises(OSError, match="no data"):
        tasks[1]
    assert [tasks[1], tasks[0], tasks[2]] == ["second", "first", None]
    assert len(tasks) == 2
