"""The rules of every environment workflow, on the built-in environments themselves, with a policy that knows how."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support.fakes.environments.in_process import InProcess
from support.fakes.explorers.toolbox import Toolbox, make_episode_task
from trinity.config.workflows import EPISODE_WORKFLOWS, R3L_WORKFLOWS
from trinity.data.experience import Group, TaskKind
from trinity.environments import ENVIRONMENTS
from trinity.explorer.rollout import attempt
from trinity.explorer.workflows.player import seed_of
from trinity.sdk.contract import Score

pytestmark = pytest.mark.core

ROWS: dict[str, dict[str, Any]] = {
    "alfworld": {"seed": 1},
    "webshop": {"session_id": 0},
    "scienceworld": {"task_name": "find-non-living-thing", "var_num": 0},
    "math": {"question": "What is 2 and 3?", "answer": "5"},
    "countdown": {"nums": [1, 2, 3], "target": 6},
    "sokoban": {"seed": 3, "size": 6, "boxes": 1},
    "sudoku": {"seed": 3, "empty": 12},
    "gym_card": {"game": "number_line", "seed": 3},
    "frozen_lake": {"size": 4, "p": 0.8, "seed": 3},
}
NAMED = {name: rules.environment for name, rules in {**EPISODE_WORKFLOWS, **R3L_WORKFLOWS}.items() if rules.environment}


# Engines that take seconds to start play by the strictest rules alone; the package that each needs.
HEAVY = {"alfworld": "textworld", "scienceworld": "scienceworld"}
PLAYED = sorted(name for name, kind in NAMED.items() if kind not in HEAVY or name.startswith("R3L_"))


@pytest.mark.parametrize("workflow", PLAYED)
async def test_an_oracle_wins_and_its_replies_are_what_is_trained(workflow: str) -> None:
    name = NAMED[workflow]
    if name in HEAVY:
        pytest.importorskip(HEAVY[name])
    kind = ENVIRONMENTS[name]
    task = make_episode_task(
        "{}",
        1,
        workflow=workflow,
        row_json=json.dumps(ROWS[name]),
        max_tokens=600,
        kind=TaskKind.EVALUATION,
    )
    rules = {**EPISODE_WORKFLOWS, **R3L_WORKFLOWS}[workflow]
    replies = iter(kind.oracle(ROWS[name], rules.environment_args, seed_of(task)))  # type: ignore[attr-defined]

    def make(task: dict[str, Any], args: dict[str, Any], seed: int) -> InProcess:
        return InProcess(name, task, args, seed)

    tools = Toolbox(lambda _: next(replies), {name: make}, max_model_tokens=200_000)
    group = await attempt.explore(task, 1, "me", tools)
    assert isinstance(group, Group), group
    (experience,) = group.experiences
    assert experience.metrics["success"] == 1, experience.response_text[-800:]
    assert experience.reward >= 0.9
    assert experience.metrics["invalid_format"] == experience.metrics["invalid_action"] == 0


MCP_SERVER = '''
try:
    from mcp.server import MCPServer as Server
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server
server = Server("sums")

@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b

server.run("stdio")
'''


async def test_tools_of_an_mcp_server_are_called_and_their_schemas_reach_the_chat_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(MCP_SERVER)
    servers = {"sums": {"command": sys.executable, "args": [str(tmp_path / "server.py")]}}
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": servers}))
    monkeypatch.setenv("MCP_SERVERS_FILE", str(tmp_path / "servers.json"))

    def policy(seen: list[tuple[str, str]]) -> str:
        results = [text for role, text in seen if role == "tool"]
        call = {"name": "add" if not results else "sub", "arguments": {"a": 19, "b": 23}}
        return f"It is {results[0]}." if len(results) == 2 else f"<tool_call>{json.dumps(call)}</tool_call>"

    tools = Toolbox(
        policy,
        {"mcp": lambda *given: InProcess("mcp", *given)},
        scored=lambda _, answer: Score(float(answer.truth in answer.response), {}),
    )
    task = make_episode_task(
        json.dumps({"environment": "mcp", "environment_args": {"server": "sums"}}),
        1,
        workflow="tool_call_workflow",
        row_json=json.dumps({"question": "What is 19 + 23?", "answer": "42"}),
        format={"prompt_key": "question", "response_key": "answer"},
        max_tokens=200,
    )
    group = await attempt.explore(task, 1, "me", tools)
    assert isinstance(group, Group), group
    (experience,) = group.experiences
    assert experience.reward == 1
    assert (experience.metrics["tool_calls"], experience.metrics["tool_errors"]) == (2, 1), "there is no `sub`"
    assert tools.schemas[0][0]["function"]["name"] == "add"
    assert set(tools.schemas[0][0]["function"]["parameters"]["properties"]) == {"a", "b"}
