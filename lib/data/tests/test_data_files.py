"""Files as users bring them: every form, compression and encoding, folders of others, and files that hold no rows."""

import bz2
import gzip
import io
import json
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from trinity.config.schema.buffer import FormatConfig, SelectorConfig, TasksetConfig
from trinity.data.datasets import DatasetError, read, read_taskset

pytestmark = pytest.mark.core

ROWS: list[dict[str, Any]] = [{"q": 'a "b", ä', "n": 12}, {"q": "zwei\nZeilen 数", "n": -3}, {"q": "x", "n": 10**30}]
JSONL = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
CSV = '"q","n"\n"a ""b"", ä",12\n"zwei\nZeilen 数",-3\nx,1' + "0" * 30 + "\n"


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", "/nowhere")
    datasets.disable_progress_bars()


def zst(data: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue().to_pybytes())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.jsonl", JSONL.encode()),
        ("t.json", JSONL.encode()),
        ("t.json", json.dumps(ROWS, indent=1).encode()),
        ("t.jsonl", b" " + json.dumps(ROWS).encode("utf-8-sig")[3:]),
        ("t.ndjson", JSONL.encode("utf-8-sig")),
        ("t.jsonl", JSONL.encode("utf-16")),
        ("t.json", JSONL.encode("utf-16-be")),
        ("t.JSONL", JSONL.replace("\n", "\r\n").encode()),
        ("t.jsonl.gz", gzip.compress(JSONL.encode())),
        ("t.jsonl.gz", gzip.compress(JSONL[:20].encode()) + gzip.compress(JSONL[20:].encode())),
        ("t.json.bz2", bz2.compress(JSONL.encode())),
        ("t.jsonl.zst", zst(JSONL.encode("utf-16"))),
        ("t.csv", CSV.encode()),
        ("t.csv", CSV.encode("utf-8-sig")),
        ("t.csv", b"\r\n" + CSV.replace("\nx,", "\n\n,\nx,").encode()),
        ("t.csv", CSV.replace(",", ";").replace('b""; ä', 'b"", ä').encode()),
        ("t.csv.gz", gzip.compress(CSV.encode())),
        ("t.tsv", CSV.replace(",", "\t").replace('b""\t ä', 'b"", ä').encode("utf-16")),
    ],
)
def test_every_form_of_text_gives_the_same_rows(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert list(read(str(tmp_path / name))) == ROWS


def test_lines_of_windows_and_cells_keep_their_values(tmp_path: Path) -> None:
    text = "id,answer,level,note,big\r\n007,1.50,0.5,,12345678901234567890.5\r\n010,2,1,NA,1\r\n"
    (tmp_path / "t.csv").write_bytes(text.encode())
    first, second = read(str(tmp_path / "t.csv"))
    assert first == {"id": "007", "answer": 1.5, "level": 0.5, "note": None, "big": "12345678901234567890.5"}
    (tmp_path / "index.csv").write_text(",q\n0,a\n1,b\n")
    assert read(str(tmp_path / "index.csv"))[1] == {"Unnamed: 0": 1, "q": "b"}
    assert read(str(tmp_path / "t.csv"), texts=["answer"])[0]["answer"] == "1.50"
    assert second == {"id": "010", "answer": 2.0, "level": 1.0, "note": "NA", "big": "1"}


def arrow(rows: list[dict[str, Any]], open_writer: Callable[..., Any]) -> bytes:
    table, sink = pyarrow.Table.from_pylist(rows), io.BytesIO()
    with open_writer(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def test_arrow_files_streams_and_folders_of_save_to_disk(tmp_path: Path) -> None:
    rows = [{"q": f"{i}", "inner": {"a": [i]}} for i in range(5)]
    (tmp_path / "f.arrow").write_bytes(arrow(rows, pyarrow.ipc.new_file))
    (tmp_path / "s.arrow").write_bytes(arrow(rows, pyarrow.ipc.new_stream))
    (tmp_path / "z.arrow.gz").write_bytes(gzip.compress(arrow(rows, pyarrow.ipc.new_stream)))
    found = datasets.Dataset.from_list(rows)
    found.save_to_disk(tmp_path / "one", num_shards=3)
    datasets.DatasetDict(train=found, test=found.select([4, 2])).save_to_disk(tmp_path / "both")
    for place in ("f.arrow", "s.arrow", "z.arrow.gz", "one", "both", "both/train"):
        assert list(read(str(tmp_path / place))) == rows, place
    assert list(read(str(tmp_path / "both"), "test")) == [rows[4], rows[2]]
    with pytest.raises(DatasetError, match="has no split 'dev'; split may be train, test"):
        read(str(tmp_path / "both"), "dev")
    with pytest.raises(DatasetError, match="is one Dataset, without the split 'test'; leave split out"):
        read(str(tmp_path / "one"), "test")
    (tmp_path / "both/test/data-00000-of-00001.arrow").write_bytes(POINTER)
    with pytest.raises(DatasetError, match=r"both/test/data-00000-of-00001.arrow: is a Git LFS pointer"):
        read(str(tmp_path / "both"))


def files(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"of": name}]), folder / name)
        else:
            (folder / name).write_text(json.dumps({"of": name}) + "\n")
    return folder


