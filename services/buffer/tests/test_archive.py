"""Every group comes back from every kind of archive as it was and once, whatever ends the writer.

Nobody else's data is touched, and what cannot be read is named.
"""

import dataclasses
import itertools
import json
import os
import resource
import sqlite3
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from support.experience import make_group, make_task
from support.postgres import PostgresServer, find_programs
from trinity.buffer.archive import Archive, open_archive, read_experiences
from trinity.buffer.archive.rows import COLUMNS
from trinity.runtime.errors import Conflict, InvalidInput, Unavailable
from trinity.runtime.experience import Experience, Group, SamplingParams, TaskKind, Truncation, VersionSpan

RUN = "tests-run-000000"
KINDS = ("sqlite", "postgres", "jsonl", "parquet")
_numbers = itertools.count()


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    programs = find_programs()
    if programs is None:
        message = "no PostgreSQL: pip install -r requirements/dev.txt"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(message)
    server = PostgresServer(programs)
    try:
        server.start()
        yield server
    finally:
        server.remove()


@dataclasses.dataclass(frozen=True)
class Place:
    path: str
    name: str

    def open(self, run: str = RUN) -> Archive:
        return open_archive(self.path, self.name, run)

    def read(self) -> list[Group]:
        return list(read_experiences(self.path, self.name))


@pytest.fixture
def new_place(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[], Place]:
    """Makes names of archives that are not there yet, of the kind that the test is about."""
    server = request.getfixturevalue("postgres") if kind == "postgres" else None

    def new() -> Place:
        name = f"buffer_{next(_numbers)}"
        paths = {
            "sqlite": f"sqlite:///{tmp_path}/new/{name}.db",
            "postgres": server.url if server else "",
            "jsonl": f"{tmp_path}/new/{name}.jsonl",
            "parquet": f"{tmp_path}/new/{name}.parquet",
        }
        return Place(paths[kind], name)

    return new


def groups_of(*sequences: int, size: int = 2, response: int = 3) -> list[tuple[int, Group]]:
    """Small groups by log sequence; a sequence has always the same group."""
    made = ((sequence, make_group(make_task(sequence, repeat_times=size), response=response)) for sequence in sequences)
    return [(sequence, dataclasses.replace(g, started_at_seconds=0.1, finished_at_seconds=0.3)) for sequence, g in made]


def facts(group: Group) -> str:
    """Everything in a group, to the bit, but for which NaN a NaN is."""

    def shown(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            canonical = np.where(np.isnan(value), np.float32("nan"), value) if value.dtype == np.float32 else value
            return value.dtype.name, canonical.tobytes()
        return value

    return repr(dataclasses.asdict(group, dict_factory=lambda items: {name: shown(value) for name, value in items}))


def the_same(read: list[Group], written: list[tuple[int, Group]]) -> bool:
    return [facts(group) for group in read] == [facts(group) for _, group in written]


# Random groups: any text a model can write, any float32 a tensor can hold.

_texts = st.text(
    st.one_of(st.sampled_from('\0\n\u2028␀"\\,{}0'), st.characters(exclude_categories=["Cs"])), max_size=12
)
_int64 = st.integers(-(2**63), 2**63 - 1)


@st.composite
def experiences(draw: st.DrawFn, index: int) -> Experience:
    prompt, response = draw(st.integers(1, 3)), draw(st.integers(0, 6))
    half = response // 2
    spans = (VersionSpan(draw(st.integers(0, 2**62)), 0, half), VersionSpan(2**62, half, response)) if half else ()
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=prompt + response, max_size=prompt + response))
    bits = draw(st.lists(st.integers(0, 2**32 - 1), min_size=response, max_size=response))
    return Experience(
        rollout=draw(st.integers(0, 2**31 - 1)),
        step=index,
        token_ids=np.array(ids, dtype=np.int32),
        prompt_length=prompt,
        logprobs=np.array(bits, dtype=np.uint32).view(np.float32),
        action_mask=np.array(draw(st.lists(st.booleans(), min_size=response, max_size=response)), dtype=bool),
        reward=draw(st.floats(allow_nan=False, allow_infinity=False)) + 0.0,  # sqlite has no -0.0
        version_spans=spans,
        truncation=draw(st.sampled_from(list(Truncation))),
        metrics=draw(st.dictionaries(_texts, st.floats(), max_size=2)),
        info_json=draw(st.sampled_from(("", '{"a":  1}', '{"a": "\\u0000"}'))),
        prompt_text=draw(_texts),
        response_text=draw(_texts),
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    task = make_task(
        draw(st.integers(1, 2**62)),
        task_id=draw(_texts) or "x",
        row_json=draw(_texts),
        kind=draw(st.sampled_from(list(TaskKind))),
        sampling=SamplingParams(seed=draw(st.none() | _int64), stop=tuple(draw(st.lists(_texts, max_size=2)))),
        timeout_seconds=draw(st.floats(1e-300, 1e300)),
    )
    members = tuple(draw(experiences(index)) for index in range(draw(st.integers(1, 3))))
    seconds = st.floats(0, 2e9)
    return Group(task, draw(st.integers(1, 9)), draw(_texts), members, draw(seconds), draw(seconds))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=st.lists(groups(), min_size=1, max_size=3))
