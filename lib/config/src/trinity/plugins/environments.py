"""Environments that installed packages offer by entry points of the group `trinity.environments`.

    [project.entry-points."trinity.environments"]
    dice = "dice_games:Dice"

The name is the one that tasks use, and the class derives from `trinity.sdk.Environment`. The environment service plays
such a class like its own; `trinity check` names it. The built-in environments need no entry points: the service imports
them, so that a source checkout works without being installed again.
"""

import importlib.metadata
from typing import Any

from trinity.plugins.arguments import PluginError
from trinity.plugins.contract import environment_problem

GROUP = "trinity.environments"


def installed_environments() -> dict[str, Any]:
    """Environment classes by name. Raises PluginError that names the entry point, its package and what is wrong."""
    found: dict[str, Any] = {}
    for entry in entries():
        kind = load_entry(entry)
        if entry.name in found:
            raise PluginError(
                f"{_where(entry)}: another package offers an environment of this name; remove one of them"
            )
        found[entry.name] = kind
    return found


def entries() -> list[importlib.metadata.EntryPoint]:
    """All entry points of the group, by name."""
    return sorted(importlib.metadata.entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value))


def load_entry(entry: importlib.metadata.EntryPoint) -> Any:
    """The class of an environment. Raises PluginError as `installed_environments` does."""
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
