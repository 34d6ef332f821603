"""Manifests in KV, under the version and the digest of their content: written once, never changed.

Those of versions whose files are released are deleted once LISTED newer versions exist.
"""

import contextlib
import hashlib
from collections import OrderedDict

import nats.errors
import nats.js.errors
from google.protobuf.message import DecodeError

from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.runtime.broker import Bucket, SequenceConflict
from trinity.runtime.errors import DataLoss, InvalidInput, Unavailable
from trinity.runtime.names import RunNames
from trinity.sync.store.records import Record
from trinity.weights import Manifest, manifest_from_proto, manifest_to_proto

LISTED = 100  # newest versions that a list gives with their manifests: thousands of them fit into no message
_REMEMBERED = 16


def digest_of(manifest: Manifest) -> str:
    return _digest(manifest_to_proto(manifest))


def _digest(message: pb.Manifest) -> str:
    return hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()[:32]


class Manifests:
    """Manifests of one run, of at most `most_bytes` each. The newest that were asked for stay in memory."""

    def __init__(self, bucket: Bucket, run: str, most_bytes: int) -> None:
        self._bucket = bucket
        self._most_bytes = most_bytes
        self._names = RunNames(run)
        self._remembered: OrderedDict[str, pb.Manifest] = OrderedDict()

    async def put(self, manifest: Manifest) -> None:
        """Store it, unless it is there undamaged. InvalidInput if NATS takes no message that long."""
        message, digest = manifest_to_proto(manifest), digest_of(manifest)
        value = message.SerializeToString()
        key = self._names.manifest_key(manifest.version, digest)
        try:
            with contextlib.suppress(SequenceConflict):
                there = await self._bucket.get(key)
                if not there.revision or _parsed(there.value, digest) is None:
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
        self._remember(digest, message)

    async def message(self, record: Record) -> pb.Manifest:
        """The manifest of a record, as it travels. DataLoss if it is gone or damaged: `put` mends it."""
        found = self._remembered.get(record.digest)
        if found is None:
            entry = await self._bucket.get(self._names.manifest_key(record.version, record.digest))
            found = _parsed(entry.value, record.digest)
            if found is None and record.collected:
                raise DataLoss(f"version: the files and the manifest of version {record.version} were deleted")
            if found is None:
                what = "damaged in" if entry.revision else "gone from"
                raise DataLoss(
                    f"version: the manifest of version {record.version} is {what} NATS; its trainer, if it runs, "
                    "publishes it again; else publish or roll back to another version"
                )
        self._remember(record.digest, found)
        return found

    async def message_or_problem(self, record: Record) -> tuple[pb.Manifest, str]:
        """As `message`. One that cannot be read has the number and the step alone, and the problem is not empty."""
        try:
            return await self.message(record), ""
        except DataLoss as error:
            return pb.Manifest(run=self._names.run, version=record.version, step=record.step), str(error)

    async def get(self, record: Record) -> Manifest:
        return manifest_from_proto(await self.message(record))

    async def delete(self, record: Record) -> None:
        """Delete the manifest of a version that is not loaded any more."""
        self._remembered.pop(record.digest, None)
        await self._bucket.purge(self._names.manifest_key(record.version, record.digest))

    def _remember(self, digest: str, message: pb.Manifest) -> None:
        self._remembered[digest] = message
        self._remembered.move_to_end(digest)
        while len(self._remembered) > _REMEMBERED:
            self._remembered.popitem(last=False)


def _parsed(value: bytes, digest: str) -> pb.Manifest | None:
    """None if it is not the manifest of this digest."""
    try:
        found = pb.Manifest.FromString(value)
    except DecodeError:
        return None
    return found if _digest(found) == digest else None
