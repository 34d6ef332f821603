"""Satellites: distributions that the core finds by entry points and runs without.

A satellite offers its hooks as entry points of the group `trinity.hooks`:

    [project.entry-points."trinity.hooks"]
    foreign_keys = "trinity.compat_rft.translate"
"""

import importlib.metadata
from functools import cache
from typing import Any

GROUP = "trinity.hooks"
# The distribution that has each hook.
DISTRIBUTIONS = {
    "archive": "trinity-archive",
    "conformance": "trinity-conformance",
    "convert": "trinity-convert",
    "deep_check": "trinity-deep-check",
    "foreign_keys": "trinity-compat-rft",
    "modes": "trinity-modes",
    "operators": "trinity-compat-rft",
    "own_data": "trinity-own-data",
    "plugin_names": "trinity-compat-rft",
    "task_pipeline": "trinity-task-pipeline",
    "tenants": "trinity-tinker",
    "traffic": "trinity-traffic",
    "workflows": "trinity-compat-rft",
}


@cache
def find(hook: str) -> Any:
    """Returns the object that a hook names, or None if no installed distribution offers it."""
    entries = importlib.metadata.entry_points(group=GROUP, name=hook)
    return next(iter(entries)).load() if entries else None


def missing(hook: str) -> str:
    """Says in an error how to get a hook: `trinity-compat-rft, which is not installed`."""
    return f"{DISTRIBUTIONS[hook]}, which is not installed"
