"""The versions of one run in KV. Each change is a `transition`, written by compare-and-set on one key after the other.

The order of the two writes, record and pointer, allows a kill between them: the next call of `settle` finishes the
change, in this instance, another one, or this one after a restart.
"""

import asyncio
import contextlib
from collections.abc import Collection
from dataclasses import replace

import structlog

from trinity.runtime.broker import SequenceConflict
from trinity.runtime.errors import Conflict, DataLoss, InvalidInput, NotFound
from trinity.runtime.trust.identity import calling
from trinity.sync.claims import Claims
from trinity.sync.store import records
from trinity.sync.store.manifests import LISTED, Manifests, lost_folder
from trinity.sync.store.records import Record
from trinity.sync.store.state import RunState
from trinity.sync.versions import (
    Event,
    GoLive,
    NotLoaded,
    Pin,
    Register,
    Reject,
    Release,
    RollBack,
    Verify,
    VersionStatus,
    current,
    gate_step,
    needed,
    next_live,
    transition,
)  # fmt: skip
from trinity.weights.manifest import FolderOffer, Manifest, TensorInfo, check_files
from trinity.weights.pointer import Live, Rollback, decode_live, encode
from trinity.weights.wire import VersionState

log = structlog.get_logger(__name__)

DEFAULT_KEPT = 3
RECORDED = 4096  # newest versions whose records stay
_TOLD_AGAIN = 20  # versions listed again at each commit, for a trainer that died before it deleted them
_SHOWN = 3


