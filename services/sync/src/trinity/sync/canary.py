"""Verifies a version's weights: one explorer loads it and computes its canary.

One key, the candidate, names the version and the explorer. The first instance that finds a version waiting writes it
by compare-and-set. An explorer that dies or takes too long is replaced by another, if the run has another. An explorer
that cannot load the version counts as a failure of the version, and two such failures in a row reject it. So does one
that computes another canary: the engine may be wrong, not the version. If no other explorer answers in time, its word
rejects the version. A storage that does not answer does not count.

Without this election every explorer would load each STAGED version. A rejected version would then pause all of them and
discard what they sampled since, while docs/weights.md promises that the others keep the last good version.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import structlog

from trinity.runtime.broker import SequenceConflict, is_cancelled
from trinity.runtime.errors import NotFound, TrinityError, Unavailable
from trinity.runtime.names import owner_of
from trinity.sync.lifecycle import Versions
from trinity.sync.members import Members
from trinity.sync.store import records
from trinity.sync.store.manifests import Manifests
from trinity.sync.store.records import Candidate, Failure, Measured, Member, Record
from trinity.sync.store.state import RunState
from trinity.sync.versions import NotLoaded, Reject, Verify, current
from trinity.weights.manifest import Canary, CollectiveOffer, FolderOffer, JetStreamOffer, Manifest, S3Offer
from trinity.weights.pointer import Epoch, Live
from trinity.weights.wire import ExplorerState, VersionState

log = structlog.get_logger(__name__)

_TICK_SECONDS = 0.5
_FILES_SECONDS = 2.0  # a report's wait for the comparison of files; its sender's lease is 15 s
_TRANSPORTS = {FolderOffer: "folder", S3Offer: "s3", JetStreamOffer: "jetstream"}


def problem_of(canary: Canary, measured: Measured, precision: str) -> str:
    """Returns the reason why a measurement does not reproduce the canary, with both numbers; empty if it does."""
    mean, most = canary.allowed(precision)
    if measured.mean_error <= mean and measured.max_error <= most:
        return ""  # NaN is below nothing
    return (
        f"canary: the trainer expected a log-probability of {measured.expected:.6g}, explorer {measured.explorer_id} "
        f"computed {measured.computed:.6g}; mean difference {measured.mean_error:.3g} nats, at most "
        f"{mean:.3g}; largest {measured.max_error:.3g}, at most {most:.3g}"
    )


def awaited(newest_first: Iterable[Record], live: Live) -> Record | None:
    """Returns the newest version that waits for its canary; None if a newer version is LIVE or about to be."""
    for record in newest_first:
        state = current(record, live).state
        if record.version <= live.version or state is VersionState.VERIFIED:
            return None
        if record.has_canary and state is VersionState.STAGED:
            return record
    return None


def can_load(member: Member, manifest: Manifest, epoch: Epoch) -> bool:
    """Returns True if the explorer can use one of the offers. An explorer that names no transports can use any."""
    if not manifest.files:
        return True  # the base model
    transports = member.capabilities.transports
    for offer in manifest.offers:
        if isinstance(offer, CollectiveOffer):
            if offer.epoch == epoch.number and epoch.has(member.lease_id):
                return True
        elif not transports or _TRANSPORTS[type(offer)] in transports:
            return True
    return False


def choose(
    record: Record,
    manifest: Manifest,
    members: Sequence[Member],
    epoch: Epoch,
    before: Candidate,
    silences: Mapping[str, int],
) -> Member | None:
    """Returns the explorer that shall measure; None if none can load the version.

    Prefers explorers that have not failed with it and were not the last candidate. Among these, explorers with fewer
    `silences` (by owner) come first, then members of the collective group if the version is sent to them, and
    evaluating explorers last.
    """
    failed = {failure.explorer_id for failure in record.failures}
    last = before.explorer_id if before.version == record.version else ""
    collective = record.epoch == epoch.number and bool(epoch.members)

    def rank(member: Member) -> tuple[bool, bool, int, bool, bool, str]:
        return (
            member.explorer_id in failed,
            member.explorer_id == last,
            silences.get(owner_of(member.explorer_id), 0),
            collective and not epoch.has(member.lease_id),
            member.state in (ExplorerState.EVALUATING, ExplorerState.DRAINING),
            member.explorer_id,
        )

    return min((m for m in members if can_load(m, manifest, epoch)), key=rank, default=None)


def _has_failed(record: Record, candidate: Candidate) -> bool:
    return any(failure.attempt == candidate.attempt for failure in record.failures)


class Canaries:
    """Verifies the versions of one run."""

    def __init__(
        self, state: RunState, versions: Versions, members: Members, manifests: Manifests, seconds: float
    ) -> None:
        self._state = state
        self._versions = versions
        self._members = members
        self._manifests = manifests
        self._key = state.names.candidate_key
        self._seconds = seconds
        # By owner: how often its explorers were asked in vain; -1 if the last answer came. Members that only report
        # would else be asked in turn for ever.
        self._silences: dict[str, int] = {}

    async def run(self) -> None:
        """Names a candidate whenever a version waits and no explorer works on it."""
        told = ""
        while not is_cancelled():
            changes = {self._state.changed.next(), self._members.changed.next()}
            try:
                if awaited(self._state.newest_first, self._state.live) is not None:
                    await self._ask()
            except (Unavailable, NotFound) as error:
                log.info("sync.canary.postponed", reason=str(error))
            except (TrinityError, *records.UNREADABLE) as error:  # of this version; the next may be verified
                reason = f"{type(error).__name__}: {error}"
                if reason != told:
                    log.error("sync.canary.stuck", run=self._state.names.run, reason=reason)
                told = reason
            await asyncio.wait(changes, timeout=_TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED)

    async def _ask(self) -> None:
        state = self._state
        entry = await state.mirror.fresh(self._key)
        current = records.decode_or_new(Candidate, entry.value)
        record = awaited(state.newest_first, state.live)
        with_explorer = await self._is_with_its_explorer(current)
        if record is None or (with_explorer and state.mirror.age_seconds(self._key) < self._seconds):
            return
        member = choose(
            record, await self._manifests.get(record), self._members.all(), state.epoch, current, self._silences
        )
        same = member is not None and (current.version, current.lease_id) == (record.version, member.lease_id)
        wrong = next((failure for failure in record.failures if failure.measured is not None), None)
        if wrong and member and (same or any(member.explorer_id == known.explorer_id for known in record.failures)):
            # No other explorer answers, and one does not compute a canary twice.
            await self._versions.apply(record.version, Reject(wrong.reason, wrong.measured))
            return
        if member is None or (with_explorer and same):  # a slow explorer without a replacement continues
            return
        await self._members.find(member.lease_id, in_kv=True)
        chosen = Candidate(
            record.version, member.explorer_id, member.lease_id, current.attempt + 1, time.time() + self._seconds
        )
        try:
            await state.mirror.put_if(self._key, records.encode(chosen), entry.revision)
        except SequenceConflict:
            return  # another instance was faster
        if current.version == record.version and current.lease_id and not _has_failed(record, current):
            silent = owner_of(current.explorer_id)
            self._silences[silent] = self._silences.get(silent, 0) + 1
        log.info("sync.canary.asked", version=chosen.version, explorer=chosen.explorer_id, attempt=chosen.attempt)

    async def _is_with_its_explorer(self, candidate: Candidate) -> bool:
        """Returns True if the candidate is still STAGED and its explorer lives and has not failed."""
        record, live = self._state.records.get(candidate.version), self._state.live
        if record is None or record.version <= live.version or current(record, live).state is not VersionState.STAGED:
            return False
        if _has_failed(record, candidate):
            return False
        try:
            await self._members.find(candidate.lease_id)  # it may just have joined at another instance
        except NotFound:
            return False
        return True

    async def measured(self, member: Member, measured: Measured) -> None:
        """Takes a computed canary. A pass counts from any explorer, a failure only from the candidate's.

        A failure rejects the version if another explorer has failed with it, or if there is no other one to ask.
        """
        record = await self._known(measured.version)
        if record is None or not record.has_canary or record.collected:
            return
        manifest = await self._manifests.get(record)
        assert manifest.canary is not None
        problem = problem_of(manifest.canary, measured, member.capabilities.dtype)
        staged = current(record, self._state.live).state is VersionState.STAGED
        if problem and (not staged or not await self._was_asked(member, measured.version)):
            log.warning("sync.canary.failed_elsewhere", version=measured.version, reason=problem)
        elif problem:
            self._silences[owner_of(member.explorer_id)] = -1
            others = [known.reason for known in record.failures if known.explorer_id != member.explorer_id]
            if others or not self._has_another(member, manifest):
                await self._versions.apply(measured.version, Reject("; ".join([problem, *others]), measured))
            else:
                failure = Failure(member.explorer_id, self._state.candidate.attempt, problem, measured)
                await self._versions.apply(measured.version, NotLoaded(failure))
        elif staged and await self._has_right_files(manifest):
            self._silences[owner_of(member.explorer_id)] = -1
            await self._versions.apply(measured.version, Verify(measured))

    def _has_another(self, member: Member, manifest: Manifest) -> bool:
        others = (other for other in self._members.all() if other.explorer_id != member.explorer_id)
        return any(can_load(other, manifest, self._state.epoch) for other in others)

    async def _has_right_files(self, manifest: Manifest) -> bool:
        """Returns False also while the files are being read: the explorer then reports the canary again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FILES_SECONDS):
                return await self._versions.compare_files(manifest) is None
        return False

    async def _was_asked(self, member: Member, version: int) -> bool:
        candidate = records.decode_or_new(Candidate, (await self._state.mirror.fresh(self._key)).value)
        return (candidate.version, candidate.lease_id) == (version, member.lease_id)

    async def _ask_again(self, member: Member, version: int) -> None:
        """Frees the candidate, so that another explorer may be chosen."""

        def free(value: bytes) -> bytes | None:
            asked = records.decode_or_new(Candidate, value)
            if (asked.version, asked.lease_id) != (version, member.lease_id):
                return None
            return records.encode(replace(asked, lease_id=""))

        await self._state.mirror.change(self._key, free)

    async def _known(self, version: int) -> Record | None:
        """Returns the record, read from KV if this instance has not heard of the version yet."""
        with contextlib.suppress(NotFound):
            return self._state.records.get(version) or await self._state.record(version)
        return None

    async def failed(self, member: Member, version: int, reason: str, *, is_passing: bool = False) -> None:
        """Takes a failed load. It counts once per attempt as the candidate, and not if `is_passing`."""
        if await self._known(version) is None or not await self._was_asked(member, version):
            return
        if is_passing:
            await self._ask_again(member, version)
            return
        failure = Failure(member.explorer_id, self._state.candidate.attempt, reason)
        await self._versions.apply(version, NotLoaded(failure))
