"""Files that a crash may have cut off."""

from pathlib import Path

import pytest

from trinity.runtime import files

pytestmark = pytest.mark.core


def test_json_lines_are_the_objects_that_are_whole() -> None:
    deep = b"[" * 100_000
    lines = [b'{"step": 1}', b'{"step": 2, "na', b"5", b"[1]", b'{"name": "\xc3', deep, b"", b'{"step": 3}']
    assert list(files.json_lines(lines)) == [{"step": 1}, {"step": 3}]
    assert list(files.json_lines(['{"step": 1}', "null"])) == [{"step": 1}]


def test_an_integer_that_no_float_can_hold_is_damage(tmp_path: Path) -> None:
    lines = [f'{{"step": {10**400}}}'.encode(), f'{{"step": {2**127}}}'.encode()]
    assert list(files.json_lines(lines)) == [{"step": 2**127}]
    for line, found in zip(lines, (None, {"step": 2**127}), strict=True):
        (tmp_path / "one.json").write_bytes(line)
        assert files.read_json(tmp_path / "one.json") == found
