"""The Chinese pages show the commands and name the keys that the English ones do."""

import re
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from trinity.cli.main import app

pytestmark = pytest.mark.core

PAGES = {
    "README.zh.md": "README.md",
    "docs/zh/quick_start.md": "README.md",
    "docs/zh/guarantees.md": "docs/guarantees.md",
    "docs/zh/async.md": "docs/modes.md",
    "docs/zh/r3l.md": "examples/R3L/README.md",
    "docs/zh/configuration.md": "docs/configuration.md",
    "docs/zh/tinker.md": "docs/tinker.md",
}
_BLOCK = re.compile(r"^```\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(r"\]\(([^)#:]+)[^)]*\)")
_KEY = re.compile(r"`([a-z_]+(?:\.[a-z_0-9]+)+)`")


def commands(page: Path) -> list[str]:
    """Returns the lines of the page's code blocks without a language, without comments."""
    lines = [line for block in _BLOCK.findall(page.read_text()) for line in block.splitlines()]
    return [line for line in (re.sub(r"\s+#.*", "", line).rstrip() for line in lines) if line]


def test_every_chinese_page_has_its_english_one(repository: Path) -> None:
    found = {str(page.relative_to(repository)) for page in (repository / "docs/zh").glob("*.md")}
    assert found | {"README.zh.md"} == set(PAGES)


def test_both_readmes_show_the_same_commands(repository: Path) -> None:
    english = commands(repository / "README.md")
    assert english
    assert commands(repository / "README.zh.md") == english


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_one_of_the_english_page(page: str, repository: Path) -> None:
    assert set(commands(repository / page)) <= set(commands(repository / PAGES[page]))


def test_both_pages_on_explorers_apart_show_the_same_commands(repository: Path) -> None:
    english = (repository / "docs/modes.md").read_text()
    shown = english[english.index("## train and explore") : english.index("## On several machines")]
    blocks = "".join(_BLOCK.findall(shown))
    assert commands(repository / "docs/zh/async.md") == [
        re.sub(r"\s+#.*", "", line).rstrip() for line in blocks.splitlines() if line
    ]


def test_keys_of_the_guide_are_keys_of_the_reference(repository: Path) -> None:
    section, keys = "", set[str]()
    for line in (repository / "docs/configuration.md").read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ").strip("` ")
        elif found := re.match(r"- `([a-z_0-9.]+)`", line):
            keys.add(f"{section}.{found[1]}")
    used = set(_KEY.findall((repository / "docs/zh/configuration.md").read_text()))
    assert len(used) > 20
    assert used <= keys, used - keys


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere_and_lines_are_short(page: str, repository: Path) -> None:
    text = (repository / page).read_text()
    for link in _LINK.findall(text):
        assert ((repository / page).parent / link).exists(), link
    assert not [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")]


def test_both_pages_of_guarantees_name_the_same_tests_which_are_there(repository: Path) -> None:
    english, chinese = (re.findall(r"\(((?:\.\./)+[a-z_/]+\.py)\)", (repository / page).read_text())
                        for page in ("docs/guarantees.md", "docs/zh/guarantees.md"))  # fmt: skip
    assert len(english) > 15 and [f"../{test}" for test in english] == chinese
    assert [test for test in english if not (repository / "docs" / test).is_file()] == []


def test_both_readmes_have_the_same_sections_and_rows(repository: Path) -> None:
    english, chinese = ((repository / page).read_text() for page in ("README.md", "README.zh.md"))
    assert re.findall(r"^\| (`[^`]+`) \|", chinese, re.MULTILINE) == re.findall(
        r"^\| (`[^`]+`) \|", english, re.MULTILINE
    )
    assert chinese.count("\n## ") == english.count("\n## ")


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_table_of_commands_has_each(page: str, repository: Path) -> None:
    """Also those of groups: `weights list|show` is two."""
    shown = set[str]()
    for row in re.findall(r"^\| `([^`]+)` \|", (repository / page).read_text(), re.MULTILINE):
        *above, last = re.findall(r"^[a-z-]+(?: [a-z][a-z|-]*)*", row.replace("\\|", "|"))[0].split()
        shown |= {" ".join([*above, one]) for one in last.split("|")}
    root = get_command(app)
    assert isinstance(root, TyperGroup)
    context = root.make_context("trinity", ["check"], resilient_parsing=True)
    commands = [(name, root.resolve_command(context, [name])[1]) for name in root.list_commands(context)]
    for name, command in commands:
        commands += [(f"{name} {below}", one) for below, one in getattr(command, "commands", {}).items()]
    assert {name for name, command in commands if not isinstance(command, TyperGroup)} - shown == set()
