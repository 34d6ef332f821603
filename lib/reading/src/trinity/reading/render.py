"""Output of commands: rows as a table, values as JSON, and text that is safe on a terminal."""

import dataclasses
import json
import re
import shutil
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.cells import cell_len

# Control characters, the marks that turn the direction of text, separators that end a line, halves of a pair.
_UNSEEN = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_ANY = re.compile(f"[{_UNSEEN}]")
_INSIDE_TEXT = re.compile(f"(?![\n\t])[{_UNSEEN}]")
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_NUMBER = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?|nan|-|")
_GAP = "  "
_NARROWEST = 20  # characters that a folded column has at least

Row = TypeVar("Row")


def visible(text: str, *, layout: bool = False) -> str:
    r"""Escapes control characters as `\x1b`; `layout` keeps newlines and tabs."""
    return (_INSIDE_TEXT if layout else _ANY).sub(_spelt, text)


def _spelt(match: re.Match[str]) -> str:
    code = ord(match[0])
    return _SHORT.get(match[0]) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")


def near(path: Path) -> str:
    """Returns a path as a person here types it: without the current folder."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def clipped(text: str, longest: int) -> str:
    """Returns a text's beginning of at most `longest` characters, with "..." for the rest."""
    return text if len(text) <= longest else text[: longest - 3].rstrip() + "..."


def to_json(value: Any) -> str:
    """Returns JSON of plain values and dataclasses, with null for numbers that are not finite.

    DEL is escaped as well: it is the only control character that JSON passes.
    """
    finite = json.loads(json.dumps(value, default=dataclasses.asdict), parse_constant=lambda _: None)
    return json.dumps(finite, indent=1).replace("\x7f", "\\u007f")


def table(rows: Sequence[Row], columns: Mapping[str, Callable[[Row], Any]]) -> str:
    """Returns a line for each row. `columns` maps headings to functions of a row. Numbers are aligned to the right.

    Nothing is cut off. In a narrow terminal the last column is folded; if that leaves it less than _NARROWEST
    characters, each row becomes a block with a line for each column. Pipes and files have lines of any length.
    """
    cells = [[visible(str(read(row))) for read in columns.values()] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(columns, *cells, strict=True)]
    right = [all(map(_NUMBER.fullmatch, column)) for column in zip(*cells, strict=True)] or [False] * len(columns)
    limit = shutil.get_terminal_size((0, 0)).columns  # 0: no terminal
    last = limit - sum(widths[:-1]) - len(_GAP) * (len(widths) - 1) if limit else widths[-1]
    if last < min(widths[-1], _NARROWEST):
        return "\n\n".join(pairs(dict(zip(columns, line, strict=True))) for line in cells)
    lines = []
    for line in [list(columns), *cells]:
        padded = [
            " " * (width - cell_len(cell)) + cell if to_right else cell + " " * (width - cell_len(cell))
            for cell, width, to_right in zip(line[:-1], widths, right, strict=False)
        ]
        folded = textwrap.wrap(line[-1], last) if cell_len(line[-1]) > last else [line[-1]]
        lines += [_GAP.join([*padded, folded[0].rjust(widths[-1]) if right[-1] else folded[0]]).rstrip()]
        lines += [" " * (sum(widths[:-1]) + len(_GAP) * (len(widths) - 1)) + more for more in folded[1:]]
    return "\n".join(lines)


def pairs(values: Mapping[str, Any]) -> str:
    """Returns a line for each name and value."""
    width = max(map(len, values))
    return "\n".join(f"{name:<{width}}{_GAP}{visible(str(value))}".rstrip() for name, value in values.items())


def size_text(size: float) -> str:
    """Returns bytes in a suitable unit."""
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 or size >= 100 else f"{size:.1f} {_UNITS[unit]}"


def age_text(seconds: float) -> str:
    for limit, unit, length in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{max(0.0, seconds) / length:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def when(seconds: float) -> str:
    """Returns a Unix time in the local zone."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "-"
    except (ValueError, OverflowError, OSError):  # no time at all
        return f"{seconds:g}"


def losses_text(losses: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns a line for each entry of `trinity.reading.accounts.fates.losses`."""
    return [
        visible(f"{one['seconds']:.0f} s lost, {one['count']} time(s): {one['cause'] or 'the trainer died'}")
        for one in losses
    ]


def error_text(value: float | None) -> str:
    """Returns a difference of log-probabilities, in nats."""
    return "not finite" if value is None else f"{value:.2g}"
