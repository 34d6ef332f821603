"""Files that a crash may have cut off."""

import pytest

from trinity.runtime import files

pytestmark = pytest.mark.core


def test_json_lines_are_the_objects_that_are_whole() -> None:
    deep = b"[" * 100_000
    lines = [b'{"step": 1}', b'{"step": 2, "na', b"5", b"[1]", b'{"name": "\xc3', deep, b"", b'{"step": 3}']
    assert list(files.json_lines(lines)) == [{"step": 1}, {"step": 3}]
    assert list(files.json_lines(['{"step": 1}', "null"])) == [{"step": 1}]
