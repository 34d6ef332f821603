"""The root distribution holds all parts, and has the requirements, extras, commands and entry points of each."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.core import (
    load_toml,
)  # has TOML on Python 3.10 too, so that pip can refuse that version in one sentence
from hatchling.metadata.plugin.interface import MetadataHookInterface

# A requirement for another part, with its extras: trinity-config[parquet]==0.3.*
_PART = re.compile(r"trinity-[a-z-]+(\[[^]]*\])?")


class PartsMetadataHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        """Fills in the dynamic fields of pyproject.toml. `self.config["extras"]` are extras only of the root."""
        parts = read_parts(Path(self.root))
        extras: dict[str, list[str]] = {}
        for part in parts:
            for name, requirements in part.get("optional-dependencies", {}).items():
                extras.setdefault(name, []).extend(requirements)
        extras |= self.config["extras"]
        metadata["dependencies"] = _merged([line for part in parts for line in part.get("dependencies", [])])
        metadata["optional-dependencies"] = {name: _merged(lines, name) for name, lines in sorted(extras.items())}
        metadata["scripts"] = {name: entry for part in parts for name, entry in part.get("scripts", {}).items()}
        metadata["entry-points"] = entry_points(parts)


def read_parts(root: Path) -> list[dict[str, Any]]:
    """Returns the [project] tables of the distributions in the root's wheel."""
    packages = load_toml(str(root / "pyproject.toml"))["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    folders = (next(f for f in (root / package).parents if (f / "pyproject.toml").is_file()) for package in packages)
    return [load_toml(str(folder / "pyproject.toml"))["project"] for folder in folders]


def entry_points(parts: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Returns the entry points of all parts by group and name."""
    groups: dict[str, dict[str, str]] = {}
    for part in parts:
        for group, entries in part.get("entry-points", {}).items():
            groups.setdefault(group, {}).update(entries)
    return groups


def _merged(requirements: list[str], extra: str = "") -> list[str]:
    """Returns distinct requirements, sorted. This distribution holds the parts, so their extras are its own."""
    kept = set()
    for line in requirements:
        part = _PART.match(line)
        if part is None:
            kept.add(line)
        elif part[1] and part[1] != f"[{extra}]":
            kept.add(f"trinity{part[1]}")
    return sorted(kept)