class Versions:
    """Versions of one run."""

    def __init__(self, state: RunState, manifests: Manifests, claims: Claims) -> None:
        self._state = state
        self._manifests = manifests
        self._claims = claims
        # By version and digest: two trainers in a row may make other files under one number.
        self._comparisons: dict[tuple[int, str], asyncio.Task[InvalidInput | None]] = {}

    async def get(self, version: int) -> VersionStatus:
        """Raises NotFound for an unknown version."""
        record = await self._state.record(version)
        return current(record, await self._state.pointer())

    def all(self) -> list[VersionStatus]:
        """Returns all versions that this process knows, newest first."""
        return [current(record, self._state.live) for record in self._state.newest_first]

    async def publish(self, manifest: Manifest, lease_id: str = "", rollback: int | None = None) -> VersionStatus:
        """Registers a version, which goes LIVE as soon as it is VERIFIED. Idempotent for the same manifest.

        Explorers may load a version with a canary while its files are read here. Files of a broadcast version are read
        before: the broadcast begins after this call, and the group's members would wait. `rollback` is the number of
        the newest rollback that the weights follow. Raises InvalidInput for a manifest that contradicts itself, the
        run's other versions or its files (the last leaves the version REJECTED); Conflict for a number that is taken
        or not the newest, an unusable base, a trainer without the claim, or a REJECTED version.
        """
        manifest.check()
        claim = await self._claims.check(lease_id)
        known, problem = await self._find(manifest.version), None
        record = Record(manifest.version, manifest.step, self._manifests.digest_of(manifest), VersionState.STAGED)
        transition(await self._state.pointer(), known, Register(record, claim, rollback))  # before files are read
        if known is None:
            record = await examine(manifest, self._state, self._manifests)
            if record.state is VersionState.VERIFIED or manifest.collective is not None:
                problem = await self._compare(manifest)
            if problem is not None:
                record = replace(record, state=VersionState.REJECTED, reason=str(problem))
        await self._manifests.put(manifest)
        if known is None:
            await self._register(Register(record, claim, rollback))
        await self.settle()
        version = await self.get(manifest.version)
        if version.state is VersionState.STAGED:
            problem = await self.compare_files(manifest)
            version = await self.get(manifest.version)
        if problem is not None:
            raise problem
        if version.state is VersionState.REJECTED:
            raise Conflict(f"version: {manifest.version} is REJECTED ({version.reason})")
        return version

    async def compare_files(self, manifest: Manifest) -> InvalidInput | None:
        """Compares the files of a STAGED version with its manifest, once. Rejects it and returns the problem."""
        problem = await self._compare(manifest)
        if problem is None or (await self._state.record(manifest.version)).collected:  # it was overtaken meanwhile
            return None
        await self.apply(manifest.version, Reject(str(problem)))
        return problem

    async def _compare(self, manifest: Manifest) -> InvalidInput | None:
        key, running = (manifest.version, self._manifests.digest_of(manifest)), self._comparisons
        if key not in running or (running[key].done() and running[key].exception() is not None):
            newer = {other: task for other, task in running.items() if other[0] > self._state.live.version}
            self._comparisons = newer | {key: asyncio.create_task(compare(manifest))}
        return await asyncio.shield(self._comparisons[key])

    async def _find(self, version: int) -> Record | None:
        with contextlib.suppress(NotFound):
            return await self._state.record(version)
        return None

    async def _register(self, event: Register) -> None:
        """Takes the number in the pointer first. So two versions, a version and a rollback, or an old trainer and its
        successor get one order there."""
        record, state = event.record, self._state
        live = await state.change_pointer(lambda live: transition(live, state.records.get(record.version), event)[0])
        try:
            await state.mirror.put_if(state.names.version_key(record.version), records.encode(record), 0)
            log.info("sync.version.staged", version=record.version, step=record.step, state=record.state.name)
        except SequenceConflict:
            transition(live, await state.record(record.version), event)

    async def apply(self, version: int, event: Event) -> bool:
        """Applies an event to a version; returns False if it changed nothing. Raises the errors of `transition`."""
        changed = await self._write(version, event)
        await self.settle()
        return changed

    async def collect(self, held: Collection[int], kept: int) -> list[int]:
        """Releases versions whose files the trainer may delete. Returns them with the last released before, oldest
        first."""
        state = self._state
        stay = needed(state.newest_first, await state.pointer(), held, kept or DEFAULT_KEPT)
        candidates = [r.version for r in state.newest_first if r.version not in stay and not r.collected]
        # Each is marked in KV, so that no pin and no rollback intervenes.
        release = Release(frozenset(held))
        done = await asyncio.gather(*(self.apply(version, release) for version in candidates))
        released = [version for version, marked in zip(candidates, done, strict=True) if marked]
        if released:
            log.info("sync.version.collectable", versions=sorted(released))
        await self._delete_manifests(released)
        await self._delete_records()
        told_before = [r.version for r in state.newest_first if r.collected and r.version not in released]
        return sorted({*released, *told_before[:_TOLD_AGAIN]})

    async def _delete_manifests(self, released: Collection[int]) -> None:
        """Deletes manifests of versions just released, and of the version that has just left the lists."""
        older = self._state.newest_first[LISTED:]
        gone = [r for r in older if r.collected and (r.version in released or r is older[0])]
        await asyncio.gather(*(self._manifests.delete(record) for record in gone))

    async def _delete_records(self) -> None:
        """Deletes the records of released versions beyond the newest RECORDED: no rollback can reach them."""
        older = [record.version for record in self._state.newest_first[RECORDED:] if record.collected]
        await asyncio.gather(*map(self._state.forget, older))

    async def _write(self, version: int, event: Event) -> bool:
        """Writes the record first, and then the pointer if it has not changed meanwhile."""
        state = self._state
        while True:
            entry = await state.mirror.fresh(state.names.live_key)
            live = decode_live(entry.value)
            changed = await state.change_record(version, lambda record: transition(live, record, event)[1])  # noqa: B023
            record = changed or await state.record(version)
            moved, _ = transition(live, record, event)
            with contextlib.suppress(SequenceConflict):
                if moved != live:
                    await state.mirror.put_if(state.names.live_key, encode(moved), entry.revision)
                if moved != live or changed is not None:
                    _log_change(event, record, live)
                return moved != live or changed is not None

    async def roll_back(self, version: int, *, keep_experience: bool, reason: str) -> Rollback | None:
        """Makes an older version LIVE again. Idempotent. Returns None if it is LIVE without any rollback.

        Raises NotFound for an unknown version; Conflict for a version that was never LIVE, was withdrawn, is newer than
        the LIVE version, or whose files are gone.
        """
        event, record = RollBack(keep_experience, reason), await self._state.record(version)
        if transition(await self._state.pointer(), record, event)[1] != record:
            await self._check_files(record)
        await self.apply(version, event)
        rollbacks = (await self._state.pointer()).rollbacks
        return next((rollback for rollback in reversed(rollbacks) if rollback.version == version), None)

    async def _check_files(self, record: Record) -> None:
        """Raises Conflict if this host sees the folder of all versions, but not the version's folder in it."""
        if (folder := lost_folder(await self._manifests.get(record))) is not None:
            raise Conflict(f"version: the files of {record.version} are gone from {folder}; roll back to another one")

    def is_settled(self) -> bool:
        """Returns True if this process knows nothing left to do."""
        state = self._state
        if next_live(state.newest_first, state.live) is not None:
            return False
        return gate_step(state.newest_first, state.live) == state.live.gate_step

    async def settle(self) -> None:
        """Moves the pointer to the newest VERIFIED version, and the gate over rejected versions."""
        state = self._state
        while not self.is_settled():
            entry = await state.mirror.fresh(state.names.live_key)
            live = decode_live(entry.value)
            record, gate = next_live(state.newest_first, live), gate_step(state.newest_first, live)
            if record is not None:
                with contextlib.suppress(Conflict):  # another instance was faster
                    await self._write(record.version, GoLive())
                continue
            if gate == live.gate_step or not await state.mirror.catches_up():
                continue  # an unknown version between rejected ones may still go LIVE
            with contextlib.suppress(SequenceConflict):
                moved = encode(replace(live, gate_step=gate))
                await state.mirror.put_if(state.names.live_key, moved, entry.revision)
                log.info("sync.gate.moved", step=gate)


