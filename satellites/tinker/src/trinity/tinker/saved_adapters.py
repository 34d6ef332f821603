"""Adapters that a tenant saved for sampling: a folder of peft for each saving command, with a canary.

    <root>/<position of the command>/adapter_config.json, adapter_model.safetensors, canary.json

A folder is whole or not there.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict
from pathlib import Path

from trinity.runtime import files
from trinity.runtime.errors import DataLoss, NotFound
from trinity.weights.manifest import Canary, Probe

FOLDER = "sampled"  # of an executor's folder
_CANARY = "canary.json"


def folder_of(root: Path, position: int) -> Path:
    return root / f"{position:012}"


def save(root: Path, position: int, write: Callable[[Path], None], canary: Canary) -> None:
    """Makes a folder. `write`: fills an empty folder with the adapters. A folder that is there already stays."""
    folder, part = folder_of(root, position), root / f".{position:012}.part"
    if folder.exists():
        return
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    write(part)
    files.write_json(part / _CANARY, asdict(canary))
    files.sync_tree(part)
    part.rename(folder)
    files.sync_folder(root)


def canary_of(folder: Path) -> Canary:
    """Raises NotFound if the folder is gone, DataLoss if its canary cannot be read."""
    try:
        about = json.loads((folder / _CANARY).read_text())
        probes = tuple(Probe(tuple(one["token_ids"]), tuple(one["logprobs"])) for one in about["probes"])
        return Canary(probes, about["mean_tolerance"], about["max_tolerance"])
    except FileNotFoundError:
        raise NotFound("the adapters are not there: they were not saved, or are no longer kept") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataLoss(f"{folder / _CANARY} cannot be read: {error}") from None


def saved_in(root: Path) -> Callable[[int], AbstractAsyncContextManager[tuple[Path, Canary]]]:
    """Returns the source of an explorer's versions. It raises as canary_of."""

    @asynccontextmanager
    async def source(position: int) -> AsyncIterator[tuple[Path, Canary]]:
        folder = folder_of(root, position)
        yield folder, await asyncio.to_thread(canary_of, folder)

    return source
