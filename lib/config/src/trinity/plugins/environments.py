"""Environments and scoring functions that installed distributions offer by entry points.

    [project.entry-points."trinity.environments"]
    dice = "dice_games:Dice"

Tasks use the name, and the class derives from `trinity.sdk.Environment`. The built-in environments are
those of trinity-environments, whose group `trinity.scorers` has the built-in scoring functions. The environment service
plays a class of another distribution as it plays its own; `trinity check` names it.
"""

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from trinity.plugins.arguments import PluginError

GROUP = "trinity.environments"
SCORERS = "trinity.scorers"


@dataclass(frozen=True)
class Offer:
    """One environment. `package` and `version` say what plays it; both are empty if nothing else is needed.

    `problem`: why it cannot be played on this machine; empty if it can.
    """

    name: str
    source: str
    package: str
    version: str
    problem: str


@cache
def built_in_environments() -> dict[str, Any]:
    """Returns the classes of trinity-environments by name."""
    return {entry.name: entry.load() for entry in _entries(GROUP) if _is_built_in(entry)}


@cache
def built_in_scorers() -> dict[str, Any]:
    """Returns the scoring functions of trinity-environments by name."""
    return {entry.name: entry.load() for entry in _entries(SCORERS)}


def installed_environments() -> dict[str, Any]:
    """Returns the classes of other distributions by name.

    Raises PluginError that names the entry point, its package and the problem.
    """
    found: dict[str, Any] = {}
    for entry in _entries(GROUP):
        if _is_built_in(entry):
            continue
        kind = _load(entry)
        if entry.name in found:
            raise PluginError(
                f"{_where(entry)}: another package offers an environment of this name; remove one of them"
            )
        found[entry.name] = kind
    return found


def environment_problem(kind: Any) -> str:
    """Says why a class is no environment; empty if it is one."""
    if not isinstance(kind, type) or not all(hasattr(kind, name) for name in ("reset", "step", "close", "description")):
        return "is no class with reset, step and close; derive it from trinity.sdk.Environment"
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    return f"does not define {', '.join(missing)}" if missing else ""


def unplayable(kind: Any) -> str:
    """Says why an environment cannot be played on this machine; empty if it can."""
    return str(getattr(kind, "unplayable", str)())


def offers() -> Iterator[Offer]:
    """Yields the built-in environments, then those of other distributions."""
    for name, kind in built_in_environments().items():
        package, problem = getattr(kind, "package", ""), unplayable(kind)
        version = importlib.metadata.version(package) if package and not problem else ""
        yield Offer(name, "built in", package, version, problem)
    for entry in _entries(GROUP):
        if _is_built_in(entry):
            continue
        package, version = (entry.dist.name, entry.dist.version) if entry.dist else ("", "")
        try:
            _load(entry)
            wrong = "its name is that of a built-in environment" if entry.name in built_in_environments() else ""
        except PluginError as error:
            wrong = str(error)
        yield Offer(entry.name, "installed", package, version, wrong)


def _entries(group: str) -> list[importlib.metadata.EntryPoint]:
    return sorted(importlib.metadata.entry_points(group=group), key=lambda entry: (entry.name, entry.value))


def _is_built_in(entry: importlib.metadata.EntryPoint) -> bool:
    return entry.value.startswith("trinity.environments.")


def _load(entry: importlib.metadata.EntryPoint) -> Any:
    """Returns the class of an environment. Raises PluginError as `installed_environments` does."""
    where = _where(entry)
    try:
        kind = entry.load()
    except (Exception, SystemExit) as error:  # a package may raise anything
        reason = " ".join(str(error).split())
        raise PluginError(f"{where}: {type(error).__name__}: {reason}; mend or remove {_package(entry)}") from error
    if problem := environment_problem(kind):
        raise PluginError(f"{where} {problem}")
    described = getattr(getattr(kind, "description", None), "name", None)
    if described != entry.name:
        raise PluginError(f"{where} describes itself as {described!r}; give class and entry point one name")
    return kind


def _where(entry: importlib.metadata.EntryPoint) -> str:
    return f"entry point {entry.name} = {entry.value} of {_package(entry)} ({GROUP})"


def _package(entry: importlib.metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist else "an unknown package"
