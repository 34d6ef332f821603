"""Tables lose nothing: not in a pipe, not in a narrow terminal, and not by what a model wrote."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from trinity.inspect import dead_letters, explorers, versions
from trinity.modes import bench
from trinity.reading.render import table, to_json, when
from trinity.reading.wire import Letter, Member, VersionRow

pytestmark = pytest.mark.core

LETTER = Letter(7, "gsm8k/0/" + "7" * 30, "environment_error", 3, "RuntimeError: " + "no room " * 30, 1.7e9)
MEMBER = Member(
    "explorer-on-a-machine-with-a-long-name", "running", 12, 0, "folder", ["folder"], "bfloat16", 1, 1, 1234.5, 9, 0.02,
    0.001, "host.of.the.cluster.example.org", 4711, "10.0.0.1:17004", 3.0, "",
)  # fmt: skip
VERSION = VersionRow(12, 12, "LIVE", 2, 10**10, 10**7, 8, ["folder", "s3"], True, 0.01, True, 1.7e9, "", True)
RESULTS = [
    {"step": step, "taskset": "gsm8k_test_with_a_long_name", "metrics": dict.fromkeys(names, 0.5)}
    for step, names in ((0, ["accuracy/mean@1"]), (100, [f"a_metric_with_a_long_name_{n}/mean@8" for n in range(9)]))
]


@dataclass(frozen=True)
class Row:
    name: str
    value: Any
    text: str


COLUMNS = {"name": lambda row: row.name, "value": lambda row: row.value, "text": lambda row: row.text}


@pytest.fixture(params=[0, 200, 80, 40, 12])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Columns of the terminal; 0: none."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if request.param:
        monkeypatch.setenv("COLUMNS", str(request.param))
    return int(request.param)


def letters_without_space(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        (lambda: table([LETTER], dead_letters._COLUMNS), (LETTER.task_id, LETTER.cause, LETTER.error, "7", "3")),
        (
            lambda: table([MEMBER], explorers._COLUMNS),
            (MEMBER.name, "running", MEMBER.host, "4711", "20 ms"),
        ),
        (lambda: table([VERSION], versions._COLUMNS), ("LIVE", "9.3 GiB", "9.5 MiB on 8", "folder, s3", "yes")),
        (lambda: bench.render(RESULTS), ("base", "100", "gsm8k_test_with_a_long_name", *RESULTS[1]["metrics"])),
    ],
    ids=["letters", "explorers", "versions", "bench"],
)
def test_no_column_is_cut_off(text: Any, needed: tuple[str, ...], width: int) -> None:
    found = letters_without_space(text())
    assert [part for part in needed if letters_without_space(part) not in found] == []
    assert "…" not in found


def test_a_line_stays_a_line_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert len(table([LETTER, LETTER], dead_letters._COLUMNS).splitlines()) == 3


def test_the_last_column_is_folded_under_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "36")
    rows = [Row("a", 1, "four words and some more words"), Row("bbbb", 22, "short")]
    assert table(rows, COLUMNS).splitlines() == [
        "name  value  text",
        "a         1  four words and some",
        "             more words",
        "bbbb     22  short",
    ]


def test_rows_are_blocks_where_a_line_is_too_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    rows = [Row("a", 1, "longer than the room"), Row("b", 2, "")]
    assert table(rows, COLUMNS).split("\n") == [
        "name   a", "value  1", "text   longer than the room", "", "name   b", "value  2", "text",
    ]  # fmt: skip


def test_wide_letters_and_control_sequences_keep_columns_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = table([Row("数学", 1, "x"), Row("\x1b[2J", 1, "x")], COLUMNS).splitlines()
    assert lines[1:] == ["数学         1  x", r"\x1b[2J      1  x"]


def test_no_rows_are_headings_alone() -> None:
    assert table([], COLUMNS) == "name  value  text"


def test_json_has_fields_of_dataclasses_and_no_control_characters() -> None:
    text = to_json([Row("\x1b\x7f", 1.5, "t")])
    assert json.loads(text) == [{"name": "\x1b\x7f", "value": 1.5, "text": "t"}]
    assert "\x1b" not in text
    assert "\x7f" not in text


def test_json_has_null_for_what_is_no_finite_number() -> None:
    numbers = [float("nan"), float("inf"), -float("inf"), 1e-7, 1]
    assert json.loads(to_json([Row("NaN", numbers, "Infinity")]), parse_constant=pytest.fail) == [
        {"name": "NaN", "value": [None, None, None, 1e-7, 1], "text": "Infinity"}
    ]


def test_a_number_that_is_no_time_is_shown_as_it_is() -> None:
    assert [when(seconds) for seconds in (0.0, 1e308, float("nan"), -1e308)] == ["-", "1e+308", "nan", "-1e+308"]
