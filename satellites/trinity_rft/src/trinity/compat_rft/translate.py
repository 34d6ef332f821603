"""Takes the keys of Trinity-RFT and veRL out of a document; the tables are in trinity.compat_rft.tables.

The core reaches `translate`, `known_names` and `NOT_HERE` by the hook `foreign_keys` (trinity.plugins.satellites).
"""

import difflib
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from trinity.compat_rft.correction import MEANINGS, translated
from trinity.compat_rft.tables import (
    FOREIGN_SECTIONS,
    IGNORED,
    NOT_HERE,
    OFF,
    RENAMED,
    SAME,
    UNSUPPORTED,
    VALUES,
)
from trinity.config.plan import SECTIONS

__all__ = ["NOT_HERE", "known_names", "translate"]

# Values that ask for nothing: of any key, and inside sections that are refused whole, whose sizes of 1 are defaults.
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
_DEFAULTS: tuple[Any, ...] = (*_NOTHING, 0, 0.0, 1, 1.0, "none", "auto", "disabled")


@dataclass(frozen=True)
class Notice:
    """A key that is taken, but not as it stands."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


@dataclass(frozen=True)
class Translation:
    """The document with only our keys, the notices, and the refusals: (key path, reason)."""

    values: dict[str, Any]
    notices: list[Notice]
    refused: list[Notice]
    # Sections of stages that exist only because of an old name, and otherwise inherit the run's.
    inherited: set[str] = field(default_factory=set)


def translate(document: dict[str, Any]) -> Translation:
    """Take the keys of the tables out of a document, the sections of stages included."""
    result = Translation(deepcopy(document), [], [])
    stages = result.values.get("stages")
    for stage in [result.values, *(stages if isinstance(stages, list) else [])]:
        if isinstance(stage, dict):
            prefix = "" if stage is result.values else f"stages.{stages.index(stage)}."  # type: ignore[union-attr]
            _translate(stage, prefix, result)
    return result


def _translate(values: dict[str, Any], prefix: str, result: Translation) -> None:
    _correction(values, prefix, result)
    for pattern, names in VALUES.items():
        for holder, path in _holders(values, pattern.split("."), ""):
            _rename_value(holder, f"{prefix}{path}", names, result)
    for pattern, (same, reason) in SAME.items():
        for holder, path in list(_holders(values, pattern.split("."), "")):
            _same(holder.pop(path.rpartition(".")[2]), f"{prefix}{path}", same, reason, result)
    for table, take in ((RENAMED, _rename), (UNSUPPORTED, _refuse), (IGNORED, _ignore)):
        for pattern, what in table.items():
            whole = pattern.endswith(".**")
            parts = pattern.removesuffix(".**").split(".")
            for holder, path in list(_holders(values, parts, "")):
                value = holder.pop(path.rpartition(".")[2])
                take(values, prefix, path, value, what, whole, result)
    for section in FOREIGN_SECTIONS:
        _prune(values, section.split("."), prefix, result)


def _correction(values: dict[str, Any], prefix: str, result: Translation) -> None:
    """Keys of veRL's rollout_correction in Trinity-RFT's, and its bypass_old_logprobs, which says bypass_mode."""
    algorithm = values.get("algorithm")
    if not isinstance(algorithm, dict):
        return
    section = algorithm.get("rollout_correction")
    names = {key: f"rollout_correction.{key}" for key in MEANINGS}
    theirs = {key: section.pop(key) for key in MEANINGS if key in section} if isinstance(section, dict) else {}
    if "bypass_old_logprobs" in algorithm:
        bypass = algorithm.pop("bypass_old_logprobs")
        if theirs.setdefault("bypass_mode", bypass) != bypass:
            message = f"is {bypass!r}, but rollout_correction.bypass_mode is {theirs['bypass_mode']!r}; give one"
            result.refused.append(Notice(f"{prefix}algorithm.bypass_old_logprobs", message))
        names["bypass_mode"] = "bypass_old_logprobs"
    if not theirs:
        return
    found = translated(theirs)
    if section is None:
        section = algorithm["rollout_correction"] = {}
    for ours, value in found.values.items():
        if section.setdefault(ours, value) != value:
            message = f"is {section[ours]!r}, but keys of veRL in this section ask for {value!r}; give one of them"
            result.refused.append(Notice(f"{prefix}algorithm.rollout_correction.{ours}", message))
    for key, why in found.refused.items():
        result.refused.append(Notice(f"{prefix}algorithm.{names[key]}", f"is {theirs.get(key)!r}: {why}"))
    for key, what in found.taken.items():
        result.notices.append(Notice(f"{prefix}algorithm.{names[key]}", what))


def _holders(node: Any, parts: list[str], at: str) -> Iterator[tuple[dict[str, Any], str]]:
    """(mapping that holds the last part, whole path) of every place a pattern matches."""
    if len(parts) == 1:
        if isinstance(node, dict) and parts[0] in node:
            yield node, f"{at}{parts[0]}"
        return
    if parts[0] == "*" and isinstance(node, list | dict):
        for name, item in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _holders(item, parts[1:], f"{at}{name}.")
    elif isinstance(node, dict) and parts[0] in node:
        yield from _holders(node[parts[0]], parts[1:], f"{at}{parts[0]}.")


def _rename_value(holder: dict[str, Any], path: str, names: dict[str, str], result: Translation) -> None:
    key = path.rpartition(".")[2]
    value = holder[key]
    if not isinstance(value, str):
        return
    holder[key] = value.lower()
    if value.lower() in names:
        holder[key] = names[value.lower()]
        result.notices.append(Notice(path, f"{value} is an old name of {holder[key]}"))


def _rename(
    values: dict[str, Any], prefix: str, path: str, value: Any, new: str, whole: bool, result: Translation
) -> None:
    if value is None:
        return
    target: Any = values
    old, names = path.split("."), new.split(".")
    if prefix and names[0] not in SECTIONS:
        result.refused.append(Notice(f"{prefix}{path}", f"is of the whole run; give {new}, outside of stages"))
        return
    section = f"{prefix}{names[0]}"
    if prefix and not values.get(names[0]):  # a section given in a stage replaces the inherited one whole
        values[names[0]] = deepcopy(result.values.get(names[0]) or {})
        result.inherited.add(section)
    target = _holder(values, old, names)
    if section not in result.inherited and names[-1] in target and target[names[-1]] != value:
        result.refused.append(
            Notice(f"{prefix}{path}", f"is {value!r}, but {prefix}{new} is {target[names[-1]]!r}; give one")
        )
        return
    target[names[-1]] = value
    result.notices.append(Notice(f"{prefix}{path}", f"is an old name of {new}"))


def _holder(target: Any, old: list[str], names: list[str]) -> dict[str, Any]:
    """Returns the mapping of the last of `names`, and makes a missing one; the schema refuses any other value."""
    for position, name in enumerate(names[:-1]):
        if name == "*":
            target = target[old[position] if isinstance(target, dict) else int(old[position])]
            continue
        if target.get(name) is None:
            target[name] = {}
        target = target[name]
        if not isinstance(target, dict | list):
            return {}
    return target


def _ignore(
    values: dict[str, Any], prefix: str, path: str, value: Any, reason: str, whole: bool, result: Translation
) -> None:
    result.notices.append(Notice(f"{prefix}{path}", f"has no effect: {reason}"))


def _refuse(
    values: dict[str, Any], prefix: str, path: str, value: Any, reason: str, whole: bool, result: Translation
) -> None:
    pattern = ".".join("*" if part.isdigit() else part for part in path.split("."))
    off = _DEFAULTS if whole else OFF.get(pattern, _NOTHING)
    if _asks_for_nothing(value, off):
        result.notices.append(Notice(f"{prefix}{path}", "asks for nothing and has no effect"))
    else:
        shown = "" if isinstance(value, dict | list) else f"is {value!r}: "
        result.refused.append(Notice(f"{prefix}{path}", f"{shown}{reason}; remove it"))


def _same(value: Any, path: str, names: tuple[str, ...], reason: str, result: Translation) -> None:
    """A key that names a part: without effect if it means what Trinity has, and refused if not."""
    if value is None or (isinstance(value, str) and value.lower() in names):
        result.notices.append(Notice(path, f"has no effect: {reason}"))
    else:
        result.refused.append(Notice(path, f"is {value!r}: {reason}; remove it, or write {' or '.join(names)}"))


def _asks_for_nothing(value: Any, off: tuple[Any, ...]) -> bool:
    if isinstance(value, dict):
        if value.get("enable") is False:
            return True
        return all(_asks_for_nothing(item, off) for item in value.values())
    return any(value == nothing and type(value) is type(nothing) for nothing in off)


def _prune(values: dict[str, Any], parts: list[str], prefix: str, result: Translation) -> None:
    """Removes a section that the schema does not have, and refuses the keys that are still in it."""
    holder: Any = values
    for part in parts[:-1]:
        holder = holder.get(part) if isinstance(holder, dict) else None
    if isinstance(holder, dict) and parts[-1] in holder:
        for path, known in _unknown(holder.pop(parts[-1]), parts):
            name = path[-1]
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
            message = "must be a mapping" if name in known else f"unknown key; {hint}"
            result.refused.append(Notice(prefix + ".".join(path), message))


def _unknown(node: Any, at: list[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Yields (path, known names of its section) of keys in no table. Sections that are empty by now were known."""
    if not isinstance(node, dict):
        if node is not None:
            yield at, known_names(at[:-1])
        return
    known = known_names(at)
    for name, child in node.items():
        if name not in known:
            yield [*at, str(name)], known
        elif child is not None:
            yield from _unknown(child, [*at, str(name)])


def known_names(at: list[str]) -> list[str]:
    """Names that the tables know in the section at a path."""
    found = set()
    for path in (*RENAMED, *IGNORED, *UNSUPPORTED, *SAME):
        names = path.split(".")
        if names[: len(at)] == at and len(names) > len(at) and names[len(at)] != "**":
            found.add(names[len(at)])
    return sorted(found)
