"""A folder of tasks in Harbor's form is a dataset."""

from pathlib import Path

import pytest

from trinity.data.datasets import read
from trinity.data.tables import DatasetError

pytestmark = pytest.mark.core


def task(folder: Path, **files: str) -> Path:
    """Names of files have __ for / here."""
    given = {"task.toml": "[verifier]\ntimeout_sec = 9.0\n", "instruction.md": "Do it.\n", "tests__test.sh": "true"}
    for name, text in {**given, **files}.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_row_has_the_whole_task(tmp_path: Path) -> None:
    one = task(tmp_path / "train/b", environment__a__x="1", solution__solve="2")
    (one / "tests/test.sh").chmod(0o755)
    (one / "environment/bytes").write_bytes(b"\xff\x00")
    task(tmp_path / "train/a")
    task(tmp_path / "test/c")
    first, second = read(str(tmp_path))
    assert (first["task"], second["task"], second["instruction"]) == ("a", "b", "Do it.")
    assert second["config"] == {"verifier": {"timeout_sec": 9.0}}
    assert second["environment"] == [
        {"path": "a/x", "executable": False, "text": "1"},
        {"path": "bytes", "executable": False, "base64": "/wA="},
    ]
    assert second["tests"] == [{"path": "test.sh", "executable": True, "text": "true"}]
    assert [row["task"] for row in read(str(tmp_path), "test")] == ["c"]
    assert [row["task"] for row in read(str(tmp_path / "train"))] == ["a", "b"]


def test_a_task_that_is_not_whole_is_named(tmp_path: Path) -> None:
    (task(tmp_path / "a") / "tests/test.sh").unlink()
    with pytest.raises(DatasetError, match=r"a: has no tests/test\.sh"):
        read(str(tmp_path))
    task(tmp_path / "a", **{"task.toml": "= 1"})
    with pytest.raises(DatasetError, match=r"task\.toml .* cannot be read"):
        read(str(tmp_path))
    task(tmp_path / "a")
    (tmp_path / "a/environment").mkdir()
    (tmp_path / "a/environment/link").symlink_to("/etc/passwd")
    with pytest.raises(DatasetError, match="is a symbolic link"):
        read(str(tmp_path))
    (tmp_path / "a/environment/link").unlink()
    (tmp_path / "a/environment/big").write_bytes(b"x" * (5 << 20))
    with pytest.raises(DatasetError, match="more than 4 MiB"):
        read(str(tmp_path))
