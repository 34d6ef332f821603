"""Every group comes back unchanged and once from every kind of archive, however the writer ends."""

import dataclasses
import itertools
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from support.fakes.data.archives import KINDS, RUN, Place, groups_of, the_same
from support.fakes.data.experience import make_task
from support.servers.postgres import PostgresServer
from trinity.archive import Archive, open_archive
from trinity.archive.rows import COLUMNS
from trinity.data.experience import Experience, Group, SamplingParams, TaskKind, Truncation, VersionSpan
from trinity.data.images import PlacedImage
from trinity.runtime.errors import Conflict, InvalidInput, Unavailable

pytestmark = pytest.mark.core

# Random groups: any text a model can write, any float32 a tensor can hold.

_texts = st.text(
    st.one_of(st.sampled_from('\0\n\u2028␀"\\,{}0'), st.characters(exclude_categories=["Cs"])), max_size=12
)
_int64 = st.integers(-(2**63), 2**63 - 1)


@st.composite
def experiences(draw: st.DrawFn, index: int, of_task: tuple[bytes, ...] = ()) -> Experience:
    prompt, response = draw(st.integers(1, 3)), draw(st.integers(0, 6))
    half = response // 2
    spans = (
        (VersionSpan(draw(st.integers(0, 2**62)), 0, half), VersionSpan(2**62, half, response, "fp8")) if half else ()
    )
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=prompt + response, max_size=prompt + response))
    bits = draw(st.lists(st.integers(0, 2**32 - 1), min_size=response, max_size=response))
    taught = draw(st.none() | st.lists(st.floats(-90, 0, width=32), min_size=response, max_size=response))
    files = st.lists(st.sampled_from([*of_task, b"a", b"\0\xff"]), max_size=2)
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
        teacher_logprobs=None if taught is None else np.array(taught, dtype=np.float32),
        prompt_text=draw(_texts),
        response_text=draw(_texts),
        images=tuple(PlacedImage(draw(st.integers(0, 2**31 - 1)), file) for file in draw(files)),
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    task = make_task(
        draw(st.integers(1, 2**62)),
        task_id=draw(_texts) or "x",
        row_json=draw(_texts),
        kind=draw(st.sampled_from(list(TaskKind))),
        sampling=SamplingParams(seed=draw(st.none() | _int64), stop=tuple(draw(st.lists(_texts, max_size=2)))),
        timeout_seconds=draw(st.floats(1e-300, 1e9)),
        images=tuple(draw(st.lists(st.binary(max_size=5), max_size=2))),
    )
    members = tuple(draw(experiences(index, task.images)) for index in range(draw(st.integers(1, 3))))
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
    left_out = {"routes", "teacher_top"}  # gates choose where routes are missing; a loss refuses a missing top
    assert fields - left_out <= set(COLUMNS)
    of_group = {field.name for field in dataclasses.fields(Group)} - {"experiences"}
    assert of_group <= set(COLUMNS)  # the task's fields go through protobuf: see `groups`


def _make_older(place: Place, kind: str) -> None:
    """Takes the column `images` out of an archive whose experiences have none."""
    path = Path(place.path.removeprefix("sqlite:///"))
    if kind == "jsonl":
        text = path.read_text()
        assert text.count(',"images":[]}') == text.count("\n")
        path.write_text(text.replace(',"images":[]}', "}"))
    elif kind == "parquet":
        for part in path.glob("*.parquet"):
            parquet.write_table(parquet.read_table(part).drop_columns(["images"]), part)
    else:
        engine = sa.create_engine(place.path.replace("postgresql://", "postgresql+psycopg://"))
        with engine.begin() as connection:
            connection.exec_driver_sql(f'ALTER TABLE "{place.name}" DROP COLUMN images')
        engine.dispose()


@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_without_the_column_of_images_is_read_and_continued(
    new_place: Callable[[], Place], kind: str
) -> None:
    place, (old, new) = new_place(), (groups_of(1), groups_of(2))
    archive = place.open()
    archive.append(old, position=1)
    archive.close()
    _make_older(place, kind)
    assert the_same(place.read(), old)
    archive = place.open()
    assert archive.position() == 1
    shown = [dataclasses.replace(one, images=(PlacedImage(3, b"file"),)) for one in new[0][1].experiences]
    new = [(2, dataclasses.replace(new[0][1], experiences=tuple(shown)))]
    archive.append(new, position=2)
    archive.close()
    assert the_same(place.read(), [*old, *new])
    again = place.open()
    assert again.position() == 2
    again.close()


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
sys.path.insert(0, sys.argv[1])
from support.fakes.data.archives import Place, groups_of
archive = Place(*sys.argv[2:]).open()
while True:
    start = archive.position() + 1
    archive.append(groups_of(*range(start, start + 3), response=2000), start + 2)
    print(start, flush=True)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_writer_leaves_whole_groups(new_place: Callable[[], Place], repository: Path) -> None:
    place = new_place()
    command = [sys.executable, "-c", _WRITER, str(repository / "tests"), place.path, place.name]
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
