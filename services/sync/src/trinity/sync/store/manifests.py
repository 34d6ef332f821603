"""Manifests in KV, under the version and the digest of their content: written once, never changed.

The manifest of a version with released files is deleted once LISTED newer versions exist. A sync service that knows the
job folder stores folders in it relative to it, so a moved or copied job folder keeps its versions.
"""

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import nats.errors
import nats.js.errors

from trinity.runtime.broker import Bucket, SequenceConflict
from trinity.runtime.errors import DataLoss, InvalidInput, Unavailable
from trinity.runtime.names import RunNames
from trinity.sync.store.records import Record
from trinity.weights.manifest import FolderOffer, Manifest
from trinity.weights.wire import decode_manifest, encode_manifest

LISTED = 100  # newest versions listed with manifests: thousands of manifests fit into no message
_REMEMBERED = 16
_WEIGHTS = "weights"  # the trainer's folder of versions, in the job folder


def _relocated(manifest: Manifest, relocate: Callable[[Path], Path]) -> Manifest:
    """Returns the manifest with other paths of the folders on offer."""
    offers = (
        replace(offer, path=str(relocate(Path(offer.path)))) if isinstance(offer, FolderOffer) else offer
        for offer in manifest.offers
    )
    return replace(manifest, offers=tuple(offers))


def digest_of(encoded: bytes) -> str:
    return hashlib.sha256(encoded).hexdigest()[:32]


def lost_folder(manifest: Manifest) -> Path | None:
    """Returns the version's only folder if this host sees the folder of all versions, but not this one in it."""
    folder = manifest.folder
    only_folders = all(isinstance(offer, FolderOffer) for offer in manifest.offers)
    lost = folder is not None and only_folders and folder.parent.is_dir() and not folder.is_dir()
    return folder if lost else None


class Manifests:
    """Manifests of one run, of at most `most_bytes` each. The last ones read stay in memory.

    `job_folder`: the folder that stored paths are relative to; None: they are absolute.
    """

    def __init__(self, bucket: Bucket, run: str, most_bytes: int, job_folder: Path | None = None) -> None:
        self._bucket = bucket
        self._most_bytes = most_bytes
        self._job_folder = job_folder
        self._names = RunNames(run)
        self._remembered: OrderedDict[str, bytes] = OrderedDict()

    def digest_of(self, manifest: Manifest) -> str:
        return digest_of(self._stored(manifest))

    async def put(self, manifest: Manifest) -> None:
        """Stores a manifest unless it is there undamaged. Raises InvalidInput if NATS takes no message that long."""
        value = self._stored(manifest)
        digest = digest_of(value)
        key = self._names.manifest_key(manifest.version, digest)
        try:
            with contextlib.suppress(SequenceConflict):
                there = await self._bucket.get(key)
                if not there.revision or digest_of(there.value) != digest:
                    await self._bucket.put_if(key, value, there.revision)
        except nats.errors.MaxPayloadError:
            raise InvalidInput(
                "manifest",
                f"of version {manifest.version} has {len(value)} bytes ({len(manifest.tensors)} tensors, "
                f"{len(manifest.files)} files); NATS takes {self._most_bytes} in one message: raise max_payload "
                "in the configuration of nats-server",
            ) from None
        except (TimeoutError, nats.errors.Error, nats.js.errors.Error) as error:
            raise Unavailable(f"NATS did not store {key}: {type(error).__name__} {error}") from None
        self._remember(digest, self._placed(value))

    async def encoded(self, record: Record) -> bytes:
        """Returns the manifest's bytes. Raises DataLoss if they are gone or damaged; `put` mends them."""
        found = self._remembered.get(record.digest)
        if found is None:
            entry = await self._bucket.get(self._names.manifest_key(record.version, record.digest))
            if digest_of(entry.value) != record.digest:
                if record.collected:
                    raise DataLoss(f"version: the files and the manifest of version {record.version} were deleted")
                what = "damaged in" if entry.revision else "gone from"
                raise DataLoss(
                    f"version: the manifest of version {record.version} is {what} NATS; its trainer, if it runs, "
                    "publishes it again; else publish or roll back to another version"
                )
            found = self._placed(entry.value)
        self._remember(record.digest, found)
        return found

    async def encoded_or_problem(self, record: Record) -> tuple[bytes | None, str]:
        """Returns the manifest's bytes, or None and the problem of an unreadable manifest."""
        try:
            return await self.encoded(record), ""
        except DataLoss as error:
            return None, str(error)

    async def get(self, record: Record) -> Manifest:
        return decode_manifest(await self.encoded(record))

    async def delete(self, record: Record) -> None:
        """Deletes the manifest of a version that no explorer loads any more."""
        self._remembered.pop(record.digest, None)
        await self._bucket.purge(self._names.manifest_key(record.version, record.digest))

    def _stored(self, manifest: Manifest) -> bytes:
        """Encodes a manifest with folders relative to the job folder."""
        root = self._job_folder
        if root is None:
            return encode_manifest(manifest)
        return encode_manifest(
            _relocated(manifest, lambda path: path.relative_to(root) if path.is_relative_to(root) else path)
        )

    def _placed(self, stored: bytes) -> bytes:
        """Returns a stored manifest with absolute folders.

        Older records have the absolute path of the job folder at that time: its own copy of a version comes first.
        """
        root = self._job_folder
        if root is None:
            return stored

        def place(path: Path) -> Path:
            own = root / _WEIGHTS / path.name
            is_own = path.parent.name == _WEIGHTS and own.parent.is_dir() and (own.is_dir() or not path.is_dir())
            return own if is_own else root / path

        with contextlib.suppress(InvalidInput):  # the reader reports it
            return encode_manifest(_relocated(decode_manifest(stored), place))
        return stored

    def _remember(self, digest: str, encoded: bytes) -> None:
        self._remembered[digest] = encoded
        self._remembered.move_to_end(digest)
        while len(self._remembered) > _REMEMBERED:
            self._remembered.popitem(last=False)
