"""Reading data: every form, and what is wrong by file and line."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from trinity.config.datasets import DatasetError, read

ROWS = [{"question": "1+1", "answer": "2"}, {"question": "zwei\u2028zeilen", "answer": "x"}]


def test_every_form_gives_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.json", "a.parquet"):
        assert list(read(str(tmp_path / name))) == ROWS, name


def test_a_folder_has_splits_and_subsets(tmp_path: Path) -> None:
    for place, text in (
        ("train.jsonl", "a"),
        ("test-00000.jsonl", "b"),
        ("main/train.jsonl", "c"),
        ("testing.jsonl", "d"),
    ):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(json.dumps({"x": text}) + "\n")
    assert list(read(str(tmp_path), "train")) == [{"x": "a"}]
    assert list(read(str(tmp_path), "test")) == [{"x": "b"}]
    assert list(read(str(tmp_path), "train", "main")) == [{"x": "c"}]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"a": 1}\n{"a": \n', "line 2"),
        ('{"a": 1}\n\n[1]\n', "line 3: must be a JSON object"),
        ("", "no rows"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text(content)
    with pytest.raises(DatasetError, match=said) as refused:
        read(str(file))
    assert str(file) in refused.value.message


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DatasetError, match="cannot be read"):
        read(str(tmp_path / "d.jsonl"))
    (tmp_path / "d.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DatasetError, match="cannot be read"):
        read(str(tmp_path / "d.parquet"))


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="does not exist"):
        read(str(tmp_path / "none.jsonl"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match=r"no train\.jsonl"):
        read(str(tmp_path / "empty"))