@example(made=[groups_of(1, size=4, response=300)[0][1]])
def test_the_same_groups_come_back(new_place: Callable[[], Place], made: list[Group]) -> None:
    place, written = new_place(), [(7 * number, group) for number, group in enumerate(made, start=1)]
    archive = place.open()
    archive.append(written, position=7 * len(made))
    archive.close()
    assert the_same(place.read(), written)


def test_no_field_is_forgotten() -> None:
    fields = {field.name.replace("info_json", "info") for field in dataclasses.fields(Experience)}
    assert fields <= set(COLUMNS)
    of_group = {field.name for field in dataclasses.fields(Group)} - {"experiences"}
    assert of_group <= set(COLUMNS)  # the task's fields go through protobuf: see `groups`


# Once, and from where it was.


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_twice_is_stored_once(new_place: Callable[[], Place]) -> None:
    place = new_place()
    first, both = groups_of(2, 3), groups_of(2, 3, 5)
    archive = place.open()
    archive.append(first, position=4)
    archive.append(first, position=4)
    archive.append(both[1:], position=5)
    archive.close()
    again = place.open()
    assert again.position() == 5
    again.append(both, position=6)
    again.close()
    assert the_same(place.read(), both)


@pytest.mark.parametrize("kind", KINDS)
def test_the_position_is_found_from_the_archive(new_place: Callable[[], Place], kind: str) -> None:
    place = new_place()
    archive = place.open()
    assert archive.position() == 0
    archive.append(groups_of(3), position=4)
    archive.append([], position=9)
    archive.append([], position=8)
    assert archive.position() == 9
    archive.close()
    archive = place.open()
    assert archive.position() == {"jsonl": 3, "parquet": 4}.get(kind, 9)
    for wrong, position in ((groups_of(12, 11), 12), (groups_of(11, 11), 12), (groups_of(13), 12)):
        with pytest.raises(ValueError, match="must rise"):
            archive.append(wrong, position)
    with pytest.raises(InvalidInput, match=r"group.experiences: of task sums/0/12 is empty"):
        archive.append([*groups_of(11), (12, dataclasses.replace(groups_of(12)[0][1], experiences=()))], 12)
    archive.close()
    assert the_same(place.read(), groups_of(3))


