"""Writes versions into the run's stores: whole files or, on s3 and jetstream, differences.

A difference needs its base in the same store. Every `full_interval`-th version is whole, as are the first after a
restart, a rollback or a rejection, and each version whose difference would save too little.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from trinity.runtime.errors import Conflict, Full, InvalidInput, NotFound, PermissionDenied, TrinityError, Unavailable
from trinity.weights.delta import encode
from trinity.weights.manifest import CollectiveOffer, Delta, FolderOffer, Manifest, Offer, check_files
from trinity.weights.stores import MANIFEST, Store, usable_kinds
from trinity.weights.stores.cache import WeightCache

log = structlog.get_logger(__name__)

# A difference larger than this fraction of the version does not justify a chain of bases.
_WORTHWHILE = 0.8
# A store that fails with one of these errors is skipped: it does not answer, is full, or refuses access.
_LEFT_OUT = (Unavailable, Full, PermissionDenied)


@dataclass
class _StoreState:
    """A store with its newest version (-1: none) and the number of differences since the last whole version."""

    store: Store
    newest: int = -1
    deltas: int = 0


class VersionStores:
    """put -> seal -> delete. The caller has written the whole files to `folder(version)` before."""

    def __init__(self, root: Path, run: str, stores: Sequence[Store], full_interval: int, nats_url: str) -> None:
        self.root = root
        self._run = run
        self._nats_url = nats_url
        self._states = [_StoreState(store) for store in stores]
        self._full_interval = full_interval
        self._base: Manifest | None = None
        self._deleted: set[int] = set()  # from every store: sync names a version several times

    def folder(self, version: int) -> Path:
        return self.root / f"v{version}"

    def end_delta_chain(self) -> None:
        """Makes the next version whole in every store."""
        self._base = None

    def put(self, manifest: Manifest, check_claim: Callable[[], object] = lambda: None) -> Manifest:
        """Puts into every store; returns the manifest with their offers. Skips failing stores unless all fail.

        check_claim: raises if another trainer has claimed the run; called just before existing files are replaced.
        """
        self._deleted.discard(manifest.version)
        manifest = self._with_delta(manifest)
        offers: list[Offer] = []
        problem: TrinityError | None = None
        for state in self._states:
            delta = manifest.delta is not None and self._takes_delta(state)
            source = self._delta_folder(manifest.version) if delta else self.folder(manifest.version)
            check_claim()
            try:
                offers.append(self._put(state.store, manifest, source, delta))
            except _LEFT_OUT as error:
                log.warning("trainer.version.store_left_out", store=state.store.kind, reason=str(error))
                problem, state.newest = error, -1
                continue
            state.newest, state.deltas = manifest.version, state.deltas + 1 if delta else 0
        shutil.rmtree(self._delta_folder(manifest.version), ignore_errors=True)
        if problem is not None and not offers:
            raise problem
        if not any(getattr(offer, "delta", False) for offer in offers):
            manifest = replace(manifest, delta=None)
        return replace(manifest, offers=tuple(offers))

    def _put(self, store: Store, manifest: Manifest, source: Path, delta: bool) -> Offer:
        """Puts into one store, and first deletes a version of this number.

        A trainer that died before it published, or whose difference was refused, leaves an unregistered version.
        """
        if self._is_own_folder(store):
            (self.folder(manifest.version) / MANIFEST).unlink(missing_ok=True)
        else:
            with contextlib.suppress(NotFound):  # the bucket does not exist before the first put
                store.delete(manifest.version)
        return store.put(manifest, source, delta)

    def seal(self, manifest: Manifest) -> None:
        """Writes the manifest to the files, last; the version can then be a base.

        A failing store gets the next version whole. Raises the error if all stores fail.
        """
        problem: TrinityError | None = None
        for state in [state for state in self._states if state.newest == manifest.version]:
            try:
                state.store.seal(manifest)
            except _LEFT_OUT as error:
                log.warning("trainer.version.store_left_out", store=state.store.kind, reason=str(error))
                problem, state.newest = error, -1
        if problem is not None and all(state.newest != manifest.version for state in self._states):
            raise problem
        self._base = manifest

    def seal_again(self, manifest: Manifest) -> None:
        """Seals a version whose whole files are in the folder again; the other stores still have theirs."""
        for state in self._states:
            if self._is_own_folder(state.store):
                state.store.seal(manifest)

    def _is_own_folder(self, store: Store) -> bool:
        """Returns True if `folder(version)` is the store's folder."""
        return store.offer(0, False) == FolderOffer(str(self.folder(0).absolute()))

    def has_lost(self, manifest: Manifest) -> bool:
        """Returns True if a version's files were in the folder and are gone: /dev/shm does not survive a reboot."""
        folder = self.folder(manifest.version)
        if FolderOffer(str(folder.absolute())) not in manifest.offers:
            return False
        return not all((folder / info.name).is_file() for info in manifest.files)

    def manifest(self, version: int) -> Manifest | None:
        """Returns the sealed manifest of a version; None if no store has it."""
        for state in self._states:
            with contextlib.suppress(TrinityError):
                return state.store.manifest(version)
        return None

    def only_here(self, manifest: Manifest) -> bool:
        """Returns True if the folder is the only store of a version."""
        own = FolderOffer(str(self.folder(manifest.version).absolute()))
        return all(offer == own or isinstance(offer, CollectiveOffer) for offer in manifest.offers)

    def find(self, manifest: Manifest) -> Path:
        """Returns a folder with a version's whole files, checked; fetches them from another store if needed."""
        try:
            check_files(manifest, self.folder(manifest.version))
            return self.folder(manifest.version)
        except InvalidInput as error:
            log.warning("trainer.version.not_here", version=manifest.version, reason=str(error))
        cache = WeightCache(self._fetched, self._run, usable_kinds(self._nats_url), self._nats_url)
        try:
            return cache.fetch(manifest).folder
        except TrinityError as error:
            raise Conflict(f"cannot roll back to version {manifest.version}: {error}") from None
        finally:
            cache.close()

    def drop_fetched(self) -> None:
        """Removes the files that `find` fetched."""
        shutil.rmtree(self._fetched, ignore_errors=True)

    @property
    def _fetched(self) -> Path:
        return self.root / ".fetched"

    def delete(self, versions: Iterable[int]) -> None:
        """Deletes from every store and from the folder, each version once. Logs failures: the files only take space."""
        for version in sorted({*versions} - self._deleted):
            self._deleted.add(version)
            for state in self._states:
                try:
                    state.store.delete(version)
                except TrinityError as error:
                    self._deleted.discard(version)
                    log.warning("trainer.version.not_deleted", version=version, reason=str(error))
            shutil.rmtree(self.folder(version), ignore_errors=True)

    def close(self) -> None:
        for state in self._states:
            state.store.close()

    def _with_delta(self, manifest: Manifest) -> Manifest:
        """Adds the difference from the version before, if a store can use it and it is small enough."""
        base = self._base
        if base is None or not any(self._takes_delta(state) for state in self._states):
            return manifest
        if not self.folder(base.version).is_dir():
            return manifest
        target = self._delta_folder(manifest.version)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        try:
            infos = encode(self.folder(base.version), base, self.folder(manifest.version), manifest, target)
        except InvalidInput as error:  # the base's files are damaged; this version does not need them
            log.warning("trainer.version.without_base", version=manifest.version, reason=str(error))
            return manifest
        if sum(info.size_bytes for info in infos) > _WORTHWHILE * manifest.size_bytes:
            return manifest
        return replace(manifest, delta=Delta(base.version, infos))

    def _takes_delta(self, state: _StoreState) -> bool:
        if self._base is None or state.store.kind == "folder":
            return False
        return state.newest == self._base.version and state.deltas + 1 < self._full_interval

    def _delta_folder(self, version: int) -> Path:
        return self.root / f".v{version}.delta"
