"""Manifests in KV, under the version and the digest of their content: written once, never changed.

The manifest of a version with released files is deleted once LISTED newer versions exist.
"""

import contextlib
import hashlib
from collections import OrderedDict

import nats.errors
import nats.js.errors

from trinity.runtime.broker import Bucket, SequenceConflict
from trinity.runtime.errors import DataLoss, InvalidInput, Unavailable
from trinity.runtime.names import RunNames
from trinity.sync.store.records import Record
from trinity.weights import Manifest, decode_manifest, encode_manifest

LISTED = 100  # newest versions listed with manifests: thousands of manifests fit into no message
_REMEMBERED = 16


def digest_of(manifest: Manifest) -> str:
    return _digest(encode_manifest(manifest))


def _digest(encoded: bytes) -> str:
    return hashlib.sha256(encoded).hexdigest()[:32]


class Manifests:
    """Manifests of one run, of at most `most_bytes` each. The last ones read stay in memory."""

    def __init__(self, bucket: Bucket, run: str, most_bytes: int) -> None:
        self._bucket = bucket
        self._most_bytes = most_bytes
        self._names = RunNames(run)
        self._remembered: OrderedDict[str, bytes] = OrderedDict()

    async def put(self, manifest: Manifest) -> None:
        """Stores a manifest unless it is there undamaged. Raises InvalidInput if NATS takes no message that long."""
        value = encode_manifest(manifest)
        digest = _digest(value)
        key = self._names.manifest_key(manifest.version, digest)
        try:
            with contextlib.suppress(SequenceConflict):
                there = await self._bucket.get(key)
                if not there.revision or _digest(there.value) != digest:
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
        self._remember(digest, value)

    async def encoded(self, record: Record) -> bytes:
        """Returns the stored bytes. Raises DataLoss if they are gone or damaged; `put` mends them."""
        found = self._remembered.get(record.digest)
        if found is None:
            entry = await self._bucket.get(self._names.manifest_key(record.version, record.digest))
            if _digest(entry.value) != record.digest:
                if record.collected:
                    raise DataLoss(f"version: the files and the manifest of version {record.version} were deleted")
                what = "damaged in" if entry.revision else "gone from"
                raise DataLoss(
                    f"version: the manifest of version {record.version} is {what} NATS; its trainer, if it runs, "
                    "publishes it again; else publish or roll back to another version"
                )
            found = entry.value
        self._remember(record.digest, found)
        return found

    async def encoded_or_problem(self, record: Record) -> tuple[bytes | None, str]:
        """Returns the stored bytes, or None and the problem of an unreadable manifest."""
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

    def _remember(self, digest: str, encoded: bytes) -> None:
        self._remembered[digest] = encoded
        self._remembered.move_to_end(digest)
        while len(self._remembered) > _REMEMBERED:
            self._remembered.popitem(last=False)
