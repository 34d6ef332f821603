"""docs/development/when_vllm_moves.md from the list of private names, and a look at a version that is not installed.

Run in tests/: `python -m support.symbols.when_vllm_moves` writes the page (part of `make docs`). With
`--sources FOLDER --library vllm --version 0.33.0` it says what an unpacked wheel lacks, and exits with 1.
"""

import argparse
import re
import sys
from pathlib import Path
from textwrap import fill

from support.symbols.private_symbols import BORDERS, Border
from support.symbols.symbols_in_sources import parse, problem_of

PAGE = Path(__file__).parents[3] / "docs/development/when_vllm_moves.md"
HEADING = "## The names"


def section() -> str:
    """The part of the page that follows from the list."""
    lines = [
        HEADING,
        "",
        "`make docs` writes this part from the list, which also has the parameters that are passed.",
        "",
    ]
    for border in BORDERS:
        lines += [f"### {border.title}", "", _wrapped(border.look_at), ""]
        lines += [_wrapped(f"Used in {_listed(border.used_in)}. Tests: {_listed(border.tests)}."), ""]
        lines += [*_names(border), ""]
    return "\n".join(lines).rstrip() + "\n"


def _names(border: Border) -> list[str]:
    """One item for each module."""
    modules: dict[str, list[str]] = {}
    for name in border.names:
        module, _, path = name.partition(":")
        modules.setdefault(module, []).append(path)
    return [_wrapped(f"- `{module}`: " + ", ".join(map(_shown, names)), "  ") for module, names in modules.items()]


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _shown(name: str) -> str:
    """`Class.method` without its parameters, and the versions behind it."""
    name = re.sub(r"\(.*\)", "", name)
    for word in (" since ", " until "):
        path, found, version = name.partition(word)
        if found:
            return f"`{path}`{word}{version}"
    return f"`{name}`"


def _wrapped(text: str, indent: str = "") -> str:
    return fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def main() -> None:
    """Write the page, or say what an unpacked wheel lacks."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--sources", type=Path, help="a folder that has the library's package")
    parser.add_argument("--library", default="vllm")
    parser.add_argument("--version", help="of the sources")
    options = parser.parse_args()
    if options.sources is None:
        before, _, _ = PAGE.read_text(encoding="utf-8").partition(HEADING)
        PAGE.write_text(before + section(), encoding="utf-8")
        return
    if options.version is None:
        parser.error("--sources needs --version")
    missing = [
        f"{name}: {problem}"
        for border in BORDERS
        for name in border.names
        if name.startswith((f"{options.library}.", f"{options.library}:")) and parse(name).exists_in(options.version)
        if (problem := problem_of(name, options.sources)) is not None
    ]
    sys.exit("\n".join(missing) or None)


if __name__ == "__main__":
    main()
