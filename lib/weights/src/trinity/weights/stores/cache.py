"""An explorer's copies of versions, each fetched by the first transport that works, checked, and whole or absent.

fetch(manifest) -> a folder with the version's whole files, each with the checksum that the manifest says.

A folder on offer that exists here is checked and used in place. Everything else is downloaded into a folder with a
partial name, checked, and renamed at the end. A difference is applied to its base, which is fetched first if it is not
here, back to a whole version. A transport that fails is followed by the next.
"""

import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from trinity.runtime import files
from trinity.runtime.errors import InvalidInput, NotFound, PermissionDenied, TrinityError, Unavailable
from trinity.weights import delta
from trinity.weights.manifest import FileInfo, FolderOffer, Manifest, Offer, S3Offer, check_files, check_sizes
from trinity.weights.stores import MANIFEST, Store, open_offer, usable_kinds
from trinity.weights.stores.base import check_name
from trinity.weights.wire import decode_manifest, manifest_to_proto

log = structlog.get_logger(__name__)

_TRANSPORT = ".transport"

# These errors do not mean that the version is damaged.
_OF_THE_STORAGE = (Unavailable, PermissionDenied, OSError)


@dataclass(frozen=True)
class Fetched:
    """The folder of a version's whole files, and the transport that fetched them."""

    folder: Path
    transport: str