def _log_change(event: Event, record: Record, before: Live) -> None:
    """Logs a change that was written."""
    version = record.version
    match event:
        case Verify(measured):
            error = measured.max_error
            log.info("sync.version.verified", version=version, explorer=measured.explorer_id, error=error)
        case NotLoaded(failure) if record.state is not VersionState.REJECTED:
            log.info("sync.canary.not_loaded", version=version, explorer=failure.explorer_id, reason=failure.reason)
        case Reject() | NotLoaded():
            log.warning("sync.version.rejected", version=version, reason=record.reason)
        case GoLive():
            log.info("sync.version.live", version=version, step=record.step, before=before.version)
        case RollBack(reason=reason):
            log.warning("sync.run.rolled_back", version=version, withdrawn_to=before.newest_version, reason=reason)
        case Pin(pinned):
            caller = calling.get()
            by = {} if caller is None else {"by": caller.name or str(caller.role)}
            log.info("sync.version.pinned" if pinned else "sync.version.unpinned", version=version, **by)


async def examine(manifest: Manifest, state: RunState, manifests: Manifests) -> Record:
    """Makes the record to register, before files are read: STAGED with a canary, VERIFIED without.

    Raises InvalidInput, or Conflict for an unusable base.
    """
    await _check_tensors(manifest, state, manifests)
    if manifest.delta is not None:
        await _check_base(manifest.delta.base_version, state)
    folder = manifest.folder
    only_folders = all(isinstance(offer, FolderOffer) for offer in manifest.offers)
    if manifest.canary is None and only_folders and folder is not None and not folder.is_dir():
        raise InvalidInput(
            "manifest.offers",
            f"{folder} is no folder that the sync service sees, so the files would stay unchecked; "
            "give the version a canary, or mount the folder here",
        )
    return Record(
        version=manifest.version,
        step=manifest.step,
        digest=manifests.digest_of(manifest),
        state=VersionState.VERIFIED if manifest.canary is None else VersionState.STAGED,
        has_tensors=bool(manifest.tensors),
        has_canary=manifest.canary is not None,
        base_version=manifest.delta.base_version if manifest.delta else -1,
        epoch=manifest.collective.epoch if manifest.collective else 0,
    )


async def compare(manifest: Manifest) -> InvalidInput | None:
    """Returns the difference between a version's files and its manifest; None also if this host does not see them."""
    folder = manifest.folder
    if folder is not None and folder.is_dir():
        try:
            await asyncio.to_thread(check_files, manifest, folder)
        except InvalidInput as error:
            return error
    return None


async def _check_tensors(manifest: Manifest, state: RunState, manifests: Manifests) -> None:
    """Raises InvalidInput unless the version has the names, dtypes and shapes of the run's other versions."""
    if not manifest.tensors:
        return
    others = (record for record in state.newest_first if _sets_tensors(record, manifest, state))
    for newest in others:
        with contextlib.suppress(DataLoss):  # unreadable manifests are skipped
            before = {tensor.name: tensor for tensor in (await manifests.get(newest)).tensors}
            break
    else:
        return
    now = {tensor.name: tensor for tensor in manifest.tensors}
    for names, what in ((before.keys() - now.keys(), "lacks"), (now.keys() - before.keys(), "has the new")):
        if names:
            raise InvalidInput("manifest.tensors", f"{what} {_some(names)}, unlike version {newest.version}")
    for name, tensor in now.items():
        is_now, was = _form(tensor), _form(before[name])
        if is_now != was:
            raise InvalidInput("manifest.tensors", f"{name} is {is_now}, in version {newest.version} it is {was}")


def _sets_tensors(record: Record, manifest: Manifest, state: RunState) -> bool:
    """Returns True if new versions are compared with this one: a rejected version may have the wrong tensors."""
    is_other = record.version != manifest.version
    return is_other and record.has_tensors and current(record, state.live).state is not VersionState.REJECTED


def _form(tensor: TensorInfo) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _some(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


async def _check_base(version: int, state: RunState) -> None:
    field = "manifest.delta.base_version"
    try:
        base = await state.record(version)
    except NotFound:
        raise InvalidInput(field, f"is {version}, which this run does not have; publish a whole version") from None
    found = current(base, await state.pointer())
    if found.state is VersionState.REJECTED:
        raise Conflict(f"{field}: {version} is REJECTED ({found.reason}); publish a whole version")
    if base.collected:
        raise Conflict(f"{field}: the files of {version} may be deleted already; publish a whole version")
