"""The words that a service says of its state are those that its proto lists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[2]


def listed(service: str) -> set[str]:
    """Quoted words of the comment above `string state` in StatusResponse."""
    text = (ROOT / f"proto/trinity/api/{service}/v1/{service}.proto").read_text()
    found = re.search(r"message StatusResponse \{.*?((?:  //[^\n]*\n)+)  string state = \d+;", text, re.DOTALL)
    assert found is not None
    return set(re.findall(r'"([^"]+)"', found[1]))


def constants(node: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def said_by_trainer() -> Iterator[str]:
    """Values of every keyword `state`, and of the field's default."""
    for path in (ROOT / "services/trainer/src/trinity/trainer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield from (word for k in node.keywords if k.arg == "state" for word in constants(k.value))
            elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "state" and node.value is not None:
                yield from constants(node.value)


def said_by_explorer() -> Iterator[str]:
    """What ExplorerService.state returns."""
    tree = ast.parse((ROOT / "services/explorer/src/trinity/explorer/service.py").read_text())
    (function,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "state")
    returned = (n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None)
    for value in returned:
        branches = (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,)
        yield from (word for branch in branches for word in constants(branch))


@pytest.mark.parametrize(("service", "said"), [("trainer", said_by_trainer), ("explorer", said_by_explorer)])
def test_the_proto_lists_what_the_service_says(service: str, said) -> None:  # type: ignore[no-untyped-def]
    words = set(said())
    assert len(words) > 4
    assert words == listed(service)
