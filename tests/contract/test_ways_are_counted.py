"""The two ways of docs/architecture.md name files that exist and are used; docs/ stays short enough to be read."""

import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import count_ways  # noqa: E402


def test_every_file_of_the_ways_is_there_and_used() -> None:
    page = count_ways.PAGE.read_text()
    ways = [count_ways.tables(count_ways.section(page, title)) for title in count_ways.SECTIONS]
    assert [sum(map(len, way)) > 40 for way in ways] == [True, True]
    assert count_ways.problems([table for way in ways for table in way]) == []


def test_the_page_has_the_numbers_of_today() -> None:
    page = count_ways.PAGE.read_text()
    assert page == count_ways.counted(page), "run `make docs`"


def test_a_way_grows_only_with_a_line_on_the_page() -> None:
    page = count_ways.PAGE.read_text()
    experience, version = map(len, count_ways.ways(page))
    for title, files, limit in zip(count_ways.SECTIONS, (experience, version), count_ways.limits(page), strict=True):
        assert files <= limit, f"{title}: write the larger number and its reason into docs/architecture.md"


@pytest.mark.parametrize(
    ("file", "problem"),
    [("weights/missing.py", "is not there"), ("data/examples.py", "nothing on the way imports")],
)
def test_a_file_that_is_not_on_the_way_is_named(file: str, problem: str) -> None:
    rows = f"**Trainer: weights** (`services/trainer`)\n\n| `main.py` | . |\n| `{file}` | . |\n"
    assert [text for text in count_ways.problems(count_ways.tables(rows)) if problem in text and file in text]


def test_docs_have_no_more_words_than_today() -> None:
    by_hand, generated = zip(*map(count_ways.words, count_ways.pages()), strict=True)
    assert sum(generated) > 5_000 and sum(by_hand) <= 44_000, "say it once, on the page where it belongs"


def test_generated_words_are_counted_apart(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Two words.\n\n<!-- x: written by `make docs` -->\n| three |\n| `4` | - |\n<!-- end of x -->\n")
    assert count_ways.words(page)[1] == 2


def test_lines_have_at_most_120_characters() -> None:
    """Tables, links to images and code may be longer, because they cannot be broken."""
    long = []
    for page in count_ways.pages():
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).splitlines()
        long += [line for line in prose if len(line) > 120 and not line.lstrip().startswith(("|", "![", "- `"))]
    assert long == []


def test_every_table_has_a_head() -> None:
    """A blank line inside a table, or rows in one line, would show as text."""
    broken = []
    for page in count_ways.pages():
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        blocks = [block for block in re.split(r"\n(?!\|)", prose) if "\n|" in block or block.startswith("|")]
        tables = [block[block.index("|") :].splitlines() for block in blocks]
        broken += [(page.name, table[0]) for table in tables if not re.fullmatch(r"\|[-| ]+\|", "".join(table[1:2]))]
    assert broken == []
