"""manifest.json of a checkpoint: size and BLAKE3 of every file, so that only files of the trainer are loaded.

Entries of former versions have SHA-256, and stay valid. BLAKE3 takes a quarter of its processor time, and with reading
from the page cache less than half (docs/benchmarks.md).

The manifest is written after the files, and checked before any of them is loaded. The check finds damage, a mixture of
two checkpoints, and files that were replaced or added. A manifest is no signature: processes that may write the folder
may write the manifest too. So no file of a checkpoint is read in a way that runs code, even if it agrees with its
manifest.
"""

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from blake3 import blake3

from trinity.runtime import files
from trinity.runtime.errors import InvalidInput
from trinity.weights.checkpoints import COMPLETE

MANIFEST = "manifest.json"
_HASHED_TOGETHER = min(16, os.cpu_count() or 1)  # files; both hashes release the interpreter's lock
_BLOCK = 1024 * 1024
_KINDS = {"blake3": "BLAKE3", "sha256": "SHA-256"}  # keys of an entry
_FIX = (
    "; move its global_step folder away to use an older checkpoint, or if you trust the files, "
    "allow_unverified_checkpoint: true (of trinity convert: --allow-unverified) loads them"
)


class ManifestWriter:
    """Hashes the files below a folder in threads, while the caller does something else (syncs them to the disk)."""

    def __init__(self, checkpoint: Path, names: Collection[str] | None = None) -> None:
        """`names`: relative paths; None: all files."""
        self._checkpoint = checkpoint
        self._threads = ThreadPoolExecutor(_HASHED_TOGETHER)
        self.names = sorted(names_of(checkpoint) if names is None else names)
        self._entries: dict[str, Future[dict[str, Any]]] = {
            name: self._threads.submit(_entry, checkpoint / name) for name in self.names
        }

    def entries(self) -> dict[str, Any]:
        """Waits for the checksums; returns the entries by name."""
        with self._threads:
            return {name: entry.result() for name, entry in self._entries.items()}

    def write(self, others: Mapping[str, Any] | None = None) -> None:
        """Adds the checksums and the entries of `others` to manifest.json, which is replaced as a whole."""
        known = entries_of(self._checkpoint) if has_manifest(self._checkpoint) else {}
        entries = {**known, **(others or {}), **self.entries()}
        files.write_json(self._checkpoint / MANIFEST, {"files": entries})


def has_manifest(checkpoint: Path) -> bool:
    return (checkpoint / MANIFEST).exists()


def verify(checkpoint: Path, below: Iterable[str] = (".",)) -> None:
    """Compares the files and folders in `below` with a checkpoint's manifest: none missing, added or changed.

    Raises InvalidInput naming the file and the fix. Costs a read of all these files.
    """
    listed = entries_of(checkpoint)
    parts = [Path(part) for part in below]
    expected = {name: entry for name, entry in listed.items() if _is_below(name, parts)}
    there = {name for name in names_of(checkpoint) if _is_below(name, parts)}
    if missing := sorted(expected.keys() - there):
        raise InvalidInput(str(checkpoint / missing[0]), f"is missing, and {MANIFEST} lists it{_FIX}")
    if added := sorted(there - expected.keys()):
        raise InvalidInput(str(checkpoint / added[0]), f"is not in {MANIFEST}: the trainer did not write it{_FIX}")
    for name, entry in expected.items():
        if not (checkpoint / name).is_file():  # a pipe never ends, and a link may lead nowhere
            raise InvalidInput(str(checkpoint / name), f"is no file, and {MANIFEST} lists it{_FIX}")
        if (size := (checkpoint / name).stat().st_size) != entry["size"]:
            raise InvalidInput(str(checkpoint / name), f"has {size} bytes, {MANIFEST} says {entry['size']}{_FIX}")
    with ThreadPoolExecutor(_HASHED_TOGETHER) as threads:
        found = threads.map(lambda name: _entry(checkpoint / name, _kind_of(expected[name])), expected)
        for (name, entry), now in zip(expected.items(), found, strict=True):
            kind = _kind_of(entry)
            if now[kind] != entry[kind]:
                found_text = f"has {_KINDS[kind]} {now[kind]}, {MANIFEST} says {entry[kind]}"
                raise InvalidInput(str(checkpoint / name), f"{found_text}{_FIX}")


def verify_model(folder: Path) -> None:
    """Verifies only the Hugging Face folder of a checkpoint."""
    checkpoint = folder.parent.parent
    verify(checkpoint, [folder.relative_to(checkpoint).as_posix()])


def entries_of(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Returns the entries by name. Raises InvalidInput for a missing manifest, or one of another format."""
    if not has_manifest(checkpoint):
        raise InvalidInput(
            str(checkpoint), f"has no {MANIFEST}: an older version than 0.3 wrote it, or another program{_FIX}"
        )
    value = files.read_json(checkpoint / MANIFEST)
    entries = value.get("files") if isinstance(value, dict) else None
    if not isinstance(entries, dict) or not all(
        isinstance(entry, dict) and type(entry.get("size")) is int and isinstance(entry.get(_kind_of(entry)), str)
        for entry in entries.values()
    ):
        raise InvalidInput(str(checkpoint / MANIFEST), f"does not list files with size and blake3 or sha256{_FIX}")
    return entries


def _is_below(name: str, parts: list[Path]) -> bool:
    return any(Path(name).is_relative_to(part) for part in parts)


def names_of(checkpoint: Path) -> set[str]:
    """Returns relative paths of all files. Links to folders count as files: their targets are not the checkpoint's."""
    found = set()
    for root, folders, names in os.walk(checkpoint):
        links = [name for name in folders if Path(root, name).is_symlink()]
        found |= {Path(root, name).relative_to(checkpoint).as_posix() for name in [*names, *links]}
    return found - {MANIFEST, COMPLETE}


def _kind_of(entry: Mapping[str, Any]) -> str:
    return "blake3" if "blake3" in entry else "sha256"


def _entry(path: Path, kind: str = "blake3") -> dict[str, Any]:
    digest: Any = blake3() if kind == "blake3" else hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return {"size": size, kind: digest.hexdigest()}
