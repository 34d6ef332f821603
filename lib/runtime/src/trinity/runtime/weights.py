"""Weight versions as the trainer makes them, the sync service judges them and the explorers load them.

Life of a version: STAGED (offered) -> VERIFIED (matches its manifest) -> LIVE (explorers load it) -> RETIRED; or
REJECTED. Version 0 is the run's base model: explorers start from it, so it has no files.
"""

import time
from collections import Counter
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from trinity.api.sync.v1 import sync_pb2
from trinity.runtime import files
from trinity.runtime.checkpoints import INDEX, SINGLE, safetensors_header
from trinity.runtime.errors import InvalidInput


class VersionState(IntEnum):
    STAGED = sync_pb2.VERSION_STATE_STAGED
    VERIFIED = sync_pb2.VERSION_STATE_VERIFIED
    LIVE = sync_pb2.VERSION_STATE_LIVE
    RETIRED = sync_pb2.VERSION_STATE_RETIRED
    REJECTED = sync_pb2.VERSION_STATE_REJECTED

    @property
    def wire_name(self) -> str:
        """Name of the protobuf value."""
        return f"VERSION_STATE_{self.name}"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a version; `dtype` is safetensors' name, `file` the file that holds it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    file: str


@dataclass(frozen=True)
class FileInfo:
    """One file of a version, with the xxh3-128 of its content."""

    name: str
    size_bytes: int
    checksum: str


@dataclass(frozen=True)
class FolderOffer:
    """The files lie in a folder that both sides see."""

    path: str


@dataclass(frozen=True)
class Manifest:
    """Everything needed to load and check one version."""

    run: str
    version: int
    step: int
    tensors: tuple[TensorInfo, ...]
    files: tuple[FileInfo, ...]
    offers: tuple[FolderOffer, ...]
    created_at_seconds: float
    base_model: str = ""

    @property
    def folder(self) -> Path | None:
        """Where the folder transport finds the files."""
        return next((Path(offer.path) for offer in self.offers), None)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def load_arguments(self, folder: Path) -> tuple[list[str], list[tuple[str, int]]]:
        """Paths of the files, and every tensor's name with the index of its file: what an engine loads."""
        index = {info.name: position for position, info in enumerate(self.files)}
        paths = [str(folder / info.name) for info in self.files]
        return paths, [(tensor.name, index[tensor.file]) for tensor in self.tensors]

    def check(self) -> None:
        """Raise InvalidInput naming the field that cannot be right, without looking at any file."""
        if self.version < 0 or self.step < 0:
            raise InvalidInput("manifest.version", f"is {self.version} at step {self.step}; both are >= 0")
        if self.version == 0:
            if not self.base_model:
                raise InvalidInput("manifest.base_model", "is empty; version 0 is the base model")
            return
        if not self.offers:
            raise InvalidInput("manifest.offers", "is empty; say where the files lie")
        if not self.tensors:
            raise InvalidInput("manifest.tensors", "is empty")
        names = {file.name for file in self.files}
        for tensor in self.tensors:
            if tensor.file not in names:
                raise InvalidInput("manifest.tensors", f"{tensor.name} lies in {tensor.file!r}, which is not listed")
        twice = [name for name, count in Counter(t.name for t in self.tensors).items() if count > 1]
        if twice:
            raise InvalidInput("manifest.tensors", f"{twice[0]} is listed twice")
        for name in names:
            if Path(name).name != name:
                raise InvalidInput("manifest.files", f"{name!r} must be a plain file name")


def manifest_of_folder(run: str, version: int, folder: Path, *, checksums: bool = True) -> Manifest:
    """The manifest of a Hugging Face folder with safetensors files, read off their headers.

    Raises InvalidInput naming the file that is missing or damaged.
    """
    index = files.read_json(folder / INDEX)
    names = sorted(set(index["weight_map"].values())) if isinstance(index, dict) else [SINGLE]
    tensors: list[TensorInfo] = []
    infos: list[FileInfo] = []
    for name in names:
        path = folder / name
        tensors += [
            TensorInfo(key, entry["dtype"], tuple(entry["shape"]), entry["data_offsets"][1] - entry["data_offsets"][0],
                       name)
            for key, entry in sorted(safetensors_header(path).items(), key=lambda item: item[1]["data_offsets"][0])
        ]  # fmt: skip
        infos.append(FileInfo(name, path.stat().st_size, files.checksum(path) if checksums else ""))
    offer = FolderOffer(str(folder.absolute()))
    return Manifest(run, version, version, tuple(tensors), tuple(infos), (offer,), time.time())


def check_files(manifest: Manifest, folder: Path) -> None:
    """Compare the files in `folder` with the manifest: size, then checksum. Raises InvalidInput naming the file."""
    for info in manifest.files:
        path = folder / info.name
        try:
            size = path.stat().st_size
        except OSError:
            raise InvalidInput(info.name, f"is missing in {folder}") from None
        if size != info.size_bytes:
            raise InvalidInput(info.name, f"has {size} bytes, the manifest says {info.size_bytes}")
        checksum = files.checksum(path)
        if checksum != info.checksum:
            raise InvalidInput(info.name, f"has checksum {checksum}, the manifest says {info.checksum}")


def manifest_to_proto(manifest: Manifest) -> sync_pb2.Manifest:
    return sync_pb2.Manifest(
        run=manifest.run,
        version=manifest.version,
        step=manifest.step,
        tensors=[
            sync_pb2.TensorInfo(name=t.name, dtype=t.dtype, shape=t.shape, size_bytes=t.size_bytes, file=t.file)
            for t in manifest.tensors
        ],
        files=[sync_pb2.File(name=f.name, size_bytes=f.size_bytes, checksum=f.checksum) for f in manifest.files],
        offers=[sync_pb2.Offer(folder=sync_pb2.FolderOffer(path=offer.path)) for offer in manifest.offers],
        created_at_seconds=manifest.created_at_seconds,
        base_model=manifest.base_model,
    )


def manifest_from_proto(message: sync_pb2.Manifest) -> Manifest:
    return Manifest(
        run=message.run,
        version=message.version,
        step=message.step,
        tensors=tuple(TensorInfo(t.name, t.dtype, tuple(t.shape), t.size_bytes, t.file) for t in message.tensors),
        files=tuple(FileInfo(f.name, f.size_bytes, f.checksum) for f in message.files),
        offers=tuple(FolderOffer(o.folder.path) for o in message.offers if o.HasField("folder")),
        created_at_seconds=message.created_at_seconds,
        base_model=message.base_model,
    )
