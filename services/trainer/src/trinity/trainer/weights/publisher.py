"""Publishes versions on rank 0: whole files in the weights folder, then every store, then the sync service.

A version becomes LIVE once an explorer has verified it. The publisher does not wait for that, but polls the result
between steps (verification.py). Versions never change: the weights of a step are published once.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from trinity.runtime.errors import Conflict, TrinityError
from trinity.trainer.weights.canary import Tokens, probe_of_versions
from trinity.trainer.weights.claim import Claim
from trinity.trainer.weights.collective import CollectiveSender
from trinity.trainer.weights.shards import VERSION_FILES, Snapshot, Weights, read_version, write_shards
from trinity.trainer.weights.verification import VerificationResults
from trinity.trainer.weights.version_stores import VersionStores
from trinity.weights import client as calls
from trinity.weights.client import BlockingSyncClient
from trinity.weights.lora import Lora
from trinity.weights.manifest import Canary, FileInfo, Manifest, TensorInfo
from trinity.weights.pointer import Rollback
from trinity.weights.wire import VersionState, digest_of

log = structlog.get_logger(__name__)

_LISTED = 20
_SETTLE_SECONDS = 0.5
_BETWEEN_POLLS = 0.05
_OPEN = (VersionState.STAGED, VersionState.VERIFIED)


class VersionLost(Conflict):
    """No explorer can load the LIVE version, and this trainer is past its step."""

    for_good = True


class _BaseRejected(Exception):
    """The sync service refused a difference, since its base was rejected after the stores had received it."""


@dataclass(frozen=True)
class Opening:
    """The service's records of the run when a trainer starts. is_new: it has none."""

    is_new: bool
    probe: Tokens