_WRITER = """
import sys
sys.path[:0] = sys.argv[1:3]
from test_archive import Place, groups_of
archive = Place(*sys.argv[3:]).open()
while True:
    start = archive.position() + 1
    archive.append(groups_of(*range(start, start + 3), response=2000), start + 2)
    print(start, flush=True)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_writer_leaves_whole_groups(new_place: Callable[[], Place], repository: Path) -> None:
    place = new_place()
    folders = [str(repository / "tests"), str(Path(__file__).parent)]
    command = [sys.executable, "-c", _WRITER, *folders, place.path, place.name]
    for round_number in range(2):
        writer = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert writer.stdout is not None
        for _ in range(3):
            acknowledged = int(writer.stdout.readline()) + 2
        time.sleep(0.01 * round_number)
        writer.kill()
        writer.communicate(timeout=20)
        archive = place.open()
        position = archive.position()
        assert position >= acknowledged
        archive.close()
        assert the_same(place.read(), groups_of(*range(1, position + 1), response=2000))


def test_a_torn_end_of_a_jsonl_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    place, written = Place(str(path), "a"), groups_of(1, 2, 4)
    archive = place.open()
    archive.append(written, position=4)
    archive.close()
    whole = path.read_bytes()
    lines = [end + 1 for end, byte in enumerate(whole) if byte == 10]
    ends = {0: 0, lines[1]: 1, lines[3]: 2, len(whole): 4}  # where groups end, and their sequence
    near = {line + shift for line in (0, *lines) for shift in (-2, -1, 0, 1, 2, 7, 30, 50, 300)}
    for cut, zeros in itertools.product(sorted(near & set(range(len(whole) + 1))), (0, 5)):
        path.write_bytes(whole[:cut] + bytes(zeros))
        archive = place.open()
        kept = max(end for end in ends if end <= cut or (end == cut + 1 and not zeros))
        assert archive.position() == ends[kept], cut
        assert path.read_bytes() == whole[:kept]
        archive.append(written, position=4)
        archive.close()
        assert path.read_bytes() == whole, cut


def test_a_full_disk_stores_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    archive = open_archive(str(path), "a", RUN)
    archive.append(groups_of(1), position=1)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 1000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            archive.append(groups_of(2, 3), position=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (path.read_bytes(), archive.position()) == (before, 1)
    archive.append(groups_of(2, 3), position=3)
    archive.close()
    assert the_same(Place(str(path), "a").read(), groups_of(1, 2, 3))


def test_a_database_that_goes_and_comes_back(postgres: PostgresServer) -> None:
    place = Place(postgres.url, "restarted")
    archive, idle = place.open(), place.open("idle")
    archive.append(groups_of(1), position=1)
    postgres.end()
    try:
        with pytest.raises(Unavailable) as refused:
            archive.append(groups_of(2), position=2)
    finally:
        postgres.start()
    assert "127.0.0.1" in str(refused.value)
    assert "sums" not in str(refused.value).replace("sums/0", "")
    archive.append(groups_of(1, 2), position=2)
    archive.close()
    assert the_same(place.read(), groups_of(1, 2))
    idle.append(groups_of(3), position=3)  # who was not there need not know
    idle.close()


# Several runs, several writers.


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "parquet"])
def test_runs_share_an_archive(new_place: Callable[[], Place]) -> None:
    place, runs = new_place(), ("a", "b", "a.1", "ü/␀\0")
    opened: dict[str, Archive] = {}
    threads = [threading.Thread(target=lambda run=run: opened.update({run: place.open(run)})) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number, run in enumerate(runs, start=1):
        opened[run].append(groups_of(*range(1, number + 1)), position=10 * number)
    for archive in opened.values():
        archive.close()
    for number, run in enumerate(runs, start=1):
        archive = place.open(run)
        assert archive.position() == 10 * number
        archive.close()
    sizes = [(len(group.experiences), group.task.ordinal) for group in place.read()]
    assert sorted(sizes) == [(2, 1)] * 4 + [(2, 2)] * 3 + [(2, 3)] * 2 + [(2, 4)]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_two_writers_of_a_run_store_once(new_place: Callable[[], Place]) -> None:
    place = new_place()
    writers = [place.open() for _ in range(2)]
    failures: list[BaseException] = []

    def write(archive: Archive) -> None:
        try:
            for sequence in range(1, 16):
                archive.append(groups_of(sequence), position=sequence)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(archive,)) for archive in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for archive in writers:
        archive.close()
    assert not failures
    assert the_same(place.read(), groups_of(*range(1, 16)))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_second_writer_of_files_is_refused(new_place: Callable[[], Place]) -> None:
    place = new_place()
    archive = place.open()
    with pytest.raises(Conflict, match=f"process {os.getpid()} writes this archive"):
        place.open()
    archive.close()
    place.open().close()


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


def _archived(tmp_path: Path, *sequences: int, run: str = RUN) -> list[bytes]:
    """Lines of a jsonl archive."""
    archive = open_archive(str(tmp_path / "other.jsonl"), "buffer", run)
    archive.append(groups_of(*sequences), position=sequences[-1])
    archive.close()
    return (tmp_path / "other.jsonl").read_bytes().splitlines(keepends=True)


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
        lambda lines: lines[::2],  # the first experience of each group: somebody chose rows
    ],
)
def test_a_jsonl_that_is_another_s_is_left_alone(changed: Callable[[list[bytes]], list[bytes]], tmp_path: Path) -> None:
    file = tmp_path / "buffer.jsonl"
    file.write_bytes(b"".join(changed(_archived(tmp_path, 1, 2, 3))))
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
        ("psycopg", "postgresql://user:secret@host/db", r"psycopg.*pip install 'trinity-buffer\[postgresql\]'"),
        ("pyarrow", "folder/", r"path: needs pyarrow; pip install 'trinity-buffer\[parquet\]'"),
    ],
)
def test_what_is_not_installed_is_named(
    module: str, path: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "trinity.buffer.archive.parquet", raising=False)
    with pytest.raises(InvalidInput, match=message) as refused:
        open_archive(path, "buffer", RUN)
    assert "secret" not in str(refused.value)


# Reading back.


@pytest.mark.parametrize("kind", KINDS)
def test_groups_are_read_when_they_are_asked_for(new_place: Callable[[], Place]) -> None:
    place, written = new_place(), groups_of(*range(1, 41), size=4, response=4000)
    archive = place.open()
    for start in range(0, 40, 10):
        archive.append(written[start : start + 10], position=start + 10)
    archive.close()
    read_experiences(place.path, place.name).close()  # whatever is imported, is
    tracemalloc.start()
    groups_read = read_experiences(place.path, place.name)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000  # of 6 million bytes of arrays
    assert len(groups_read) == 40
    assert the_same([groups_read[-1], *groups_read[3:5]], [written[39], *written[3:5]])
    with pytest.raises(IndexError):
        groups_read[40]


def test_a_jsonl_is_read_while_it_is_written(tmp_path: Path) -> None:
    lines = _archived(tmp_path, 1, 2)
    file = tmp_path / "buffer.jsonl"
    for length in (1, 70, len(lines[-1]) - 2):
        file.write_bytes(b"".join(lines) + lines[-1].replace(b'"log_sequence":2', b'"log_sequence":3')[:length])
        assert the_same(Place(str(file), "buffer").read(), groups_of(1, 2)), length


def test_chosen_rows_of_an_archive_are_groups(tmp_path: Path) -> None:
    lines = _archived(tmp_path, 1, 2)
    file = tmp_path / "best.jsonl"
    file.write_bytes(lines[1] + lines[3] + lines[2])
    chosen = Place(str(file), "best").read()
    assert [[e.rollout for e in group.experiences] for group in chosen] == [[1], [0, 1]]


def _by_hand(tmp_path: Path, rows: list[dict[str, Any]], kind: str) -> str:
    if kind == "jsonl":
        (tmp_path / "mine.jsonl").write_text("\n".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / "mine.jsonl")
    (tmp_path / "mine").mkdir(exist_ok=True)
    columns = dict.fromkeys(column for row in rows for column in row)
    rows = [{column: row.get(column) for column in columns} for row in rows]
    half = len(rows) // 2
    parquet.write_table(pyarrow.Table.from_pylist(rows[:half]), tmp_path / "mine" / "0.parquet", row_group_size=1)
    parquet.write_table(pyarrow.Table.from_pylist(rows[half:]), tmp_path / "mine" / "1.parquet")
    return f"{tmp_path / 'mine'}/"


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_files_written_by_hand(kind: str, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"token_ids": [5, 6, 7], "prompt_length": 1, "reward": 0.5},
        {"token_ids": [1, 2], "prompt_length": 2, "reward": 1},
        {"token_ids": [1, 2, 3], "prompt_length": 1, "reward": 1, "task_id": "a", "logprobs": [-0.5, -1], "note": "x"},
        {"token_ids": [9, 2, 3], "prompt_length": 2, "reward": 2, "task_id": "b", "action_mask": [False]},
        {"token_ids": [1, 2, 4], "prompt_length": 1, "reward": 0, "task_id": "a", "version_spans": [[3, 0, 2]]},
    ]
    read = Place(_by_hand(tmp_path, rows, kind), "mine").read()
    assert [group.task.task_id for group in read] == ["mine/0", "mine/1", "a", "b"]
    first, second = read[2].experiences
    assert (first.reward, second.reward, first.rollout, second.rollout) == (1.0, 0.0, 0, 1)
    assert first.token_ids.dtype == np.int32
    assert first.logprobs.tolist() == [-0.5, -1.0]
    assert first.logprobs.dtype == second.logprobs.dtype == np.float32
    assert second.logprobs.tolist() == [0.0, 0.0]
    assert second.version_spans == (VersionSpan(3, 0, 2),)
    assert first.version_spans == (VersionSpan(0, 0, 2),)
    assert first.action_mask.tolist() == [True, True]
    assert read[3].experiences[0].action_mask.tolist() == [False]
    assert read[1].experiences[0].response_length == 0
    for group in read:
        group.check()


_GOOD = {"token_ids": [1, 2, 3], "prompt_length": 1, "reward": 1.0}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"reward": None},
            "column reward: is missing; needed are token_ids, prompt_length, reward, there are token_ids",
        ),
        ({"reward": "high"}, "column reward: is 'high', must be a number"),
        ({"reward": float("nan")}, "experience.reward: is nan, must be finite"),
        ({"token_ids": [1.5, 2, 3]}, r"column token_ids: is .*, must be a list of ids \(int32\)"),
        ({"token_ids": [1, 2, 2**31]}, r"column token_ids: has 2147483648, must be a list of ids \(int32\)"),
        ({"token_ids": [1, 2, -3]}, "experience.token_ids: has -3; ids are >= 0"),
        ({"token_ids": "1 2 3"}, "column token_ids: is '1 2 3', must be a list"),
        ({"token_ids": []}, r"experience.prompt_length: is 1, must be in \[1, 0\]"),
        ({"prompt_length": 0}, r"experience.prompt_length: is 0, must be in \[1, 3\]"),
        ({"prompt_length": 1.0}, "column prompt_length: is 1.0, must be a whole number"),
        ({"logprobs": [-1.0]}, "experience.logprobs: has 1 elements, the response has 2 tokens"),
        ({"logprobs": [0.5, 0.0]}, "experience.logprobs: has 0.5; log-probabilities are finite and <= 0"),
        ({"logprobs": ["a", "b"]}, "column logprobs: is .*, must be a list of numbers"),
        ({"action_mask": [1, 2]}, "column action_mask: has 2, must be a list of true or false"),
        (
            {"version_spans": [[0, 0]]},
            "column version_spans: has .0, 0., must be .version, first token, one past the last",
        ),
        ({"truncation": 9}, "column truncation: is 9, must be 1"),
        ({"task_id": 7}, "column task_id: is 7, must be text"),
        ({"task": "{}"}, "column task: is no trinity.api.common.v1.Task"),
        ({"metrics": "[]"}, "column metrics: is .*, must be an object"),
    ],
)
def test_wrong_rows_are_named(change: dict[str, Any], message: str, kind: str, tmp_path: Path) -> None:
    rows = [_GOOD, _GOOD, _GOOD | change]
    place = {"jsonl": "mine.jsonl line 5.*", "parquet": "mine/1.parquet row 1.*"}[kind]
    if kind == "parquet":
        rows = [_GOOD | change, _GOOD | change]
        place = "mine/0.parquet row 0.*"
    with pytest.raises(InvalidInput, match=place + message):
        read_experiences(_by_hand(tmp_path, rows, kind), "mine")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"token_ids": [1\n', "a.jsonl line 1: is not JSON"),
        ("a.jsonl", b'{"run":"x"}', "a.jsonl line 1, column token_ids: is missing"),
        ("a.jsonl", b"[1]\n", "a.jsonl line 1: is list, must be a JSON object"),
        ("a.jsonl", b"", "has no experiences"),
        ("a.parquet", b"notes", "a.parquet cannot be read as parquet"),
        ("a.db", b"notes " * 100, "file is not a database"),
        ("b.db", None, "b.db does not exist"),
        ("b.jsonl", None, "b.jsonl does not exist"),
        ("empty/", None, "does not exist"),
    ],
)
def test_files_that_cannot_be_read(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInput, match=message):
        read_experiences(f"{tmp_path}/{name}", "mine")
    assert (tmp_path / name).exists() == (content is not None)


def test_a_table_that_is_not_there_is_named(tmp_path: Path) -> None:
    open_archive(str(tmp_path / "a.db"), "mine", RUN).close()
    with pytest.raises(InvalidInput, match="has no table other; its tables are mine, mine_position"):
        read_experiences(str(tmp_path / "a.db"), "other")