class WeightCache:
    """Versions of one run as `<root>/<run>/v<version>`. The folder belongs to one process; its threads may share this.

    `transports` are the explorer's capabilities; collective ones, and those this process cannot use, are ignored.
    """

    def __init__(self, root: Path, run: str, transports: Sequence[str], nats_url: str) -> None:
        self._root = (root / run).absolute()
        self._run = run
        self._nats_url = nats_url
        self._kinds = [kind for kind in usable_kinds(nats_url) if kind in transports]
        self._stores: dict[tuple[str, str], Store] = {}
        self._lock = threading.Lock()
        self._root.mkdir(parents=True, exist_ok=True)
        for partial in self._root.glob(".*.partial"):
            shutil.rmtree(partial, ignore_errors=True)

    def usable(self, manifest: Manifest) -> list[str]:
        """Returns the manifest's transports that this explorer can use, best first."""
        return list(dict.fromkeys(offer.transport for offer in self._offers(manifest)))

    def fetch(self, manifest: Manifest) -> Fetched:
        """Fetches the whole version, checked. One fetch at a time.

        Raises InvalidInput naming the damage, the missing file or the missing base of each transport; Unavailable if
        a storage did not answer or refused access, or the disk is full, so that a retry may succeed.
        """
        manifest.check()
        with self._lock:
            return self._fetch(manifest, {})

    def in_place(self, manifest: Manifest) -> Path | None:
        """Returns the folder that `fetch` would check and use in place, with files of the right sizes; else None."""
        manifest.check()
        first = next(iter(self._offers(manifest)), None)
        if not isinstance(first, FolderOffer) or first.delta or self._folder(manifest.version).exists():
            return None
        with suppress(InvalidInput):
            check_sizes(manifest, Path(first.path))
            return Path(first.path)
        return None

    def keep_only(self, versions: Iterable[int]) -> None:
        """Removes all other versions."""
        kept = {f"v{version}" for version in versions}
        with self._lock:
            for folder in self._root.glob("v*"):
                if folder.name not in kept:
                    shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        with self._lock:
            for store in self._stores.values():
                store.close()
            self._stores.clear()

    def _offers(self, manifest: Manifest) -> list[Offer]:
        """Returns the usable offers, best first: the difference before the whole version if its base is here."""
        base = manifest.delta.base_version if manifest.delta else None
        delta_first = base is not None and self._folder(base).is_dir()
        found = [offer for offer in manifest.offers if offer.transport in self._kinds]
        found = [offer for offer in found if not isinstance(offer, FolderOffer) or Path(offer.path).is_dir()]

        def place(offer: Offer) -> tuple[int, bool]:
            is_delta = getattr(offer, "delta", False)
            in_place = isinstance(offer, FolderOffer) and not is_delta
            return self._kinds.index(offer.transport), not in_place and is_delta != delta_first

        return sorted(found, key=place)

    def _fetch(self, manifest: Manifest, failed: dict[int, TrinityError]) -> Fetched:
        """`failed`: versions that could not be fetched during this call. A base is not retried for each transport."""
        if manifest.version in failed:
            raise failed[manifest.version]
        cached = self._cached(manifest.version)
        if cached is not None and cached.files == manifest.files:
            return Fetched(self._folder(manifest.version), self._transport(manifest.version))
        problems: dict[str, Exception] = {}
        for offer in self._offers(manifest):
            what = offer.transport + (" (difference)" if getattr(offer, "delta", False) else "")
            try:
                return self._take(manifest, offer, failed)
            except (TrinityError, OSError) as error:
                problems[what] = error
                log.warning("weights.fetch.failed", version=manifest.version, transport=what, error=str(error))
        failed[manifest.version] = self._failure(manifest, problems)
        raise failed[manifest.version]

    def _failure(self, manifest: Manifest, problems: dict[str, Exception]) -> TrinityError:
        if not problems:
            offered = ", ".join(dict.fromkeys(offer.transport for offer in manifest.offers)) or "nothing"
            usable = ", ".join(self._kinds) or "nothing"
            problem = f"of version {manifest.version}: {offered}; this explorer can use {usable} that it can see"
            return InvalidInput("manifest.offers", problem)
        told = "; ".join(f"{what}: {error}" for what, error in problems.items())
        if any(isinstance(error, _OF_THE_STORAGE) for error in problems.values()):
            return Unavailable(f"version {manifest.version} cannot be fetched now: {told}")
        return InvalidInput(f"version {manifest.version}", f"cannot be fetched: {told}")

    def _take(self, manifest: Manifest, offer: Offer, failed: dict[int, TrinityError]) -> Fetched:
        transport = offer.transport
        if isinstance(offer, FolderOffer) and not offer.delta:
            check_files(manifest, Path(offer.path))
            return Fetched(Path(offer.path), transport)
        store = self._store(offer)
        with self._partial(manifest.version) as partial:
            if getattr(offer, "delta", False):
                self._take_difference(manifest, offer, store, partial, failed)
            else:
                _download(store, offer, manifest.files, partial)
            (partial / _TRANSPORT).write_text(transport)
            (partial / MANIFEST).write_bytes(manifest_to_proto(manifest).SerializeToString())
            partial.rename(self._folder(manifest.version))
        return Fetched(self._folder(manifest.version), transport)

    def _take_difference(
        self, manifest: Manifest, offer: Offer, store: Store, target: Path, failed: dict[int, TrinityError]
    ) -> None:
        if manifest.delta is None:
            raise InvalidInput("manifest.delta", f"of version {manifest.version} is absent")
        version = manifest.delta.base_version
        difference = target / ".difference"
        difference.mkdir()
        cached = self._cached(version)
        if cached is not None:
            _download(store, offer, manifest.delta.files, difference)
            delta.apply(self._folder(version), cached, difference, manifest, target)
        else:
            base = self._base(version, manifest, store)
            fetched = self._fetch(base, failed)
            _download(store, offer, manifest.delta.files, difference)
            delta.apply(fetched.folder, base, difference, manifest, target)
            shutil.rmtree(self._folder(version), ignore_errors=True)  # fetched only as a base
        shutil.rmtree(difference)

    def _base(self, version: int, manifest: Manifest, store: Store) -> Manifest:
        try:
            return store.manifest(version)
        except NotFound:
            problem = f"version {version}, the base of version {manifest.version}, is gone from {store.where}"
            raise InvalidInput("manifest.delta.base_version", problem) from None

    def _store(self, offer: Offer) -> Store:
        """Returns one store for all versions of a location, so that connections are reused."""
        match offer:
            case FolderOffer(path):
                place = str(Path(path).parent)
            case S3Offer(bucket, prefix, endpoint):
                place = f"{endpoint} {bucket}/{prefix.rpartition('/')[0]}"
            case _:
                place = ""
        key = (offer.transport, place)
        if key not in self._stores:
            self._stores[key] = open_offer(offer, self._run, nats_url=self._nats_url)
        return self._stores[key]

    def _cached(self, version: int) -> Manifest | None:
        """Returns the manifest of a cached version; None if it is absent. Removes a damaged version."""
        folder = self._folder(version)
        try:
            manifest = decode_manifest((folder / MANIFEST).read_bytes())
            check_files(manifest, folder)
        except (OSError, InvalidInput) as error:
            if folder.exists():
                log.warning("weights.cache.damaged", version=version, error=str(error))
                shutil.rmtree(folder, ignore_errors=True)
            return None
        return manifest

    def _transport(self, version: int) -> str:
        with suppress(OSError, UnicodeDecodeError):
            return (self._folder(version) / _TRANSPORT).read_text()
        return ""

    def _folder(self, version: int) -> Path:
        return self._root / f"v{version}"

    @contextmanager
    def _partial(self, version: int) -> Iterator[Path]:
        """Makes a folder for a version being fetched, and removes it afterwards unless it was renamed."""
        shutil.rmtree(self._folder(version), ignore_errors=True)
        partial = Path(tempfile.mkdtemp(dir=self._root, prefix=f".v{version}.", suffix=".partial"))
        try:
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _download(store: Store, offer: Offer, infos: Iterable[FileInfo], folder: Path) -> None:
    """Downloads files and compares them with the manifest. Raises InvalidInput naming the first that differs."""
    for info in infos:
        check_name(info.name)
        path = folder / info.name
        try:
            store.fetch(offer, info.name, path)
        except NotFound as error:
            raise InvalidInput(info.name, f"is missing in {store.where}: {error}") from None
        size = path.stat().st_size
        if size != info.size_bytes:
            raise InvalidInput(info.name, f"in {store.where} has {size} bytes, the manifest says {info.size_bytes}")
        checksum = files.checksum(path)
        if checksum != info.checksum:
            raise InvalidInput(
                info.name, f"in {store.where} has checksum {checksum}, the manifest says {info.checksum}"
            )