class Publisher:
    """open -> (wants -> publish -> broadcast) for each version -> close."""

    def __init__(
        self,
        client: BlockingSyncClient,
        claim: Claim,
        results: VerificationResults,
        stores: VersionStores,
        versions_to_keep: int,
        removes_files: bool = False,
        collective: CollectiveSender | None = None,
        lora: Lora | None = None,
    ) -> None:
        """removes_files: remove the weights folder after the last step. lora: versions are adapters."""
        self._client = client
        self._claim = claim
        self._results = results
        self._stores = stores
        self._versions_to_keep = versions_to_keep
        self._removes_files = removes_files
        self._collective = collective
        self._lora = lora
        self._newest: Manifest | None = None
        self._base: Manifest | None = None
        self._repaired: set[int] = set()  # versions whose manifest was published again, or could not be
        self._lost: dict[int, Manifest] = {}  # by step: versions to write again
        self._collectable: list[int] = []  # versions whose files are deleted once no explorer waits for this trainer
        self._registered_step = -1
        self._opened_at = -1  # the LIVE version when this process began
        self._parent = b""  # digest of the version that was published last, or to which a rollback led
        self.followed_rollback = 0

    @property
    def live_version(self) -> int:
        return self._results.live_version

    @property
    def memory(self) -> Path | None:
        """The weights folder if it is in memory."""
        return self._stores.root if self._removes_files else None

    @property
    def newest_step(self) -> int:
        """Step of the newest version that is registered, or that a rollback has withdrawn."""
        rollback = self._claim.held.rollback
        return max(self._registered_step, rollback.newest_step if rollback else -1)

    @property
    def due_rollback(self) -> Rollback | None:
        """The newest rollback if it is not yet applied to the weights, else None."""
        newest = self._claim.held.rollback
        return newest if newest and newest.number > self.followed_rollback else None

    def poll(self) -> bool:
        """Polls for a rejected version; returns True if there is one. Cheap.

        Raises errors that end the trainer: a lost claim, or a rejected version if on_rejected is stop.
        """
        self._claim.check()
        self._repair()
        rejected = self._results.poll()
        if rejected:
            self._stores.end_delta_chain()
        return rejected

    def _repair(self) -> None:
        """Publishes the LIVE version again unchanged if the service can no longer read its manifest."""
        version = self._claim.held.unreadable
        if version is None or version in self._repaired:
            return
        self._repaired.add(version)
        manifest = self._base if version == 0 else self._stores.manifest(version)
        try:
            if manifest is None:
                raise Conflict("no store has it; publish a new version, or roll back to another one")
            self._client.ask(self._publication(manifest))
            log.warning("trainer.version.published_again", version=version)
        except TrinityError as error:
            log.error("trainer.version.unreadable", version=version, reason=str(error))

    def _publication(self, manifest: Manifest) -> calls.Call[list[int]]:
        return calls.publish(manifest, self._claim.held.lease_id, self.followed_rollback, self._versions_to_keep)

    def open(self, rollback: int) -> Opening:
        """Claims the run and finds its versions. rollback: number of the newest rollback applied to the weights."""
        self.followed_rollback = rollback
        self._claim.wait()
        known = self._client.ask(calls.versions(_LISTED))
        if self._claim.held.rollback is not None and not any(v.state is VersionState.LIVE for v in known):
            known.append(self._client.ask(calls.version(self._claim.held.rollback.version)))  # older than those
        self._results.open(known)
        self._opened_at = self.live_version
        self._registered_step = max((version.manifest.step for version in known), default=-1)
        if known:
            withdrawn = self._claim.held.rollback
            is_back = withdrawn is not None and withdrawn.newest_step >= self._registered_step
            self._remember_parent(withdrawn.version if withdrawn is not None and is_back else self._registered_step)
        for v in known:  # versions to load, or still to verify
            to_load = v.state is VersionState.LIVE or (v.state in _OPEN and v.version > self.live_version)
            if to_load and self._stores.has_lost(v.manifest):
                self._lost[v.manifest.step] = v.manifest
        return Opening(not known, probe_of_versions([version.manifest for version in known]))

    def announce_base(
        self, base_model: str, canary: Canary | None, layout: Sequence[TensorInfo] = (), adapters: Weights = ()
    ) -> None:
        """Publishes the base model as version 0, with adapters if `layout` describes any. No group exists yet."""
        self._base = Manifest(self._client.run, 0, 0, (), (), (), time.time(), base_model, canary=canary)
        if layout:
            tensors, infos = self._write(0, layout, adapters)
            self._base = self._stores.put(replace(self._base, tensors=tensors, files=infos, lora=self._lora))
            self._stores.seal(self._base)
        self._announce(self._base)
        self._parent = digest_of(self._base)
        if canary is None:
            self._opened_at = 0  # it is LIVE without an explorer

    def check_lost(self, step: int) -> None:
        """Raises VersionLost if explorers can load no version, and the weights of `step` cannot replace it."""
        if self._live_version_is_lost(step) and step <= self.newest_step:
            version = self.live_version
            raise VersionLost(
                f"the files of version {version}, which is LIVE, are gone from {self._stores.root}, and the trainer "
                f"continues from the checkpoint of step {step}: explorers can load nothing. Remove the checkpoints of "
                f"steps after {version} (global_step_<n>) from the job folder, so that step {version} is trained again "
                "and its version written again; or start a new run, under another name"
            )

    def wants(self, step: int, due: bool = True) -> bool:
        """Returns True if the weights of a step are to be published and were not before a crash or a rollback.

        Lost versions are published again. While explorers can load nothing, so are weights that are not `due`.
        """
        if step in self._lost:
            return True
        return step > self.newest_step and (due or self._live_version_is_lost(step))

    def publish(
        self,
        step: int,
        layout: Sequence[TensorInfo],
        weights: Weights,
        canary: Canary | None,
        ledger_sha256: bytes = b"",
    ) -> bool:
        """Publishes the weights of a step under the step's number; returns True if `broadcast` must follow.

        ledger_sha256: digest of the step's ledger entry.
        """
        self.poll()
        if step in self._lost:
            self._restore(self._lost[step], layout, weights)
            return False
        if self._live_version_is_lost(step):
            canary = None  # a new explorer would verify only after it has loaded the LIVE version
        tensors, infos = self._write(step, layout, weights)
        now = time.time()
        manifest = Manifest(
            self._client.run, step, step, tensors, infos, (), now, canary=canary, lora=self._lora,
            ledger_sha256=ledger_sha256, parent_sha256=self._parent,
        )  # fmt: skip
        try:
            taken = self._announce(self._put(manifest))
        except _BaseRejected:
            taken = self._announce(self._put(manifest))  # whole instead of a difference
        if taken:
            self._parent = digest_of(manifest)
            self._forget_lost(step)
        if taken and self._newest is not None and self._newest.collective is not None:
            return True
        self._delete_collectable()
        return False

    def broadcast(self, weights: Weights) -> None:
        """Sends the last published version to its collective group."""
        assert self._collective is not None and self._newest is not None
        self._collective.send(self._newest, iter(weights))
        self._delete_collectable()

    def _delete_collectable(self) -> None:
        """Deletes the files that sync has released. On a disk that takes as long as several broadcasts."""
        self._stores.delete(self._collectable)
        self._collectable = []

    def check(self) -> None:
        """Raises the error that ended the claim. Thread-safe."""
        self._claim.check()

    def read(self, version: int) -> Weights:
        """Reads the weights of an older version. Raises Conflict if no store has undamaged files."""
        manifest = self._client.ask(calls.version(version)).manifest
        if not manifest.files:
            raise Conflict(f"cannot roll back to version {version}: the sync service cannot read its manifest")
        return read_version(manifest, self._stores.find(manifest))

    def follows(self, rollback: Rollback) -> None:
        """Records that the engine has the weights of the rollback's version, which is LIVE again."""
        self.followed_rollback = rollback.number
        self._remember_parent(rollback.version)
        self._results.follows(rollback)
        self._stores.end_delta_chain()
        self._claim.renew()
        self._stores.drop_fetched()

    def _remember_parent(self, version: int) -> None:
        """Records the parent of the next version. A manifest that the service cannot read has no digest."""
        manifest = self._client.ask(calls.version(version)).manifest
        self._parent = digest_of(manifest) if manifest.tensors or manifest.base_model else b""

    def wait_for_verification(self, stopping: Callable[[], bool]) -> None:
        """Waits until the version before is LIVE or rejected, so that a newer version does not overtake it."""
        while self._results.pending and not stopping():
            self.poll()
            time.sleep(_BETWEEN_POLLS)

    def settle(self, seconds: float, stopping: Callable[[], bool], awaits_explorers: bool = False) -> None:
        """Waits until the newest version is verified and, if its files are removed, served.

        Returns at once without explorers; with `awaits_explorers` only after one has verified a version for this
        process. A trainer that starts again may have nothing left to train before explorers have started.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end and not stopping():
            self.poll()
            served = self._client.ask(calls.served())
            behind = self._removes_files and min(served, default=-1) < self.live_version
            to_come = awaits_explorers and self.live_version in (-1, self._opened_at)
            if not (served or to_come) or not (self._results.pending or behind):
                break
            time.sleep(_SETTLE_SECONDS)
        if self._removes_files and not stopping():
            self._claim.renew()
            shutil.rmtree(self._stores.root, ignore_errors=True)

    def close(self) -> None:
        """Releases the claim."""
        if self._collective is not None:
            self._collective.close()
        self._claim.close()
        self._stores.close()
        self._client.close()

    def _write(
        self, version: int, layout: Sequence[TensorInfo], weights: Weights
    ) -> tuple[tuple[TensorInfo, ...], tuple[FileInfo, ...]]:
        """Writes the whole files; the folder gets its name once they are complete.

        Files are removed only while this trainer holds the claim: if it was suspended, a successor may have written.
        """
        root, folder = self._stores.root, self._stores.folder(version)
        partial = root / f".v{version}.{self._claim.held.lease_id}.partial"
        self._claim.renew()
        for left in root.glob(".v*.partial"):
            shutil.rmtree(left, ignore_errors=True)
        try:
            if isinstance(weights, Snapshot) and weights.has_files:
                tensors, infos = weights.give(partial)
            else:
                all_stay = isinstance(weights, Snapshot)
                tensors, infos = write_shards(weights, layout, partial, VERSION_FILES, all_stay=all_stay)
        except FileNotFoundError:  # a successor has removed the partial files: `renew` raises
            self._claim.renew()
            raise
        self._claim.renew()
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        return tuple(tensors), tuple(infos)

    def _put(self, manifest: Manifest) -> Manifest:
        """Puts the version into the stores; returns the sealed manifest with all offers."""
        sealed = self._stores.put(manifest, self._claim.renew)
        if sealed.delta is not None and self.poll():  # its base was rejected meanwhile
            sealed = self._stores.put(manifest, self._claim.renew)
        offer = self._collective.offer(self._claim.held.lease_id) if self._collective is not None else None
        if offer is not None:
            sealed = replace(sealed, offers=(*sealed.offers, offer))
        self._stores.seal(sealed)
        self._newest = sealed
        return sealed

    def _announce(self, manifest: Manifest) -> bool:
        """Publishes the manifest at the sync service; returns False if the version is withdrawn or rejected.

        Raises VersionRejected if that ends the trainer, _BaseRejected, and any other refusal.
        """
        version = manifest.version
        try:
            self._collectable = self._client.ask(self._publication(manifest))
            self._registered_step = manifest.step
        except TrinityError as error:
            self._claim.renew()
            if self.due_rollback is not None:
                log.warning("trainer.version.withdrawn", version=version, reason=str(error))
                self._stores.delete([version])
            elif self._base_is_rejected(manifest):
                self._stores.end_delta_chain()
                raise _BaseRejected from None
            elif not self._results.rejects(version):
                raise error from None
            else:
                self._registered_step = manifest.step
            self._stores.end_delta_chain()
            return False
        self._results.expect(version)
        log.info("trainer.version.published", version=version, size_bytes=manifest.size_bytes)
        return True

    def _base_is_rejected(self, manifest: Manifest) -> bool:
        """Returns True if a difference was refused for its base. Raises VersionRejected if that ends the trainer."""
        if manifest.delta is None or self._registered_step == manifest.step:
            return False
        return self._results.rejects(manifest.delta.base_version)

    def _live_version_is_lost(self, step: int) -> bool:
        """Returns True if no store has the files of the LIVE version, and its step is in the past."""
        live = self._lost.get(self.live_version)
        return live is not None and live.step < step and self._stores.only_here(live)

    def _forget_lost(self, step: int) -> None:
        """Forgets lost versions up to this step: explorers can load a version again."""
        self._lost = {lost: manifest for lost, manifest in self._lost.items() if lost > step}

    def _restore(self, manifest: Manifest, layout: Sequence[TensorInfo], weights: Weights) -> None:
        """Writes the files of a version again. Raises Conflict if the version is LIVE and the weights now differ."""
        _, infos = self._write(manifest.version, layout, weights)
        self._forget_lost(manifest.step)
        if infos == manifest.files:
            self._stores.seal_again(manifest)
            log.info("trainer.version.restored", version=manifest.version)
            return
        shutil.rmtree(self._stores.folder(manifest.version), ignore_errors=True)
        if manifest.version == self.live_version and self._stores.only_here(manifest):
            raise Conflict(
                f"the files of version {manifest.version} in {self._stores.root} are gone, and training its step again "
                "gave other weights. Go back to another version with `trinity weights rollback`, or start a new run"
            )
        log.warning("trainer.version.not_restored", version=manifest.version, reason="its step gave other weights")
