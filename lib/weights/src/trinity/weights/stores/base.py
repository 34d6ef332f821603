"""The contract of every store of versions.

A version's files are stored under keys that begin with `v<version>/`; a key never changes its content. The manifest is
written last, as `manifest.pb`, and removed first: a version without it does not exist. Calls block; every wait has a
limit.
"""

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from trinity.runtime.errors import AlreadyExists, InvalidInput, NotFound
from trinity.weights.manifest import FileInfo, Manifest, Offer
from trinity.weights.wire import decode_manifest, encode_manifest

MANIFEST = "manifest.pb"


class Store(ABC):
    """put (whole, delta or both) -> seal -> manifest and fetch by any reader -> delete.

    All methods raise Unavailable if the storage does not answer, PermissionDenied if it refuses.
    """

    kind: ClassVar[str]

    def __init__(self, run: str) -> None:
        self.run = run

    def put(self, manifest: Manifest, source: Path, delta: bool) -> Offer:
        """Stores the files of a version, or of its difference, from `source`. Idempotent.

        Raises AlreadyExists if a key has other content: `delete` the version first, if it was never sealed.
        """
        self._check_run(manifest)
        for info in listed(manifest, delta):
            self._put_file(manifest.version, info, source / info.name)
        return self.offer(manifest.version, delta)

    def seal(self, manifest: Manifest) -> None:
        """Writes the manifest, after which the version exists with all files that the manifest offers here.

        Raises InvalidInput naming a file that was not put; AlreadyExists if it is sealed with another manifest.
        """
        self._check_run(manifest)
        manifest.check()
        mine = [delta for delta in (False, True) if self.offer(manifest.version, delta) in manifest.offers]
        if not mine:
            raise InvalidInput("manifest.offers", f"has none of {self.where}")
        for info in (info for delta in mine for info in listed(manifest, delta)):
            size = self._size(manifest.version, info.name)
            if size != info.size_bytes:
                found = "is not there" if size is None else f"has {size} bytes, not {info.size_bytes}"
                raise InvalidInput(info.name, f"of version {manifest.version} {found} in {self.where}")
        content = encode_manifest(manifest)
        if not self._create(manifest.version, content) and self._read_manifest(manifest.version) != content:
            raise AlreadyExists(f"version {manifest.version} is in {self.where}, with another manifest")

    def manifest(self, version: int) -> Manifest:
        """Returns the manifest of a sealed version. Raises NotFound, or InvalidInput for an inconsistent manifest."""
        content = self._read_manifest(version)
        if content is None:
            raise NotFound(f"version {version} is not in {self.where}")
        manifest = decode_manifest(content)
        if (manifest.run, manifest.version) != (self.run, version):
            raise InvalidInput(
                f"{MANIFEST} of version {version} in {self.where}", f"is of {manifest.run!r} {manifest.version}"
            )
        manifest.check()
        return manifest

    def fetch(self, offer: Offer, name: str, target: Path) -> None:
        """Writes one of the offer's files to `target`, unchecked. Raises NotFound if any part of it is missing."""
        check_name(name)
        self._fetch(offer, name, target)

    @property
    @abstractmethod
    def where(self) -> str:
        """The store as text, for messages."""

    @abstractmethod
    def offer(self, version: int, delta: bool) -> Offer:
        """The offer of a version's files, for its manifest."""

    @abstractmethod
    def delete(self, version: int) -> None:
        """Removes a version and all its files; does nothing if there are none."""

    def close(self) -> None:  # noqa: B027  # nothing to close is the usual case
        """Closes connections. No method may be called afterwards."""

    def _put_file(self, version: int, info: FileInfo, source: Path) -> None:
        check_name(info.name)
        check_source(info, source)
        there = self._checksum(version, info)
        if there is None:
            self._write(version, info, source)
        elif there != info.checksum:
            raise AlreadyExists(
                f"{info.name} of version {version} is in {self.where} with checksum {there}, to be put with "
                f"{info.checksum}; keys never change"
            )

    @abstractmethod
    def _size(self, version: int, name: str) -> int | None:
        """Returns the bytes of a stored file; None if it is missing."""

    @abstractmethod
    def _checksum(self, version: int, info: FileInfo) -> str | None:
        """Returns the checksum of a stored file, or any other text if its size differs; None if it is missing."""

    @abstractmethod
    def _write(self, version: int, info: FileInfo, source: Path) -> None: ...

    @abstractmethod
    def _create(self, version: int, content: bytes) -> bool:
        """Writes the manifest. Returns False, without writing, if one exists."""

    @abstractmethod
    def _read_manifest(self, version: int) -> bytes | None: ...

    @abstractmethod
    def _fetch(self, offer: Offer, name: str, target: Path) -> None: ...

    def _check_run(self, manifest: Manifest) -> None:
        if manifest.run != self.run:
            raise InvalidInput("manifest.run", f"is {manifest.run!r}; this store is of {self.run!r}")


def listed(manifest: Manifest, delta: bool) -> tuple[FileInfo, ...]:
    """Returns the files of the whole version, or of its difference."""
    if not delta:
        return manifest.files
    if manifest.delta is None:
        raise InvalidInput("manifest.delta", f"of version {manifest.version} is absent")
    return manifest.delta.files


def check_name(name: str) -> None:
    """Raises InvalidInput unless `name` is a plain file name that storage does not use itself."""
    if not name or Path(name).name != name or name.startswith(".") or name == MANIFEST:
        raise InvalidInput(
            "manifest.files", f"{name!r} must be a plain file name, not {MANIFEST} and without a dot first"
        )


def check_source(info: FileInfo, source: Path) -> None:
    try:
        size = source.stat().st_size
    except OSError:
        raise InvalidInput(info.name, f"is missing in {source.parent}") from None
    if size != info.size_bytes:
        raise InvalidInput(info.name, f"in {source.parent} has {size} bytes, the manifest says {info.size_bytes}")


def endpoint_of_environment() -> str:
    """Returns the S3 endpoint of this process's environment; empty: Amazon's."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")
