"""The two ways of docs/architecture.md name files that exist and are used, and say how many there are."""

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

import count_ways  # noqa: E402


def test_every_file_of_the_ways_is_there_and_used() -> None:
    page = count_ways.PAGE.read_text()
    ways = [count_ways.tables(count_ways.section(page, title)) for title in count_ways.SECTIONS]
    assert [sum(map(len, way)) > 40 for way in ways] == [True, True]
    assert count_ways.problems([table for way in ways for table in way]) == []


def test_the_page_has_the_numbers_of_today() -> None:
    page = count_ways.PAGE.read_text()
    assert page == count_ways.counted(page), "run `make docs`"


@pytest.mark.parametrize(
    ("file", "problem"),
    [("weights/missing.py", "is not there"), ("data/examples.py", "nothing on the way imports")],
)
def test_a_file_that_is_not_on_the_way_is_named(file: str, problem: str) -> None:
    rows = f"**Trainer: weights** (`services/trainer`)\n\n| `main.py` | . |\n| `{file}` | . |\n"
    assert [text for text in count_ways.problems(count_ways.tables(rows)) if problem in text and file in text]
