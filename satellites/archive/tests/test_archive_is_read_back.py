"""Groups read back from archives, and from files that were written by hand."""

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from support.fakes.data.archives import KINDS, RUN, Place, archived, groups_of, the_same
from trinity.archive import open_archive, read_experiences
from trinity.data.experience import VersionSpan
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core

# Reading back.


@pytest.mark.parametrize("kind", KINDS)
def test_groups_are_read_when_they_are_asked_for(new_place: Callable[[], Place]) -> None:
    place, written = new_place(), groups_of(*range(1, 41), size=4, response=4000)
    archive = place.open()
    for start in range(0, 40, 10):
        archive.append(written[start : start + 10], position=start + 10)
    archive.close()
    read_experiences(place.path, place.name).close()  # so that all lazy imports are done
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
    lines = archived(tmp_path, 1, 2)
    file = tmp_path / "buffer.jsonl"
    for length in (1, 70, len(lines[-1]) - 2):
        file.write_bytes(b"".join(lines) + lines[-1].replace(b'"log_sequence":2', b'"log_sequence":3')[:length])
        assert the_same(Place(str(file), "buffer").read(), groups_of(1, 2)), length


def test_chosen_rows_of_an_archive_are_groups(tmp_path: Path) -> None:
    lines = archived(tmp_path, 1, 2)
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
    for group in read:  # an archive written by hand names no explorer
        replace(group, explorer_id="hand").check()


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
        ({"version_spans": [[0, 0, 2, 8]]}, "column version_spans: has .0, 0, 2, 8., must be .version"),
        ({"truncation": 9}, "column truncation: is 9, must be 1"),
        ({"task_id": 7}, "column task_id: is 7, must be text"),
        ({"task": "{}"}, "column task: is no trinity.api.common.v1.Task"),
        ({"metrics": "[]"}, "column metrics: is .*, must be an object"),
        ({"images": "{}"}, "column images: is .*, must be a list"),
        ({"images": "[7]"}, r"column images: has 7, must be \[position of its first placeholder, base64\]"),
        ({"images": '[[-1, ""]]'}, "column images: has .*, must be .position"),
        ({"images": '[[1, "?"]]'}, "column images: has .*, must be base64"),
        ({"images": '[[1, "sha256:00"]]'}, "column images: has .*, which is no image of the row's task"),
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


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_step_that_a_group_has_twice_is_refused(kind: str, tmp_path: Path) -> None:
    """Advantages would take two trials for one."""
    of_a = _GOOD | {"task_id": "a", "rollout": 0}
    rows = [of_a, of_a | {"step": 1}, of_a | {"task_id": "b"}, of_a]
    place = {"jsonl": "mine.jsonl line 7", "parquet": "mine/1.parquet row 1"}[kind]
    with pytest.raises(InvalidInput, match=f"{place}, column rollout: is 0, and its group has step 0 of that rollout"):
        read_experiences(_by_hand(tmp_path, rows, kind), "mine")
    assert len(read_experiences(_by_hand(tmp_path, [*rows[:3], of_a | {"rollout": 1}], kind), "mine")) == 2


def test_an_archive_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    lines = archived(tmp_path, 1, 2)
    (tmp_path / "twice.jsonl").write_bytes(b"".join(lines * 2))
    with pytest.raises(InvalidInput, match=r"twice\.jsonl line 5, column rollout: is 0"):
        read_experiences(str(tmp_path / "twice.jsonl"), "twice")


_HALF = r"has half of a surrogate pair \(.ud800 to .udfff\); remove it"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({column: "\ud83d"}, f"column {column}: {_HALF}") for column in ("response_text", "task_id", "run", "info")),
        ({"metrics": {"\ud83d": 1.0}}, f"column metrics: {_HALF}"),
        *(
            ({column: 2**31}, f"column {column}: is 2147483648, must fit into int32")
            for column in ("rollout", "step", "attempt", "prompt_length", "index_in_group")
        ),
        ({"log_sequence": -(2**63) - 1}, "column log_sequence: is -9223372036854775809, must fit into int64"),
        ({"version_spans": [[2**63, 0, 2]]}, r"column version_spans: has version 9.*, must be below 2\*\*63 \(int64\)"),
        ({"prompt_length": -(10**13)}, "column prompt_length: is -10000000000000, must fit into int32"),
        ({"prompt_length": -(2**31)}, r"experience.prompt_length: is -2147483648, must be in \[1, 3\]"),
        ({"reward": 10**400}, r"column reward: is 1000.*\.\.\., must fit into float64"),
        ({"metrics": {"speed": 10**400}}, r"column speed: is 1000.*\.\.\., must fit into float64"),
        ({"finished_at_seconds": 10**400}, "column finished_at_seconds: is 1000.*, must fit into float64"),
        ({"log_sequence": [1]}, r"column log_sequence: is \[1\], must be a whole number"),
        ({"index_in_group": "a"}, "column index_in_group: is 'a', must be a whole number"),
        ({"run": ["r"]}, r"column run: is \['r'\], must be text"),
        ({"task": {"timeout_seconds": 10**400}}, "column task: is no trinity.api.common.v1.Task"),
        ({"task": {"\ud83d": 1}}, "column task: is no trinity.api.common.v1.Task"),
    ],
)
def test_what_no_message_can_hold_is_named_before_training(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match=f"mine.jsonl line 3.*{message}"):
        read_experiences(_by_hand(tmp_path, [_GOOD, _GOOD | change], "jsonl"), "mine")


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
