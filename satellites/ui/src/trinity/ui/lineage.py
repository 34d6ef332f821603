"""The tree of runs, forks and regrades, and where the weights of one version come from."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trinity.config.parents import Parent, parent_of
from trinity.reading.errors import RunError
from trinity.runtime import files
from trinity.runtime.errors import TrinityError
from trinity.ui import screens
from trinity.ui.places import Places
from trinity.ui.source import Source
from trinity.weights.checkpoints import complete_steps
from trinity.weights.manifest import Manifest
from trinity.weights.wire import decode_manifest, digest_of

Facts = dict[str, Any]


@dataclass
class _Node:
    """A run in the tree. `key` is empty for a parent whose job folder is not among the runs here."""

    title: str
    key: str = ""
    parent: Parent | None = None
    children: list["_Node"] = field(default_factory=list)


async def tree(places: Places) -> Facts:
    """Returns the runs in the order of the tree, each with its depth. Folders are read, no service is called."""
    found = await asyncio.to_thread(places.find)
    rows, problems = await asyncio.to_thread(_tree, found)
    return {"rows": rows, "problems": problems, "command": "trinity fork RUN --at STEP"}


def _tree(found: dict[str, Source]) -> tuple[list[tuple[int, _Node]], list[str]]:
    nodes: dict[str, _Node] = {}
    problems = []
    for key, source in reversed(found.items()):  # the oldest first
        try:
            parent = parent_of(source.folder) if source.folder is not None else None
        except TrinityError as error:
            parent = None
            problems.append(str(error))
        nodes[source.job_stage.run] = _Node(source.title, key, parent)
    roots = []
    for run, node in list(nodes.items()):
        if node.parent is None or node.parent.run == run:
            roots.append(node)
        elif node.parent.run in nodes:
            nodes[node.parent.run].children.append(node)
        else:
            nodes[node.parent.run] = gone = _Node(node.parent.name, children=[node])
            roots.append(gone)
    rows: list[tuple[int, _Node]] = []
    waiting = [(0, node) for node in reversed(roots)]
    while waiting:
        depth, node = waiting.pop()
        rows.append((depth, node))
        waiting += [(depth + 1, child) for child in reversed(node.children)]
    return rows, problems


async def provenance(source: Source, number: int) -> Facts:
    """Returns what made the weights of a version: ledger entry, version before, data, graders, parents of the run."""
    problems: list[str] = []
    folder = source.folder
    if folder is None:
        raise RunError(f"{source.title} is known only by its NATS, and this page reads its job folder")
    manifests = await asyncio.to_thread(_manifests, folder, problems)
    manifest = next((one for one in manifests.values() if one.version == number), None)
    step = manifest.step if manifest is not None else number
    entry = await screens.or_none(source.entry(step), problems) if step else None
    if manifest is None and entry is None:
        raise RunError(f"the run keeps no manifest of version {number}, and the ledger has no step {step}")
    config = source.job_stage.config
    explored = config.buffer.explorer_input
    before = manifests.get(manifest.parent_sha256) if manifest is not None else None
    return {
        "number": number,
        "step": step,
        "manifest": manifest,
        "digest": digest_of(manifest).hex() if manifest is not None else "",
        "before": before.version if before is not None else None,
        "entry": entry,
        "sampled_by": sorted({version for group in entry["groups"] for version in group["versions"]}) if entry else [],
        "tasksets": [
            (one.name, one.path, explored.reward_of(one)) for key, one in explored.by_key() if "eval" not in key
        ],
        "model": config.model.model_path,
        "checkpoints": [one for one in complete_steps(folder) if one <= step],
        "trinity": (files.read_json(source.job_stage.job / "version.json") or {}).get("version"),
        "parents": await asyncio.to_thread(_parents, folder, problems),
        "problems": problems,
        "command": f"trinity provenance {source.option} --at {step}",
    }


def _manifests(folder: Path, problems: list[str]) -> dict[bytes, Manifest]:
    """Returns the manifests that the run keeps, by the digest that the next version names."""
    found = {}
    for path in sorted(folder.glob("weights/v*/manifest.pb")):
        try:
            manifest = decode_manifest(path.read_bytes())
        except (OSError, TrinityError) as error:
            problems.append(f"{path}: {error}")
            continue
        found[digest_of(manifest)] = manifest
    return found


def _parents(folder: Path, problems: list[str]) -> list[Parent]:
    """Returns the parents of a run, the nearest first, as far as their job folders are here."""
    found: list[Parent] = []
    seen = {folder}
    while True:
        try:
            parent = parent_of(folder)
        except TrinityError as error:
            problems.append(str(error))
            return found
        if parent is None:
            return found
        found.append(parent)
        folder = Path(parent.job, parent.stage) if parent.stage else Path(parent.job)
        if folder in seen:
            return found
        seen.add(folder)
