"""Publishes versions: whole files in the weights folder, then every store, then the sync service. Rank 0 alone.

A version is LIVE as soon as it is verified, and this does not wait for an explorer. The result of a verification is
polled later, between steps (verification.py). Versions never change: the weights of a step are published once.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import structlog

from trinity.runtime.errors import Conflict, TrinityError
from trinity.trainer.weights.canary import Tokens, probe_of_versions
from trinity.trainer.weights.claim import Claim
from trinity.trainer.weights.collective import CollectiveSender
from trinity.trainer.weights.shards import Snapshot, Weights, read_version, write_shards
from trinity.trainer.weights.verification import VerificationResults
from trinity.trainer.weights.version_stores import VersionStores
from trinity.weights import Canary, FileInfo, Lora, Manifest, TensorInfo, VersionState
from trinity.weights import client as calls
from trinity.weights.client import BlockingSyncClient, Version
from trinity.weights.pointer import Rollback

log = structlog.get_logger(__name__)

_LISTED = 20
_SETTLE_SECONDS = 0.5
_BETWEEN_POLLS = 0.05
_FILES = "part-{:05d}.safetensors"
_OPEN = (VersionState.STAGED, VersionState.VERIFIED)


class VersionLost(Conflict):
    """No explorer can load the LIVE version, and this trainer is past its step."""

    for_good = True


class _BaseRejected(Exception):
    """The sync service refused a difference: its base was rejected after the stores had got the difference."""


@dataclass(frozen=True)
class Opening:
    """The service's records of the run when a trainer starts. `is_new`: there are none."""

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
        """`removes_files`: those in the weights folder go when all steps are done. `lora`: versions are adapters."""
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
        self._lost: dict[int, Manifest] = {}  # by step: versions to be written again
        self._collectable: list[int] = []  # versions whose files are deleted once no explorer waits for this trainer
        self._registered_step = -1
        self.followed_rollback = 0

    @property
    def live_version(self) -> int:
        return self._results.live_version

    @property
    def newest_step(self) -> int:
        """Step of the newest version that is registered, or whose number a rollback has withdrawn."""
        rollback = self._claim.rollback
        return max(self._registered_step, rollback.newest_step if rollback else -1)

    @property
    def due_rollback(self) -> Rollback | None:
        """The newest rollback, if it is not applied to the weights yet."""
        newest = self._claim.rollback
        return newest if newest and newest.number > self.followed_rollback else None

    def poll(self) -> bool:
        """Poll for a rejected version; True if there is one. Cheap.

        Raises errors that end the trainer: a lost claim, or a rejected version with on_rejected stop.
        """
        self._claim.check()
        self._repair()
        rejected = self._results.poll()
        if rejected:
            self._stores.end_delta_chain()
        return rejected

    def _repair(self) -> None:
        """Publish the LIVE version again as it was, if the service cannot read its manifest any more."""
        version = self._claim.unreadable
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
        return calls.publish(manifest, self._claim.lease_id, self.followed_rollback, self._versions_to_keep)

    def open(self, rollback: int) -> Opening:
        """Claim the run and find its versions. `rollback`: number of the newest one applied to the weights."""
        self.followed_rollback = rollback
        self._claim.wait()
        known = self._client.ask(calls.versions(_LISTED))
        self._results.open(known)
        self._registered_step = max((version.manifest.step for version in known), default=-1)
        self._lost = {v.manifest.step: v.manifest for v in known if self._is_lost(v)}
        return Opening(not known, probe_of_versions([version.manifest for version in known]))

    def announce_base(
        self, base_model: str, canary: Canary | None, layout: Sequence[TensorInfo] = (), adapters: Weights = ()
    ) -> None:
        """Make the base model version 0, with adapters if `layout` describes any. No group exists yet."""
        self._base = Manifest(self._client.run, 0, 0, (), (), (), time.time(), base_model, canary=canary)
        if layout:
            tensors, infos = self._write(0, layout, adapters)
            self._base = self._stores.put(replace(self._base, tensors=tensors, files=infos, lora=self._lora))
            self._stores.seal(self._base)
        self._announce(self._base)

    def check_lost(self, step: int) -> None:
        """Raise VersionLost if explorers can load no version, and the weights of `step` cannot replace it."""
        if self._live_version_is_lost(step) and step <= self.newest_step:
            version = self.live_version
            raise VersionLost(
                f"the files of version {version}, which is LIVE, are gone from {self._stores.root}, and the trainer "
                f"continues from the checkpoint of step {step}: explorers can load nothing. Remove the checkpoints of "
                f"steps after {version} (global_step_<n>) from the job folder, so that step {version} is trained again "
                "and its version written again; or start a new run, under another name"
            )

    def wants(self, step: int, due: bool = True) -> bool:
        """Whether to publish the weights of a step: not if they were registered before a crash or a rollback.

        Lost versions are published again, and so are weights that are not `due` while explorers can load nothing.
        """
        if step in self._lost:
            return True
        return step > self.newest_step and (due or self._live_version_is_lost(step))

    def publish(self, step: int, layout: Sequence[TensorInfo], weights: Weights, canary: Canary | None) -> bool:
        """Publish the weights of a step under the step's own number. Whether `broadcast` is to follow."""
        self.poll()
        if step in self._lost:
            self._restore(self._lost[step], layout, weights)
            return False
        if self._live_version_is_lost(step):
            canary = None  # an explorer that starts now verifies nothing before it has loaded the LIVE version
        tensors, infos = self._write(step, layout, weights)
        now = time.time()
        manifest = Manifest(self._client.run, step, step, tensors, infos, (), now, canary=canary, lora=self._lora)
        try:
            taken = self._announce(self._put(manifest))
        except _BaseRejected:
            taken = self._announce(self._put(manifest))  # whole instead of a difference
        if taken:
            self._forget_lost(step)
        if taken and self._newest is not None and self._newest.collective is not None:
            return True
        self._delete_collectable()
        return False

    def broadcast(self, weights: Weights) -> None:
        """Send the last published version to its collective group."""
        assert self._collective is not None and self._newest is not None
        self._collective.send(self._newest, iter(weights))
        self._delete_collectable()

    def _delete_collectable(self) -> None:
        """Delete the files that sync has released. On a disk it takes as long as several broadcasts."""
        self._stores.delete(self._collectable)
        self._collectable = []

    def check(self) -> None:
        """Raise the error that ended the claim. For any thread, at any time."""
        self._claim.check()

    def read(self, version: int) -> Weights:
        """The weights of an older version. Raises Conflict if no store has its files undamaged."""
        manifest = self._client.ask(calls.version(version)).manifest
        if not manifest.files:
            raise Conflict(f"version {version} cannot be gone back to: the sync service cannot read its manifest")
        return read_version(manifest, self._stores.find(manifest))

    def follows(self, rollback: Rollback) -> None:
        """The engine has the weights of the rollback's version, which is LIVE again."""
        self.followed_rollback = rollback.number
        self._results.follows(rollback)
        self._stores.end_delta_chain()
        self._claim.renew()
        self._stores.drop_fetched()

    def wait_for_verification(self, stopping: Callable[[], bool]) -> None:
        """Wait until the version before is LIVE, or rejected, so that a newer one does not overtake it."""
        while self._results.pending and not stopping():
            self.poll()
            time.sleep(_BETWEEN_POLLS)

    def settle(self, seconds: float, stopping: Callable[[], bool]) -> None:
        """Wait until the newest version is verified, and served if its files will be removed; not without explorers."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not stopping():
            self.poll()
            served = self._client.ask(calls.served())
            behind = self._removes_files and any(version < self.live_version for version in served)
            if not served or not (self._results.pending or behind):
                break
            time.sleep(_SETTLE_SECONDS)
        if self._removes_files and not stopping():
            self._claim.renew()
            shutil.rmtree(self._stores.root, ignore_errors=True)

    def close(self) -> None:
        """Release the claim."""
        if self._collective is not None:
            self._collective.close()
        self._claim.close()
        self._stores.close()
        self._client.close()

    def _write(
        self, version: int, layout: Sequence[TensorInfo], weights: Weights
    ) -> tuple[tuple[TensorInfo, ...], tuple[FileInfo, ...]]:
        """Write the whole files. The folder gets its name once they are complete.

        Files are removed only while this trainer holds the claim: after it was frozen a successor's files may be here
        too.
        """
        root, folder = self._stores.root, self._stores.folder(version)
        partial = root / f".v{version}.{self._claim.lease_id}.partial"
        self._claim.renew()
        for left in root.glob(".v*.partial"):
            shutil.rmtree(left, ignore_errors=True)
        try:
            tensors, infos = write_shards(weights, layout, partial, _FILES, all_stay=isinstance(weights, Snapshot))
        except FileNotFoundError:  # a successor has removed the partial files: raise that it has the claim
            self._claim.renew()
            raise
        self._claim.renew()
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        return tuple(tensors), tuple(infos)

    def _put(self, manifest: Manifest) -> Manifest:
        """Put the version into the stores; returns the manifest with all offers, sealed."""
        sealed = self._stores.put(manifest, self._claim.renew)
        if sealed.delta is not None and self.poll():  # its base was rejected meanwhile
            sealed = self._stores.put(manifest, self._claim.renew)
        offer = self._collective.offer(self._claim.lease_id) if self._collective is not None else None
        if offer is not None:
            sealed = replace(sealed, offers=(*sealed.offers, offer))
        self._stores.seal(sealed)
        self._newest = sealed
        return sealed

    def _announce(self, manifest: Manifest) -> bool:
        """Publish it at the sync service. False if the version is withdrawn, or rejected with on_rejected continue.

        Raises VersionRejected for one that ends the trainer, _BaseRejected, and any other refusal.
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
        """Whether a difference was refused for its base. Raises VersionRejected where that ends the trainer."""
        if manifest.delta is None or self._registered_step == manifest.step:
            return False
        return self._results.rejects(manifest.delta.base_version)

    def _is_lost(self, known: Version) -> bool:
        """Whether it is LIVE, or newer and still to be verified, and its files are gone."""
        to_load = known.state is VersionState.LIVE or (known.state in _OPEN and known.version > self.live_version)
        return to_load and self._stores.has_lost(known.manifest)

    def _live_version_is_lost(self, step: int) -> bool:
        """Whether the files of the LIVE version are gone from every store, and its step is in the past."""
        live = self._lost.get(self.live_version)
        return live is not None and live.step < step and self._stores.only_here(live)

    def _forget_lost(self, step: int) -> None:
        """Explorers can load a version again; older lost ones are not needed."""
        self._lost = {lost: manifest for lost, manifest in self._lost.items() if lost > step}

    def _restore(self, manifest: Manifest, layout: Sequence[TensorInfo], weights: Weights) -> None:
        """Write the files of a version again. Raises Conflict if the version is LIVE and the weights now differ."""
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