def names_of(folder: Path, split: str = "train", subset: str | None = None) -> list[str]:
    return [row["of"] for row in read(str(folder), split, subset)]


def test_folders_of_other_tools_are_read_in_order(tmp_path: Path) -> None:
    spark = files(tmp_path / "spark", "part-00001.parquet", "part-00000.parquet", "_SUCCESS")
    assert names_of(spark) == ["part-00000.parquet", "part-00001.parquet"]
    hub = files(tmp_path / "hub", "train/0001.parquet", "train/0000.parquet", "test/0000.parquet")
    assert names_of(hub) == ["train/0000.parquet", "train/0001.parquet"]
    assert names_of(hub, "test") == ["test/0000.parquet"]
    with pytest.raises(DatasetError, match="has no split 'dev'; split may be train, test"):
        names_of(hub, "dev")
    assert names_of(files(tmp_path / "named", "gsm_train.jsonl", "gsm_test.jsonl"), "test") == ["gsm_test.jsonl"]


def test_a_dataset_card_says_which_files_are_a_subset(tmp_path: Path) -> None:
    names = ("data/train-easy.jsonl", "data/train-hard-0.jsonl", "data/train-hard-1.jsonl", "data/rest.jsonl")
    hub = files(tmp_path, *names)
    configs = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: train\n    path: data/train-{name}*\n"
        for name in ("easy", "hard")
    )
    (hub / "README.md").write_text(f"---\nlicense: mit\nconfigs:\n{configs}---\n# data\n")
    assert names_of(hub, subset="easy") == ["data/train-easy.jsonl"]
    assert names_of(hub, subset="hard") == ["data/train-hard-0.jsonl", "data/train-hard-1.jsonl"]
    for subset in (None, "other"):
        with pytest.raises(DatasetError, match=r"'easy', 'hard'"):
            names_of(hub, subset=subset)


def test_one_split_in_two_kinds_of_files_is_refused(tmp_path: Path) -> None:
    files(tmp_path, "train.jsonl", "train.parquet", "test.jsonl")
    with pytest.raises(
        DatasetError, match=r"has train.jsonl, train.parquet, which may be the same rows; give one file"
    ):
        names_of(tmp_path)
    assert names_of(tmp_path, "test") == ["test.jsonl"] and names_of(tmp_path / "train.parquet") == ["train.parquet"]


def test_a_whole_split_beside_files_that_are_no_parts_is_refused(tmp_path: Path) -> None:
    said = r"has train-small.jsonl, train.jsonl, of which one may be a part of another; give one file as path"
    files(tmp_path / "small", "train.jsonl", "train-small.jsonl", "train_1k.jsonl", "test.jsonl")
    with pytest.raises(DatasetError, match=said):
        names_of(tmp_path / "small")
    assert names_of(tmp_path / "small/train.jsonl") == ["train.jsonl"]
    assert names_of(tmp_path / "small", "test") == ["test.jsonl"]
    named = ["train-a.jsonl", "train-b.jsonl", "train.0.jsonl"]
    assert names_of(files(tmp_path / "named", *named)) == named
    parts = ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"]
    assert names_of(files(tmp_path / "parts", *parts)) == parts


def a_zip() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as packed:
        packed.writestr("train.jsonl", JSONL)
    return data.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2\nsize 12345\n"
