"""Each row of the table of docs/compatibility.md is tried: the column `read` is read, `not read` is refused by name."""

import gzip
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from pydantic_settings import SettingsConfigDict

from trinity.config.names import reward_functions, reward_named
from trinity.config.schema.buffer import FormatConfig, TasksetConfig
from trinity.data.datasets import DatasetError, read, read_taskset
from trinity.data.prompts import prompt_messages, reference_answers
from trinity.runtime import process, rpc
from trinity.runtime.errors import InvalidInput
from trinity.runtime.settings import ServiceSettings, load_settings
from trinity.sdk.scoring import ScoreResult, as_result

pytestmark = pytest.mark.core

PAGE = Path(__file__).parents[2] / "docs/compatibility.md"
ROWS: list[dict[str, Any]] = [{"question": "1+1?", "answer": "2"}, {"question": "é", "answer": "3"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


def rows_of_the_table() -> dict[str, str]:
    """The first column, by section, and the column `not read`."""
    table = PAGE.read_text().partition("\n## YAMLs")[0]
    found, section = {}, ""
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if len(cells) == 3 and (heading := re.fullmatch(r"\*\*(.+)\*\*", cells[0])):
            section = heading[1]
        elif len(cells) == 3 and section:
            found[f"{section}: {cells[0]}"] = cells[2]
    return found


class Tried:
    """Returns what the case of a row read, and the refusals."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.taken, self.refusals = folder, 0, 0

    def reads(self, call: Callable[[], Any], expected: Any) -> None:
        assert call() == expected
        self.taken += 1

    def refuses(self, call: Callable[[], Any], said: str) -> None:
        with pytest.raises((DatasetError, InvalidInput, ValueError), match=said):
            call()
        self.refusals += 1

    def file(self, name: str, content: bytes | str) -> Callable[[], list[Any]]:
        """Writes a file and returns what reads it."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return lambda: list(read(str(path)))

    def split(self, name: str = "", split: str = "train", subset: str | None = None) -> Callable[[], list[Any]]:
        return lambda: list(read(str(self.folder / name), split, subset))


def arrow(tried: Tried) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    for opened in (pyarrow.ipc.new_file, pyarrow.ipc.new_stream):
        sink = pyarrow.BufferOutputStream()
        with opened(sink, table.schema) as writer:
            writer.write_table(table)
        tried.reads(tried.file("t.arrow", sink.getvalue().to_pybytes()), ROWS)


def csv(tried: Tried) -> None:
    for mark, name in ((",", "t.csv"), (";", "t.csv"), ("\t", "t.csv"), ("\t", "t.tsv")):
        text = f"q{mark}n{mark}code\na{mark}5{mark}07\nb{mark}{mark}1\n"
        expected = [{"q": "a", "n": 5, "code": "07"}, {"q": "b", "n": None, "code": "1"}]
        tried.reads(tried.file(name, text), expected)
    tried.refuses(tried.file("t.csv", "q,n\na\n"), "line 2: has 1 cells, must have 2")
    tried.refuses(tried.file("t.csv", "q,n\na,b,c\n"), "line 2: has 3 cells, must have 2")


def json_files(tried: Tried) -> None:
    for name in ("t.json", "t.jsonl", "t.ndjson"):
        tried.reads(tried.file(name, LINES), ROWS)
        tried.reads(tried.file(name, json.dumps(ROWS, indent=1)), ROWS)
    tried.reads(tried.file("t.jsonl", json.dumps({"n": 10**30})), [{"n": 10**30}])
    tried.refuses(tried.file("t.json", json.dumps(ROWS[0], indent=1)), "is one JSON object")
    tried.refuses(tried.file("t.json", '{"q": {"0": "a", "1": "b"}}'), "object of columns, as pandas")


def parquet(tried: Tried) -> None:
    nested = [{"q": "a", "extra_info": {"index": 3, "tags": ["x"]}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(nested), tried.folder / "t.parquet")
    tried.reads(lambda: list(read(str(tried.folder / "t.parquet"))), nested)


def compression(tried: Tried) -> None:
    tried.reads(tried.file("t.jsonl.gz", gzip.compress(LINES.encode())), ROWS)
    for kind, suffix in (("zstd", "zst"), ("bz2", "bz2")):
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, kind) as packed:
            packed.write(LINES.encode())
        tried.reads(tried.file(f"t.json.{suffix}", sink.getvalue().to_pybytes()), ROWS)
    tried.file("xz/train.jsonl.xz", b"\xfd7zXZ\x00")
    tried.refuses(tried.split("xz"), "it holds train.jsonl.xz")
    tried.refuses(tried.file("t.jsonl", gzip.compress(LINES.encode())), "compressed by gzip, which its name does not")
    tried.refuses(tried.file("t.jsonl.gz", LINES), "is no gzip file")


def encoding(tried: Tried) -> None:
    for name in ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"):
        tried.reads(tried.file("t.jsonl", LINES.replace("\n", "\r\n").encode(name)), ROWS)
    tried.refuses(tried.file("t.jsonl", LINES.encode("latin-1")), "save it as UTF-8")


def not_data(tried: Tried) -> None:
    given = {
        b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n": "is a Git LFS pointer",
        b"<!doctype html><html></html>": "is an HTML or XML page",
        b'<?xml version="1.0"?><Error/>': "is an HTML or XML page",
        b"": "is empty",
        b"PK\x03\x04....": "is a zip archive",
        b"SQLite format 3\x00....": "SQLite",
    }
    for content, said in given.items():
        tried.refuses(tried.file("t.jsonl", content), said)
    tried.refuses(tried.file("t.jsonl", b"x" * 257 + b"ustar\x0000" + b"\x00" * 248), "tar")
    tried.refuses(tried.file("t.jsonl.gz", gzip.compress(os.urandom(4000))[:900]), "[Tt]runcated|cut")


def by_name(tried: Tried) -> None:
    for place in ("plain", "sub/main", "inner/data"):
        for part in (1, 0):
            tried.file(f"{place}/train-{part:05}-of-00002.jsonl", json.dumps({"part": part}))
    for name, subset in (("plain", None), ("sub", "main"), ("inner", None)):
        tried.reads(tried.split(name, subset=subset), [{"part": 0}, {"part": 1}])
    tried.file("plain/train.csv", "a\n1\n")
    tried.refuses(tried.split("plain"), "which may be the same rows")
    (tried.folder / "inner/data/train-00001-of-00002.jsonl").unlink()
    tried.refuses(tried.split("inner"), "lacks 1 of the 2 files")
    for name in ("train.jsonl", "train-small.jsonl"):
        tried.file(f"beside/{name}", json.dumps({"part": 0}))
    tried.refuses(tried.split("beside"), "may be a part of another")


def card(tried: Tried) -> None:
    configs = "".join(f"- config_name: {x}\n  data_files:\n  - split: train\n    path: {x}.jsonl\n" for x in "ab")
    tried.file("README.md", f"---\nconfigs:\n{configs}---\n")
    for name in "ab":
        tried.file(f"{name}.jsonl", json.dumps({"of": name}))
    tried.reads(tried.split(subset="b"), [{"of": "b"}])
    tried.refuses(tried.split(), "'a', 'b'")


def saved(tried: Tried) -> None:
    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(tried.folder / "one")
    datasets.DatasetDict(train=one, test=one.select([1])).save_to_disk(tried.folder / "both")
    tried.reads(tried.split("one"), ROWS)
    tried.reads(tried.split("both", "test"), ROWS[1:])


def other_names(tried: Tried) -> None:
    tried.file("spark/part-00000.jsonl", LINES)
    tried.file("named/gsm_dev.jsonl", LINES)
    (tried.folder / "hub/test").mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tried.folder / "hub/test/0000.parquet")
    for name, split in (("spark", "train"), ("named", "validation"), ("hub", "test")):
        tried.reads(tried.split(name, split), ROWS)
    tried.file("pictures/train/one.png", b"\x89PNG")
    tried.refuses(tried.split("pictures"), "it holds train")


def harbor(tried: Tried) -> None:
    for name, text in {"task.toml": "[verifier]", "instruction.md": "Do it", "tests/test.sh": "true"}.items():
        tried.file(f"train/one/{name}", text)
    tried.reads(lambda: [row["instruction"] for row in tried.split()()], ["Do it"])
    tried.file("train/one/environment/big", b"x" * (4 * 1024**2 + 1))
    tried.refuses(tried.split(), "more than 4 MiB")
    (tried.folder / "train/one/environment/big").unlink()
    (tried.folder / "train/one/environment/link").symlink_to("/etc/hosts")
    tried.refuses(tried.split(), "is a symbolic link")


def _column(tried: Tried, row: dict[str, Any], key: str) -> Callable[[], Any]:
    tried.file("t.jsonl", json.dumps(row))
    taskset = TasksetConfig(path=str(tried.folder / "t.jsonl"), format=FormatConfig(response_key=key))
    return lambda: read_taskset(taskset)[0][key]


def nested(tried: Tried) -> None:
    row = {"reward_model": {"ground_truth": "5"}, "extra_info": {"index": 3}, "a": {"b": "inner"}, "a.b": "own"}
    for key, value in (("reward_model.ground_truth", "5"), ("extra_info.index", 3), ("a.b", "own")):
        tried.reads(_column(tried, row, key), value)
    with pytest.raises(KeyError):
        _column(tried, {"answers": [{"text": "5"}]}, "answers.text")()
    tried.refusals += 1


def prompt(tried: Tried) -> None:
    messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": "1+1?"}]
    tried.reads(lambda: prompt_messages(messages), messages)
    tried.refuses(
        lambda: prompt_messages([{"role": "developer", "content": "x"}, *messages]), "no role of system, user"
    )
    tried.refuses(lambda: prompt_messages([*messages, {"role": "assistant", "content": "2"}]), "must end with a user")


def reference(tried: Tried) -> None:
    tried.reads(lambda: [reference_answers(one) for one in ("5", 5, ["5", "five"])], [["5"], ["5"], ["5", "five"]])
    tried.refuses(lambda: reference_answers({"value": "5"}), "name a column inside of it, such as 'value'")


def reward_of_rows(tried: Tried) -> None:
    tried.reads(lambda: reward_named("accuracy_reward"), "accuracy_reward")
    tried.reads(lambda: reward_named("openai/gsm8k") in reward_functions(), True)
    assert reward_named("searchR1_nq") not in reward_functions(), "it is named by `check`"
    tried.refusals += 1


def number(tried: Tried) -> None:
    for value in (1, 0.5, True, ScoreResult(0.5)):
        tried.reads(lambda value=value: as_result(value).reward, getattr(value, "reward", value))
    for wrong in ("43", {}, None):
        tried.refuses(lambda wrong=wrong: as_result(wrong), "must be a number")


def mapping(tried: Tried) -> None:
    tried.reads(
        lambda: as_result({"score": 0.5, "acc": True, "pred": "43"}), ScoreResult(0.5, {"score": 0.5, "acc": 1.0})
    )
    tried.reads(lambda: as_result({"right": 1, "form": 0.5}).reward, 1.5)
    tried.refuses(lambda: as_result({"right": 1, "pred": "43"}), "pred: is '43'")


class _Buffer(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="TRINITY_BUFFER_", extra="forbid", frozen=True)


def variables(tried: Tried) -> None:
    (long := tried.folder / ("x" * 90)).mkdir()
    given = {"RANK": "1", "TRINITY_BUFFER_SERVICE_HOST": "10.0.0.1", "TMPDIR": str(long)}
    with process.environment(given):
        tried.reads(lambda: load_settings(_Buffer), _Buffer())
        found = process.inherited()
    short = Path(found["TMPDIR"])
    tried.reads(short.readlink, long)
    short.unlink()
    assert "RANK" not in found and ("grpc.enable_http_proxy", 0) in rpc.CLIENT_OPTIONS
    tried.refusals += 2


CASES: dict[str, Callable[[Tried], None]] = {
    "Files: arrow": arrow,
    "Files: csv, tsv": csv,
    "Files: json": json_files,
    "Files: parquet": parquet,
    "Files: compression": compression,
    "Files: encoding": encoding,
    "Files: not data": not_data,
    "Folders: `<split>` by name": by_name,
    "Folders: dataset card": card,
    "Folders: `save_to_disk`": saved,
    "Folders: other names": other_names,
    "Folders: tasks in Harbor's form": harbor,
    "Columns: nested": nested,
    "Columns: prompt": prompt,
    "Columns: reference answer": reference,
    "Columns: `reward_fn_key`": reward_of_rows,
    "Rewards of functions: number, `ScoreResult`": number,
    "Rewards of functions: mapping": mapping,
    "Variables of the shell: proxies, launchers, Kubernetes, `TMPDIR`": variables,
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def test_every_row_has_a_case_and_every_case_a_row() -> None:
    assert rows_of_the_table().keys() == CASES.keys()


@pytest.mark.parametrize("row", rows_of_the_table())
def test_a_row_is_true(row: str, tmp_path: Path) -> None:
    tried = Tried(tmp_path / "case")
    tried.folder.mkdir()
    CASES[row](tried)
    shutil.rmtree(tried.folder)
    assert tried.taken or row == "Files: not data"
    assert bool(tried.refusals) == bool(rows_of_the_table()[row]), "the column `not read` says what is refused"
