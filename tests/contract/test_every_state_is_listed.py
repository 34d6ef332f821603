"""Services report only states that their proto lists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from trinity.api.explorer.v1 import explorer_pb2
from trinity.weights.wire import ExplorerState

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[2]


def listed(service: str) -> set[str]:
    """Returns the quoted words of the comment above `string state` in StatusResponse."""
    text = (ROOT / f"proto/trinity/api/{service}/v1/{service}.proto").read_text()
    found = re.search(r"message StatusResponse \{.*?((?:  //[^\n]*\n)+)  string state = \d+;", text, re.DOTALL)
    assert found is not None
    return set(re.findall(r'"([^"]+)"', found[1]))


def constants(node: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def said_by_trainer() -> Iterator[str]:
    """Yields the values of every keyword `state`, and of the field's default."""
    for path in (ROOT / "services/trainer/src/trinity/trainer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield from (word for k in node.keywords if k.arg == "state" for word in constants(k.value))
            elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "state" and node.value is not None:
                yield from constants(node.value)


def test_the_proto_lists_what_the_trainer_says() -> None:
    words = set(said_by_trainer())
    assert len(words) > 4
    assert words == listed("trainer")


def test_python_has_every_state_of_an_explorer() -> None:
    named = {name.removeprefix("EXPLORER_STATE_"): number for name, number in explorer_pb2.ExplorerState.items()}
    assert named.pop("UNSPECIFIED") == ExplorerState.UNKNOWN
    assert {state.name: state.value for state in ExplorerState if state} == named
    assert ExplorerState(len(named) + 1) is ExplorerState.UNKNOWN, "an explorer of a newer release"
    assert ExplorerState.WAITING_FOR_LOG.text == "waiting for log"