PAGE = b"\n<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        *((name, POINTER, "is a Git LFS pointer, not the data; run `git lfs") for name in ("t.jsonl", "t.parquet")),
        ("t.csv.gz", POINTER, "is a Git LFS pointer"),
        ("t.arrow", POINTER, "is a Git LFS pointer"),
        *((name, PAGE, "is an HTML or XML page") for name in ("t.json", "t.parquet", "t.csv", "t.jsonl.zst")),
        ("t.jsonl.gz", gzip.compress(PAGE), "is an HTML or XML page"),
        *(
            (name, b"", "is empty and has no rows")
            for name in ("t.jsonl", "t.parquet", "t.csv", "t.arrow", "t.jsonl.gz")
        ),
        ("t.json", b"\xef\xbb\xbf \r\n", "is empty"),
        ("t.jsonl.gz", gzip.compress(b""), "is empty"),
        ("t.jsonl", a_zip(), "is a zip archive or a workbook; unpack it"),
        ("t.jsonl.xz", lzma.compress(JSONL.encode()), "is compressed by xz; unpack it"),
        ("t.jsonl.gz", JSONL.encode(), "is no gzip file, it begins with"),
        ("t.csv.zst", b"a,b\n1,2\n", "is no zstd file"),
        ("t.parquet", JSONL.encode(), "is no parquet file"),
        ("t.jsonl", gzip.compress(JSONL.encode()), "is compressed by gzip, which its name does not say; rename it"),
        ("t.jsonl.gz", zst(JSONL.encode()), "is compressed by zstd"),
        ("t.json", b"PAR1....PAR1", "is a parquet file, which its name does not say"),
        ("t.jsonl.gz", gzip.compress(JSONL.encode() * 1000)[:-200], "cannot be read"),
        ("t.jsonl", "größe".encode("latin-1"), "cannot be read.*save it as UTF-8"),
        ("t.json", json.dumps({"q": "a", "n": 1}, indent=1).encode(), r"is one JSON object \(q, n\); must be a list"),
        ("t.json", json.dumps({"data": ROWS}, indent=1).encode(), "object with its rows in data; write one file"),
        ("t.jsonl", json.dumps({"data": ROWS}).encode(), "object with its rows in data; write one file"),
        ("t.json", json.dumps({"version": "1.1", "data": ROWS}).encode(), "with its rows in data; write one file"),
        ("t.json", json.dumps({"train": ROWS, "test": ROWS}).encode(), "with its rows in train, test; write one file"),
        ("t.json", json.dumps({"a7": ROWS[0], "b2": ROWS[1]}).encode(), "is one object of columns, as pandas writes"),
        ("t.json", json.dumps({"q": ["a", "b"], "n": [1, 2]}).encode(), "is one object of columns, as pandas writes"),
        ("t.json", json.dumps({"q": {"0": "a", "1": "b"}, "a": {"0": 1, "1": 2}}).encode(), "is one object of columns"),
        ("t.json", b'{"q":\n{"0": "a"}}', "is one object of columns, as pandas writes; write it by to_json"),
        ("t.json", b"Access denied", r"line 1: is not JSON: .*begins with 'Access denied'"),
        ("t.csv", b"a,b\n1,2\n1,2,3\n", r"line 3: has 3 cells, must have 2: a, b"),
        ("t.csv", b"a,b,a\n1,2,3\n", "its first line must name each column once, is a,b,a"),
        ("t.tsv", b'a\tb\n"1\t2\n', "line 2: is no csv"),
        ("t.csv", b"a,b\n", "has no rows"),
    ],
)
def test_a_file_without_rows_is_named_for_what_it_is(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError, match=said) as refused:
        read(str(tmp_path / name))
    assert str(tmp_path / name) in refused.value.message


def test_a_folder_without_data_is_named_with_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DatasetError, match=r"has no train.jsonl, .*; it holds images, notes.txt"):
        read(str(tmp_path))
    with pytest.raises(DatasetError, match=r"it holds nothing"):
        read(str(tmp_path / "images"))


@pytest.mark.parametrize("row", [{"messages": [{"role": "user"}]}, {"conversations": [{"from": "gpt"}]},
                                 {"q": "a", "tools": [{"name": "x"}]}, {"q": "a", "n": [1, 2]},
                                 {"prompt_ids": [1, 2], "response_ids": [3]}, {"task": {"q": "a", "a": "5"}},
                                 {"input": {"text": "a"}, "output": {"text": "b"}}, {"chat": [{"text": "hi"}]},
                                 {"q": "a", "data": [{"x": 1}]}, {"messages": []}])  # fmt: skip
def test_a_file_of_one_row_is_read(row: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(row))
    assert list(read(str(tmp_path / "t.jsonl"))) == [row]


def test_a_folder_is_read_from_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sums.jsonl").write_text('{"q": 1}\n')
    monkeypatch.chdir(tmp_path)
    assert [list(read(path)) for path in (".", "./", str(tmp_path))] == [[{"q": 1}]] * 3


def test_a_split_without_all_its_files_is_refused(tmp_path: Path) -> None:
    for part in (0, 1, 3):
        (tmp_path / f"train-0000{part}-of-00004.jsonl").write_text('{"q": 1}\n')
    with pytest.raises(DatasetError, match=r"lacks 1 of the 4 files of train, the first is number 00002; download"):
        read(str(tmp_path))
    assert len(read(str(tmp_path / "train-00003-of-00004.jsonl"))) == 1
    (tmp_path / "train-00002-of-00004.jsonl").symlink_to("blobs/gone")
    with pytest.raises(DatasetError, match=r"train-00002-of-00004.jsonl: is a link to a file that is not there"):
        read(str(tmp_path))
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/gone").write_text('{"q": 2}\n')
    assert len(read(str(tmp_path))) == 4


def test_nested_columns_have_names(tmp_path: Path) -> None:
    rows = [
        {"reward_model": {"ground_truth": "5"}, "extra_info": {"index": 3}, "a.b": "own", "a": {"b": "inner"}},
        {"reward_model": None, "extra_info": {"index": 1}},
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    form = FormatConfig(response_key="reward_model.ground_truth", prompt_key="a.b")
    selector = SelectorConfig(selector_type="offline_easy2hard", feature_keys=["extra_info.index"])
    taskset = TasksetConfig(path=str(tmp_path / "t.jsonl"), format=form, data_selector=selector)
    first, second = read_taskset(taskset)
    assert (first["reward_model.ground_truth"], first["extra_info.index"], first["a.b"]) == ("5", 3, "own")
    assert "reward_model.ground_truth" not in second and second["extra_info.index"] == 1
