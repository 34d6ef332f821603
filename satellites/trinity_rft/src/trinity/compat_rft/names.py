"""Imports of Trinity-RFT's that have the name of a service's package, where that service is not installed."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from typing import Any

_NAMES = {
    "trinity.buffer.operators": "trinity.common.operators.names",
    "trinity.buffer.operators.experience_operator": "trinity.common.operators.names",
}
_PACKAGES = ("trinity.buffer", "trinity.buffer.operators")


class _Finder:
    """Comes last, so that an installed service is found before."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name not in _NAMES and name not in _PACKAGES:
            return None
        found = find_spec(_NAMES[name]) if name in _NAMES else None
        if found is None or found.origin is None:
            return ModuleSpec(name, None, is_package=True)
        folders: list[str] | None = [] if name in _PACKAGES else None
        return spec_from_file_location(name, found.origin, submodule_search_locations=folders)


_FINDER: Any = _Finder()


def find_foreign_names() -> None:
    """Let plugins import them, from now on."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
