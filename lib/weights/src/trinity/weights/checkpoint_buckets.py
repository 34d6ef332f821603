"""Checkpoints on S3-compatible storage: complete or absent, as in a folder.

<prefix>/<run>/checkpoints/global_step_<n>/<attempt>/<file>     every rank uploads its own
<prefix>/<run>/checkpoints/global_step_<n>/manifest.json        written last; names the attempt

Files never change: a step that is saved again, as after a rollback, is another attempt.
"""

import json
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from trinity.runtime import files
from trinity.runtime.errors import InvalidInput, NotFound
from trinity.weights.checkpoint_manifest import MANIFEST, entries_of
from trinity.weights.checkpoints import COMPLETE, step_of

FIELD = "trainer.checkpoint_storage"


class CheckpointBucket:
    """upload by any rank -> finish by rank 0; fetch by any machine."""

    def __init__(self, url: str, run: str) -> None:
        """`url`: s3://bucket/prefix. Raises InvalidInput without obstore. Connects on first use."""
        try:
            from trinity.weights.stores.s3 import Bucket
        except ImportError:
            raise InvalidInput(FIELD, f"{url!r} needs obstore: pip install -e '.[s3]'") from None
        parts = urlsplit(url)
        root = "/".join(part for part in (parts.path.strip("/"), run, "checkpoints") if part)
        self._bucket = Bucket(parts.netloc, root)

    @property
    def where(self) -> str:
        return self._bucket.where

    def steps(self) -> list[int]:
        """Returns the steps of all complete checkpoints, ascending; none without the bucket."""
        try:
            found = [step_of(Path(name)) for name in self._bucket.folders()]
        except NotFound:
            return []
        return sorted(step for step in found if step is not None and self._bucket.size(_manifest(step)) is not None)

    def upload(self, step: int, attempt: str, folder: Path, names: Collection[str]) -> None:
        """Stores files of a checkpoint that is being made; names are relative to `folder`."""
        for name in names:
            self._bucket.upload(f"global_step_{step}/{attempt}/{name}", folder / name)

    def finish(self, step: int, attempt: str, folder: Path) -> None:
        """Makes the uploaded files the step's checkpoint: those in the folder's manifest."""
        content = {"attempt": attempt, "files": entries_of(folder)}
        self._bucket.write(_manifest(step), json.dumps(content).encode())
        names = self._bucket.names(f"global_step_{step}")
        current = f"global_step_{step}/{attempt}/"
        self._bucket.remove(name for name in names if name != _manifest(step) and not name.startswith(current))

    def keep(self, number: int | None) -> None:
        """Removes all but so many of the newest checkpoints (None: all), and what crashes left of unfinished ones."""
        steps = self.steps()[-number if number else 0 :]
        for name in self._bucket.folders():
            step = step_of(Path(name))
            if step is not None and step not in steps:
                self._bucket.remove([_manifest(step)])
                self._bucket.remove(self._bucket.names(name))

    def has(self, step: int) -> bool:
        return self._bucket.size(_manifest(step)) is not None

    def fetch(self, step: int, target: Path) -> None:
        """Downloads the files that the folder `target` lacks, which then is the step's checkpoint, unchecked.

        Raises NotFound for a step without a checkpoint.
        """
        manifest = self._read(step)
        for name, entry in manifest["files"].items():
            if not _is_there(target / name, entry):
                partial = target / f"{name}.partial"
                partial.parent.mkdir(parents=True, exist_ok=True)
                self._bucket.download(f"global_step_{step}/{manifest['attempt']}/{name}", partial)
                partial.rename(target / name)
        if not (target / COMPLETE).exists():
            files.write_json(target / MANIFEST, {"files": manifest["files"]})
            files.sync_tree(target)
            (target / COMPLETE).touch()

    def _read(self, step: int) -> dict[str, Any]:
        content = self._bucket.read(_manifest(step))
        if content is None:
            raise NotFound(f"{_manifest(step)} is not in {self.where}")
        try:
            manifest: dict[str, Any] = json.loads(content)
            names = [manifest["attempt"], *manifest["files"]]
            if not all(_is_inside(name) for name in names):
                raise ValueError("a file has no name inside the checkpoint")
            if not all(type(entry["size"]) is int for entry in manifest["files"].values()):
                raise ValueError("a file has no size")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidInput(f"{self.where}/{_manifest(step)}", f"is no manifest: {error}") from None
        return manifest


def _manifest(step: int) -> str:
    return f"global_step_{step}/{MANIFEST}"


def _is_inside(name: Any) -> bool:
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _is_there(path: Path, entry: Any) -> bool:
    return path.is_file() and path.stat().st_size == entry["size"]
