"""Imports changed plugin files again, in a process that has loaded their former versions."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trinity import plugins
from trinity.plugins.declarations import REGISTRIES


def reload(folders: Sequence[str | Path]) -> None:
    """Removes the names that files of these folders registered, and loads the folders again. Raises PluginError."""
    for folder in folders:
        _forget(Path(folder).expanduser().resolve())
    plugins.load(folders)


def _forget(folder: Path) -> None:
    gone = {path.stem for path in folder.glob("*")}
    for name in [name for name, module in sys.modules.items() if _is_below(module, folder)]:
        gone.add(name)
        del sys.modules[name]
    registries: list[dict[str, Any]] = [
        plugins.REWARD_FUNCTIONS,
        plugins.WORKFLOWS,
        plugins.ENVIRONMENTS,
        plugins.EXPERIENCE_OPERATORS,
        plugins._TOOL_FUNCTIONS,
    ]
    for registry in registries:
        _remove(registry, [name for name, one in registry.items() if one.__module__ in gone])
    for declared in REGISTRIES.values():
        _remove(declared, [name for name, one in declared.items() if one.module in gone])
    _remove(plugins.TOOLS, [name for name, one in plugins.TOOLS.items() if one.function.__module__ in gone])
    plugins.GROUP_REWARD_FUNCTIONS.intersection_update(plugins.REWARD_FUNCTIONS)


def _is_below(module: Any, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and Path(file).is_relative_to(folder)


def _remove(registry: dict[str, Any], names: Sequence[str]) -> None:
    for name in names:
        del registry[name]
