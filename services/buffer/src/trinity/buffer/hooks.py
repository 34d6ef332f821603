"""Looks up what satellites offer for keys of the YAML."""

from typing import Any

from trinity.plugins import satellites
from trinity.runtime.errors import InvalidInput


def hook(name: str, key: str) -> Any:
    """Returns what a satellite offers for a key that the YAML has. Raises InvalidInput if it is not installed."""
    if (found := satellites.find(name)) is None:
        raise InvalidInput(key, f"needs {satellites.missing(name)}")
    return found
