"""Every service, rpc, message, enum, value and field of the contracts has a comment."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

PROTOS = sorted((Path(__file__).parents[2] / "proto").rglob("*.proto"))
_NAMED = re.compile(r"^\s*(service|rpc|message|enum)\s+\w+")
_FIELD = re.compile(r"^\s*(repeated |optional )?[\w.<>, ]+ \w+ = \d+;")
_VALUE = re.compile(r"^\s*[A-Z][A-Z0-9_]+ = \d+;")


def _is_declaration(line: str) -> bool:
    return any(kind.match(line) for kind in (_NAMED, _FIELD, _VALUE)) and "_UNSPECIFIED" not in line


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.stem)
def test_every_declaration_has_a_comment(path: Path) -> None:
    lines = path.read_text().splitlines()
    bare = [
        f"{path.name}:{number}: {line.strip()}"
        for number, (above, line) in enumerate(zip(["", *lines], lines, strict=False), start=1)
        if _is_declaration(line) and "//" not in line and not above.strip().startswith("//")
    ]
    assert not bare, "\n".join(bare)


@pytest.mark.parametrize(
    "line",
    [
        "  int32 stored = 1;",
        "  repeated trinity.api.common.v1.Task tasks = 2;",
        "  map<int64, int32> failures = 10;",
        "message Waiting {",
        "  TRUNCATION_NONE = 1;",
        "  rpc Stats(StatsRequest) returns (StatsResponse);",
    ],
)
def test_the_check_knows_a_declaration(line: str) -> None:
    assert _is_declaration(line)
