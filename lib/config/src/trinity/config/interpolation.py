"""Finds loops and endless expansions of ${...} before OmegaConf, which bounds neither, fills them in."""

import re
from collections.abc import Iterator
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from trinity.config.errors import Problem

_LONGEST = 1_000_000
_DEEPEST = 100
# The key that an interpolation without others inside names: ${a.b}, ${.b}, ${oc.select:a.b,default}.
_REFERENCE = re.compile(
    r"(?<!\\)\$\{\s*(?:oc\.(?:select|dict\.values|dict\.keys):\s*)?(\.*[^\s:,${}]+)\s*(?:,[^{}]*)?\}"
)
_VARIABLE = re.compile(r"Environment variable '([^']*)' not found")


def interpolation_problems(document: dict[str, Any]) -> Iterator[Problem]:
    """Finds values that name themselves, or that grow beyond a megabyte."""
    sizes: dict[str, int] = {}
    try:
        for path in document:
            _size(document, [str(path)], sizes, [])
    except _Refused as refused:
        yield refused.problem


def resolution_problem(error: OmegaConfBaseException | RecursionError) -> Problem:
    """Rewords OmegaConf's error about an interpolation that it cannot fill in."""
    if isinstance(error, RecursionError):
        found = re.search(r"full_key: (\S+)", str(error))
        return Problem(found[1] if found else "", "has brackets inside of ${...} that are nested too deeply")
    path = str(getattr(error, "full_key", "") or "").replace("[", ".").replace("]", "").removeprefix(".")
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    if variable := _VARIABLE.search(message):
        name = variable[1]
        return Problem(path, f"names the environment variable {name}, which is not set; set it, or give a default: "
                       f"${{oc.env:{name},DEFAULT}}")  # fmt: skip
    if "MissingMandatory" in type(error).__name__:
        return Problem(path, "is '???', which stands for a missing value; give one")
    message = message.partition("raised while resolving interpolation: ")[2] or message
    return Problem(path, f"cannot be filled in: {message}; write ${{oc.env:VARIABLE,DEFAULT}} or ${{key.path}}")


class _Refused(Exception):
    def __init__(self, path: list[str], message: str) -> None:
        self.problem = Problem(".".join(path), message)


def _size(document: Any, path: list[str], sizes: dict[str, int], above: list[str]) -> int:
    """Counts the characters of a value with everything filled in. `above`: key paths that are being measured."""
    key = ".".join(path)
    if key in sizes:
        return sizes[key]
    if key in above:
        loop = " -> ".join([*above[above.index(key) :], key][-5:])
        raise _Refused(path, f"refers to itself: {loop}")
    if len(above) > _DEEPEST:
        raise _Refused(path, f"is filled in by more than {_DEEPEST} keys, one out of the other")
    value = _value(document, path)
    if isinstance(value, dict | list):
        names = value if isinstance(value, dict) else range(len(value))
        size = sum(_size(document, [*path, str(name)], sizes, [*above, key]) for name in names)
    elif isinstance(value, str) and "${" in value:
        targets = [_target(path, name) for name in _REFERENCE.findall(value)]
        size = len(value) + sum(_size(document, target, sizes, [*above, key]) for target in targets)
    else:
        size = len(str(value))
    if size > _LONGEST:
        raise _Refused(path, f"grows to {size:,} characters when it is filled in, may have {_LONGEST:,}")
    sizes[key] = size
    return size


def _target(path: list[str], name: str) -> list[str]:
    """The key path that a name stands for in the value at `path`; leading dots count sections upwards."""
    dots = len(name) - len(name.lstrip("."))
    parts = [part for part in name.replace("[", ".").replace("]", "").split(".") if part]
    return [*path[: len(path) - dots], *parts] if dots else parts


def _value(document: Any, path: list[str]) -> Any:
    """Returns the value at a path, or None."""
    for part in path:
        if isinstance(document, dict):
            document = document.get(part)
        elif isinstance(document, list) and part.isdigit() and int(part) < len(document):
            document = document[int(part)]
        else:
            return None
    return document
