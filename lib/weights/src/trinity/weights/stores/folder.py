"""The store in a folder that both sides see, local or on a shared file system.

obstore's LocalStore would share its class with S3Store. Measured on 384 MB, it read at 140 to 221 MB/s against shutil's
836 to 1,041, with ten times the processor time, and it would make an optional package a required one.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trinity.runtime import files
from trinity.runtime.errors import NotFound, Unavailable
from trinity.weights.manifest import FileInfo, FolderOffer, Manifest, Offer, regular_size
from trinity.weights.stores.base import MANIFEST, Store, check_name, check_source, listed


class FolderStore(Store):
    """Versions as `<root>/v<version>`. Files that exist already, such as the trainer's, are not copied.

    Nothing is synced to disk: a power cut's damage shows as a wrong checksum or a missing manifest.
    """

    kind = "folder"

    def __init__(self, root: Path, run: str) -> None:
        super().__init__(run)
        self.root = root.absolute()

    @property
    def where(self) -> str:
        return str(self.root)

    def offer(self, version: int, delta: bool) -> FolderOffer:
        return FolderOffer(str(self._folder(version)), delta)

    def put(self, manifest: Manifest, source: Path, delta: bool) -> Offer:
        folder = self._folder(manifest.version)
        if source.absolute() != folder:
            return super().put(manifest, source, delta)
        self._check_run(manifest)
        for info in listed(manifest, delta):
            check_name(info.name)
            check_source(info, folder / info.name)
        return self.offer(manifest.version, delta)

    def delete(self, version: int) -> None:
        folder = self._folder(version)
        with _translated(), suppress(FileNotFoundError):
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder)

    def _folder(self, version: int) -> Path:
        return self.root / f"v{version}"

    def _size(self, version: int, name: str) -> int | None:
        try:
            return (self._folder(version) / name).stat().st_size
        except OSError:
            return None

    def _checksum(self, version: int, info: FileInfo) -> str | None:
        size = self._size(version, info.name)
        if size is None or size != info.size_bytes:
            return None if size is None else f"of {size} bytes"
        with _translated():
            return files.checksum(self._folder(version) / info.name)

    def _write(self, version: int, info: FileInfo, source: Path) -> None:
        target = self._folder(version) / info.name
        partial = target.with_name(f".{info.name}.partial")
        with _translated():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, partial)
            partial.rename(target)

    def _create(self, version: int, content: bytes) -> bool:
        path = self._folder(version) / MANIFEST
        if path.exists():
            return False
        with _translated():
            files.write_atomic(path, content, durable=False)
        return True

    def _read_manifest(self, version: int) -> bytes | None:
        try:
            with _translated():
                return _regular(self._folder(version) / MANIFEST).read_bytes()
        except NotFound:
            return None

    def _fetch(self, offer: Offer, name: str, target: Path) -> None:
        assert isinstance(offer, FolderOffer)
        with _translated():
            shutil.copyfile(_regular(Path(offer.path) / name), target)


def _regular(path: Path) -> Path:
    """Returns the path. Raises InvalidInput for a pipe or a device, FileNotFoundError for a missing file."""
    path.stat()
    regular_size(path)
    return path


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"{error.filename} is not there") from None
    except OSError as error:
        raise Unavailable(f"{error.filename}: {error.strerror or error}") from None
