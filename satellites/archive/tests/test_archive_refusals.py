"""Files of other programs stay unchanged, and what is no archive is refused with the reason."""

import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from support.fakes.data.archives import RUN, archived
from trinity.archive import open_archive
from trinity.runtime.errors import InvalidInput, Unavailable

pytestmark = pytest.mark.core

# What is another's stays as it is.


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("archive.csv", r"path: is 'archive.csv'; an archive is a URL \(sqlite:///file.db"),
        ("", "path: is ''; an archive is"),
        ("mysql://user:secret@host/db", "path: is a mysql:// URL; an archive is"),
        ("postgresql+asyncpg://user:secret@host/db", r"path: is a postgresql\+asyncpg:// URL; use one of"),
        ("postgresql://user:secret@host:port/db", "path: cannot be read as a URL; postgresql://user"),
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
    ],
)
def test_what_is_no_archive_is_refused(path: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as refused:
        open_archive(path, "buffer", RUN)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("name", ["", "a b", 'a"; drop table x', "1a", "a" * 51])
def test_a_name_that_is_no_table_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="name: is "):
        open_archive(str(tmp_path / "a.db"), name, RUN)
    assert not list(tmp_path.iterdir())


def test_a_database_that_does_not_answer() -> None:
    with pytest.raises(Unavailable, match="connection") as refused:
        open_archive("postgresql://user:secret@127.0.0.1:9/db", "buffer", RUN)
    assert "secret" not in str(refused.value)


def _refused_and_untouched(file: Path, path: str, message: str) -> None:
    before = file.read_bytes()
    for _ in range(2):
        with pytest.raises(InvalidInput, match=message):
            open_archive(path, "buffer", RUN)
    assert file.read_bytes() == before


def _other_column(line: bytes) -> bytes:
    return line.replace(b'"reward"', b'"rewards"')


@pytest.mark.parametrize(
    "changed",
    [
        lambda lines: [b'{"token_ids":[1,2],"prompt_length":1,"reward":1}\n'],
        lambda lines: [b'{"token_ids":[1,2],"prompt_length":1,"reward":1}'],
        lambda lines: [b"notes to myself"],
        lambda lines: [*lines, b"notes to myself\n"],
        lambda lines: [*lines, b'{"run":"tests-run-000000","log_sequence":9}\n'],
        lambda lines: [_other_column(line) for line in lines],
        lambda lines: [*lines[:2], *(_other_column(line) for line in lines[2:])],
        lambda lines: [line.replace(RUN.encode(), b"another-run", 1) for line in lines],
        lambda lines: [*lines[:2], *(line.replace(RUN.encode(), b"another-run", 1) for line in lines[2:])],
        lambda lines: [_other_column(lines[0]), *lines[1:]],
        lambda lines: lines[::2],  # the first experience of each group, as if rows had been selected
    ],
)
def test_a_jsonl_that_is_another_s_is_left_alone(changed: Callable[[list[bytes]], list[bytes]], tmp_path: Path) -> None:
    file = tmp_path / "buffer.jsonl"
    file.write_bytes(b"".join(changed(archived(tmp_path, 1, 2, 3))))
    _refused_and_untouched(file, str(file), "was not archived by run tests-run-000000 as it is; name another file")


def test_a_database_that_is_another_s_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "buffer.db"
    with sqlite3.connect(file) as database:
        database.execute("create table buffer (run text, reward double)")
        database.execute("insert into buffer values ('mine', 1)")
    database.close()
    _refused_and_untouched(
        file, str(file), "has a table buffer that is no archive .differs in action_mask, .*name another"
    )
    with sqlite3.connect(file) as database:
        database.execute("alter table buffer rename to buffer_position")
    database.close()
    _refused_and_untouched(file, str(file), "has a table buffer_position that is no archive")
    file.write_bytes(b"notes to myself " * 100)
    _refused_and_untouched(file, str(file), "file is not a database")


def test_a_folder_that_is_another_s_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "mine" / "train.parquet"
    file.parent.mkdir()
    parquet.write_table(pyarrow.table({"reward": [1.0]}), file)
    _refused_and_untouched(file, f"{file.parent}/", "holds train.parquet, no part of an archive; name a new folder")
    _refused_and_untouched(file, str(file), "is a file; a parquet archive is a folder")
    part = file.rename(file.parent / f"{RUN}.{1:019d}-{2:019d}.parquet")
    _refused_and_untouched(part, f"{file.parent}/", "has other columns than an archive")


@pytest.mark.parametrize(
    ("module", "path", "message"),
    [
        ("psycopg", "postgresql://user:secret@host/db", r"psycopg.*pip install -e '\.\[postgresql\]'"),
        ("pyarrow", "folder/", r"path: needs pyarrow; pip install -e '\.\[parquet\]'"),
    ],
)
def test_what_is_not_installed_is_named(
    module: str, path: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "trinity.archive.parquet", raising=False)
    with pytest.raises(InvalidInput, match=message) as refused:
        open_archive(path, "buffer", RUN)
    assert "secret" not in str(refused.value)
