"""The versions of a run. State lies in KV alone and changes by compare-and-set: kill the service, or run it twice.

A version's own record says STAGED, VERIFIED or REJECTED. Which one is LIVE is one pointer, and what was LIVE before is
RETIRED by being older than the pointer: there is no second place that could disagree.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import structlog

from trinity.api.sync.v1 import sync_pb2
from trinity.runtime.broker import Bucket, SequenceConflict
from trinity.runtime.errors import Conflict, InvalidInput, NotFound
from trinity.runtime.names import RunNames
from trinity.runtime.weights import Manifest, VersionState, check_files, manifest_from_proto, manifest_to_proto

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Version:
    """A version as it is now."""

    manifest: Manifest
    state: VersionState
    reason: str = ""


@dataclass(frozen=True)
class Live:
    """The pointer. version -1: nothing is LIVE yet."""

    version: int = -1
    step: int = -1


def encode_live(live: Live) -> bytes:
    return json.dumps({"version": live.version, "step": live.step}).encode()


def decode_live(value: bytes) -> Live:
    return Live(**json.loads(value)) if value else Live()


class Versions:
    """Versions of one run."""

    def __init__(self, bucket: Bucket, run: str) -> None:
        self._bucket = bucket
        self._names = RunNames(run)

    async def live(self) -> Live:
        return decode_live((await self._bucket.get(self._names.live_key)).value)

    async def get(self, version: int) -> Version:
        """NotFound if there is no such version."""
        entry = await self._bucket.get(self._names.version_key(version))
        if not entry.revision:
            raise NotFound(f"version: this run has no version {version}")
        return _decode(entry.value, await self.live())

    async def all(self) -> list[Version]:
        """Newest first."""
        entries = await self._bucket.entries(f"{self._names.run}.version")
        live = await self.live()
        return sorted((_decode(e.value, live) for e in entries.values()), key=lambda v: -v.manifest.version)

    async def stage(self, manifest: Manifest) -> Version:
        """Take a version in and compare its files with the manifest. Idempotent for the same manifest.

        Raises InvalidInput for a manifest that contradicts itself or its files (the version is then REJECTED), Conflict
        for a version number that is taken or not newer than every other.
        """
        manifest.check()
        key = self._names.version_key(manifest.version)
        entry = await self._bucket.get(key)
        if entry.revision:
            there = _decode(entry.value, await self.live())
            if there.manifest != manifest:
                raise Conflict(
                    f"manifest.version: {manifest.version} exists with another content; versions never change"
                )
            if there.state is not VersionState.STAGED:
                return there
            revision = entry.revision
        else:
            newest = max((v.manifest.version for v in await self.all()), default=-1)
            if manifest.version <= newest:
                raise Conflict(f"manifest.version: is {manifest.version}, must be newer than {newest}")
            try:
                revision = await self._bucket.put_if(key, _encode(Version(manifest, VersionState.STAGED)), 0)
            except SequenceConflict:
                return await self.stage(manifest)
        return await self._verify(key, revision, manifest)

    async def _verify(self, key: str, revision: int, manifest: Manifest) -> Version:
        version = Version(manifest, VersionState.VERIFIED)
        problem: InvalidInput | None = None
        if manifest.folder is not None:
            try:
                await asyncio.to_thread(check_files, manifest, manifest.folder)
            except InvalidInput as error:
                problem = error
                version = Version(manifest, VersionState.REJECTED, str(error))
        try:
            await self._bucket.put_if(key, _encode(version), revision)
        except SequenceConflict:  # another instance judged it meanwhile
            return await self.get(manifest.version)
        log.info("sync.version.judged", version=manifest.version, state=version.state.name, reason=version.reason)
        if problem is not None:
            raise problem
        return version

    async def commit(self, version: int) -> Live:
        """Make a VERIFIED version LIVE. Idempotent; Conflict if it is not VERIFIED or older than the LIVE one."""
        record = await self.get(version)
        if record.state in (VersionState.STAGED, VersionState.REJECTED):
            why = f" ({record.reason})" if record.reason else ""
            raise Conflict(f"version: {version} is {record.state.name}{why}; only a VERIFIED version goes LIVE")
        live = Live(version, record.manifest.step)

        def move(value: bytes) -> bytes | None:
            current = decode_live(value)
            if current.version > version:
                raise Conflict(f"version: {version} is older than {current.version}, which is LIVE")
            return encode_live(live)

        await self._bucket.update(self._names.live_key, move)
        return live

    async def watch(self) -> AsyncIterator[Live]:
        """The pointer now and after every change."""
        async for entry in self._bucket.watch(self._names.live_key):
            yield decode_live(entry.value)


def _encode(version: Version) -> bytes:
    return sync_pb2.WeightVersion(
        manifest=manifest_to_proto(version.manifest),
        state=version.state.wire_name,
        reason=version.reason,
    ).SerializeToString()


def _decode(value: bytes, live: Live) -> Version:
    message = sync_pb2.WeightVersion.FromString(value)
    manifest, state = manifest_from_proto(message.manifest), VersionState(message.state)
    if state is VersionState.VERIFIED and manifest.version == live.version:
        state = VersionState.LIVE
    elif state is VersionState.VERIFIED and manifest.version < live.version:
        state = VersionState.RETIRED
    return Version(manifest, state, message.reason)
