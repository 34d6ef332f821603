"""Problems of a configuration: all at once, each with its place and the fix."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

_CREDENTIALS = re.compile(r"(\w://)[^/\s]*@")  # as in trinity.runtime.logs, which this library does not import
_LONGEST_PATH, _LONGEST_MESSAGE = 200, 1_000
_MOST_PROBLEMS = 50
OF_PLUGINS = "(one of a plugin needs its folder: --plugin-dir FOLDER)"  # after the names of a registry
OVERRIDE = -1  # in place of a line: the value is from the command line


@dataclass(frozen=True)
class Problem:
    """One problem. `path` is the key path ("buffer.batch_size"), `line` counts from 1 (0: not known), or OVERRIDE."""

    path: str
    message: str
    line: int = 0

    def __str__(self) -> str:
        place = "override " if self.line == OVERRIDE else f"line {self.line}: " if self.line else ""
        message = _short(self.message, _LONGEST_MESSAGE)
        return f"{place}{_short(self.path, _LONGEST_PATH)}: {message}" if self.path else f"{place}{message}"


def without_credentials(text: str) -> str:
    """The text, with *** for the user, password or token of each URL in it."""
    return _CREDENTIALS.sub(r"\1***@", text)


def _short(text: str, longest: int) -> str:
    """Removes credentials, and the middle of a text of more than `longest` characters."""
    text, half = without_credentials(text), longest // 2
    return text if len(text) <= longest else f"{text[:half]} ... {text[-half:]}"


def did_you_mean(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """Suggests known names that are similar to `name`; returns `otherwise` without one, by default all known names."""
    options = {one.lower(): one for one in sorted(known)}
    if near := difflib.get_close_matches(name.lower(), options, n=3):
        return f"did you mean {' or '.join(repr(options[one]) for one in near)}?"
    return f"known: {', '.join(options.values()) or 'none'}" if otherwise is None else otherwise


class ConfigError(ValueError):
    """The configuration cannot be used."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self.source = source
        self.problems = problems[:_MOST_PROBLEMS]
        if more := len(problems) - _MOST_PROBLEMS:
            self.problems += [Problem("", f"and {more} more problems", problems[-1].line)] if more > 0 else []
        super().__init__("\n".join(f"{source}: {problem}" for problem in self.problems))
