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
    for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        package = entry.dist.name if entry.dist else "an unknown package"
        where = f"entry point {entry.name} = {entry.value} of {package} ({GROUP})"
        try:
            kind = entry.load()
        except (Exception, SystemExit) as error:  # a package may raise anything
            reason = " ".join(str(error).split())
            raise PluginError(f"{where}: {type(error).__name__}: {reason}; mend or remove {package}") from error
        if problem := environment_problem(kind):
            raise PluginError(f"{where} {problem}")
        described = getattr(getattr(kind, "description", None), "name", None)
        if described != entry.name:
            raise PluginError(f"{where} describes itself as {described!r}; give class and entry point one name")
        if entry.name in found:
            raise PluginError(f"{where}: another package offers an environment of this name; remove one of them")
        found[entry.name] = kind
    return found
