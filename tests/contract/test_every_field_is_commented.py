"""Every service, rpc, message, enum, value and field of the contracts says what it means."""

import re
from pathlib import Path

import pytest

PROTOS = sorted((Path(__file__).parents[2] / "proto").rglob("*.proto"))
_DECLARATION = re.compile(
    r"^\s*(service|rpc|message|enum|oneof)\s+(\w+)|^\s*(?:repeated |optional )?[\w.<>, ]+ (\w+) = \d+;"
)
_VALUE = re.compile(r"^\s*([A-Z][A-Z0-9_]+) = \d+;")


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.stem)
def test_every_declaration_has_a_comment(path: Path) -> None:
    lines = path.read_text().splitlines()
    bare = []
    for number, line in enumerate(lines):
        match = _DECLARATION.match(line) or _VALUE.match(line)
        if match is None or "_UNSPECIFIED" in line:
            continue
        commented = "//" in line or (number > 0 and lines[number - 1].strip().startswith("//"))
        if not commented and match.group(0).split()[0] not in ("oneof",):
            bare.append(f"{path.name}:{number + 1}: {line.strip()}")
    assert not bare, "\n".join(bare)


def test_the_check_sees_a_bare_field() -> None:
    assert _DECLARATION.match("  int32 stored = 1;")
    assert _DECLARATION.match("  repeated trinity.api.common.v1.Task tasks = 2;")
    assert _DECLARATION.match("  map<int64, int32> failures = 10;")
    assert _DECLARATION.match("message Waiting {")
