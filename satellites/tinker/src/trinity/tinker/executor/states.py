"""States on disk: snapshots of all tenants, and the states that tenants save by name.

    snapshots/<commands>/<model>.safetensors, manifest.json    the state after so many commands
    base.json                                                  the base model of all that is here
    states/<position>.safetensors                              what the command at the position saved
    sampled/<position>/                                        adapters that it saved for sampling

A file is whole or not there. No file is written over by another command's, so that commands that are executed once more
after a crash read what they read the first time.
"""

import contextlib
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog

from trinity.runtime import files
from trinity.runtime.errors import DataLoss, InvalidInput
from trinity.runtime.names import token
from trinity.tinker import saved_adapters
from trinity.tinker.commands.account import Uses
from trinity.tinker.executor.model import SharedModel, Tenant, Tensors

log = structlog.get_logger(__name__)

_KEPT = 2
_MANIFEST, _ENDING, _BASE = "manifest.json", ".safetensors", "base.json"


@dataclass(frozen=True)
class Snapshot:
    """The state after some commands.

    All commands up to `position` are executed. `executed` has the newest executed command of each tenant that is beyond
    it. `models` and `saved` are the executor's facts of each model and saved state; `commands`, `results` and `account`
    are the executor's.
    """

    position: int
    executed: dict[str, int]
    commands: int
    models: dict[str, Any]
    saved: dict[str, Any]
    results: int
    account: Uses
    folder: Path = field(default=Path())

    def tensors(self, model_id: str) -> Tensors:
        return _read(self.folder / f"{token(model_id)}{_ENDING}")


class States:
    """A folder of snapshots and saved states, of one executor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._snapshots, self._states = folder / "snapshots", folder / "states"
        self._sampled = folder / saved_adapters.FOLDER
        self._saving = ThreadPoolExecutor(1, "saving")

    def check_base(self, model_path: str, digest: str) -> None:
        """Remembers the base model at the first start. Raises InvalidInput for another one: adapters belong to one."""
        known = files.read_json(self._folder / _BASE)
        if known is None:
            files.write_json(self._folder / _BASE, {"model_path": model_path, "digest": digest})
        elif known["digest"] != digest:
            problem = f"is {model_path}, and the adapters of tenants in {self._folder} are of another base model"
            raise InvalidInput("model_path", f"{problem}: {known['model_path']}; give that one, or another name")

    def newest(self) -> Snapshot | None:
        """Returns the newest snapshot whose files are as they were written; None if there is none.

        Raises DataLoss if there are snapshots, and none of them is whole.
        """
        folders = self._folders()
        for folder in reversed(folders):
            about = files.read_json(folder / _MANIFEST)
            if isinstance(about, dict) and _is_whole(folder, about["checksums"]):
                about.pop("checksums")
                return Snapshot(**about, folder=folder)
            log.warning("tenants.snapshot.damaged", folder=str(folder))
        if folders:
            raise DataLoss(
                f"no snapshot in {self._snapshots} is whole; remove the folder to execute all commands again, "
                "while the log has the bodies of all passes"
            )
        return None

    def write(self, snapshot: Snapshot, models: Mapping[str, tuple[dict[str, Any], Tensors]]) -> int:
        """Writes a snapshot, then removes older ones, and saved states that no kept snapshot names.

        Returns the position of the oldest kept snapshot.
        """
        folder = self._snapshots / f"{snapshot.commands:012}"
        checksums = {}
        for model_id, (_, tensors) in models.items():
            name = f"{token(model_id)}{_ENDING}"
            _write(folder / name, tensors)
            checksums[name] = files.checksum(folder / name)
        known = replace(snapshot, models={model_id: what for model_id, (what, _) in models.items()})
        about = {name: value for name, value in vars(known).items() if name != "folder"}
        files.write_json(folder / _MANIFEST, {**about, "checksums": checksums})
        for old in self._folders()[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        return self._remove_unnamed()

    def save(self, position: int, tensors: Tensors) -> None:
        _write(self._states / f"{position:012}{_ENDING}", tensors)

    def save_adapters(self, position: int, model: SharedModel, tenant: Tenant) -> Future[None]:
        """Saves a copy of a tenant's adapters in peft's format, in another thread: the future ends when it is durable.
        Raises InvalidInput as SharedModel.canary."""
        canary = model.canary(tenant)
        return self._saving.submit(saved_adapters.save, self._sampled, position, model.copy(tenant), canary)

    def load(self, position: int) -> Tensors:
        """Raises DataLoss for a state whose file is gone."""
        path = self._states / f"{position:012}{_ENDING}"
        if not path.exists():
            raise DataLoss(f"{path} is gone")
        return _read(path)

    def _folders(self) -> list[Path]:
        """Snapshots that were finished, oldest first."""
        return sorted(path.parent for path in self._snapshots.glob(f"*/{_MANIFEST}"))

    def _remove_unnamed(self) -> int:
        kept = [files.read_json(folder / _MANIFEST) or {"saved": {}, "position": 0} for folder in self._folders()]
        named = {saved["position"] for about in kept for saved in about["saved"].values()}
        oldest: int = min(about["position"] for about in kept)

        # Commands after the oldest kept snapshot may read later states again.
        def unneeded(path: Path) -> bool:
            return int(path.stem) <= oldest and int(path.stem) not in named

        for path in filter(unneeded, self._states.glob(f"*{_ENDING}")):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        for folder in filter(unneeded, self._sampled.glob("[0-9]*")):
            shutil.rmtree(folder, ignore_errors=True)
        return oldest


def _write(path: Path, tensors: Tensors) -> None:
    from safetensors.torch import save

    files.write_atomic(path, save(tensors))


def _read(path: Path) -> Tensors:
    from safetensors.torch import load_file

    return dict(load_file(path))


def _is_whole(folder: Path, checksums: Mapping[str, str]) -> bool:
    with contextlib.suppress(OSError):
        return all(files.checksum(folder / name) == expected for name, expected in checksums.items())
    return False
