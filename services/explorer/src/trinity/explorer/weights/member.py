"""The explorer as a member of its run, which joins, watches and reports, and of the trainer's collective group."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import structlog

from trinity.explorer.types import EngineFailed
from trinity.explorer.weights.choice import Choice
from trinity.explorer.weights.loader import Loaded
from trinity.runtime import waits
from trinity.runtime.errors import AlreadyExists, Conflict, NotFound, TrinityError, Unavailable
from trinity.weights import client as calls
from trinity.weights.client import Epoch, Membership, Report, SyncClient, Version, View
from trinity.weights.collective import GroupBroken, Store
from trinity.weights.manifest import Manifest, Measured
from trinity.weights.wire import ExplorerState

log = structlog.get_logger(__name__)

_RETRY_SECONDS = 0.5
# A restarted explorer meets its old lease. A lease that lives longer belongs to another explorer.
_FOREIGN_LEASE_SECONDS = 40.0
_NO_FAILURE = (-1, "", False)  # version, reason, whether the version itself may be right


# Makes all engines enter a group: engine.worker.InitInfo without first_rank, and this explorer's first rank.
Enter = Callable[[dict[str, Any], int], Awaitable[None]]


@dataclass
class Activity:
    """The explorer's state and speed for reports."""

    state: Callable[[], ExplorerState]
    tokens_per_second: Callable[[], float]
    tokens_generated: Callable[[], int]
    keeps_weights: Callable[[], bool]  # running work must end before newer weights are loaded


class Reports:
    """Fills reports: the served weights, canaries that the service waits for, and the newest failure to load.

    `updates` counts loads without the initial model; `transport` and `last_pause_seconds` describe the newest.
    """

    def __init__(self, activity: Activity, choice: Choice) -> None:
        self._activity, self._choice = activity, choice
        self._failed: tuple[int, str, bool] = _NO_FAILURE
        self._canaries: dict[int, Measured] = {}
        self.updates, self.transport, self.last_pause_seconds = 0, "", 0.0

    def note(self, loaded: Loaded) -> None:
        if loaded.measured is not None:
            self._canaries[loaded.manifest.version] = loaded.measured
        if loaded.right and loaded.transport:
            self.updates += 1
            self.transport, self.last_pause_seconds = loaded.transport, loaded.pause_seconds

    def note_failure(self, version: int, error: TrinityError) -> None:
        self._failed = (version, str(error), isinstance(error, Unavailable))

    def make(self) -> Report:
        failed_version, failure, is_passing = self._failed
        return Report(
            version=self._choice.version,
            state=self._activity.state().wire_name,
            tokens_per_second=self._activity.tokens_per_second(),
            tokens_generated=self._activity.tokens_generated(),
            last_pause_seconds=self.last_pause_seconds,
            failed_version=failed_version,
            failure=failure,
            failure_is_passing=is_passing,
            canaries=tuple(self._canaries.items()),
            transport=self.transport,
        )

    def delivered(self, report: Report) -> None:
        """Forget delivered news, except the candidate's canary: a service that restarts needs it again."""
        if self._failed[:2] == (report.failed_version, report.failure):
            self._failed = _NO_FAILURE
        candidate = self._choice.view.candidate
        for version, measured in report.canaries:
            if (candidate is None or version != candidate.version) and self._canaries.get(version) is measured:
                del self._canaries[version]


class CannotJoin(Conflict):
    """The run refuses explorers with these capabilities."""

    for_good = True


class SyncMember:
    """Calls `on_view` with every view of the sync service."""

    def __init__(
        self,
        address: str,
        membership: Membership,
        on_view: Callable[[View], Awaitable[None]],
        reports: Reports,
    ) -> None:
        self._sync = SyncClient(address, membership.run)
        self._membership = membership
        self._on_view = on_view
        self._reports = reports
        self._absence = waits.Absence(f"the sync service at {address}")
        self._due = asyncio.Event()
        self._lease = ""
        self._left = False

    def report_soon(self) -> None:
        """Send the next report now."""
        self._due.set()

    async def run(self) -> None:
        """Join, then watch and report until the lease is lost. Repeats until `leave`.

        Raises CannotJoin if refused, Unavailable if the service stays away for the limit of `waits.Absence`.
        """
        while not self._left:
            try:
                lease_seconds = await self._join()
                self._absence.found()
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._watch())
                    group.create_task(self._report(lease_seconds))
            except* TrinityError as errors:
                first = errors.exceptions[0]
                if isinstance(first, (AlreadyExists, CannotJoin)):
                    raise
                if self._left:
                    log.info("explorer.sync.left")
                else:
                    log.info("explorer.sync.lost", reason=str(first))
                    self._absence.lost(str(first))
            await asyncio.sleep(_RETRY_SECONDS)
        await asyncio.Event().wait()

    async def leave(self) -> None:
        """Leave the run and do not join again. Idempotent."""
        if self._left:
            return
        self._left = True
        if self._lease:
            with contextlib.suppress(TrinityError):
                await self._sync.ask(calls.leave(self._lease))
        await self._sync.close()

    async def find(self, version: int) -> Version | None:
        """The service's record of a version; None if there is none. Raises Unavailable without an answer."""
        try:
            return await self._sync.ask(calls.version(version))
        except NotFound:
            return None

    async def version(self, version: int) -> Version | None:
        """The service's record of a version; None if there is none or no answer."""
        try:
            return await self.find(version)
        except TrinityError as error:
            log.info("explorer.sync.silent", version=version, reason=str(error))
            return None

    async def _join(self) -> float:
        waited = 0.0
        while True:
            try:
                self._lease, lease_seconds = await self._sync.ask(calls.join(self._membership), waits=True)
                break
            except AlreadyExists as error:
                if waited > _FOREIGN_LEASE_SECONDS:
                    raise
                if not waited:
                    log.info("explorer.sync.occupied", seconds=_FOREIGN_LEASE_SECONDS, reason=str(error))
            except Conflict as refused:
                raise CannotJoin(str(refused)) from None
            await asyncio.sleep(1.0)
            waited += 1.0
        log.info("explorer.sync.joined", lease_seconds=lease_seconds)
        return lease_seconds

    async def _watch(self) -> None:
        async for view in self._sync.watch(self._lease):
            await self._on_view(view)

    async def _report(self, lease_seconds: float) -> None:
        while True:
            self._due.clear()
            report = self._reports.make()
            await self._sync.ask(calls.report(self._lease, report))
            self._reports.delivered(report)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(lease_seconds / 5):
                    await self._due.wait()


class CollectiveMember:
    """Follows the epochs of this explorer. Never raises: an explorer that is not ready loads from storage."""

    def __init__(self, explorer_id: str, enter: Enter, timeout_seconds: float) -> None:
        self._id = explorer_id
        self._enter = enter
        self._timeout = timeout_seconds
        self._number = 0
        self._store: Store | None = None
        self._entering: asyncio.Task[None] | None = None
        self._declining: set[asyncio.Task[Any]] = set()

    def epoch(self, epoch: Epoch | None) -> None:
        """Leave the previous epoch and enter this one in the background, if it is new."""
        number = epoch.number if epoch is not None else 0
        if number == self._number:
            return
        self._number, self._store = number, None
        before, self._entering = self._entering, None
        if before is not None:
            before.cancel()
        if epoch is not None:
            self._entering = asyncio.create_task(self._join(epoch, before))

    async def _join(self, epoch: Epoch, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        try:
            store = await asyncio.to_thread(Store.connect, epoch.store_address, epoch.store_secret, self._timeout)
            await asyncio.to_thread(store.say, f"here/{epoch.number}/{self._id}")
            if not await asyncio.to_thread(store.wait, f"go/{epoch.number}", self._timeout):
                raise GroupBroken("the trainer gave it up")
            first = next(member.first_rank for member in epoch.members if member.explorer_id == self._id)
            group = {
                "epoch": epoch.number,
                "backend": epoch.backend,
                "store_address": epoch.store_address,
                "store_secret": epoch.store_secret,
                "world_size": epoch.world_size,
                "timeout_seconds": self._timeout,
            }
            await self._enter(group, first)
            self._store = store
            log.info("explorer.epoch.entered", epoch=epoch.number, first_rank=first, world_size=epoch.world_size)
        except (GroupBroken, EngineFailed, StopIteration) as error:  # a dead engine is found by its health
            log.warning("explorer.epoch.missed", epoch=epoch.number, reason=str(error))

    def decline(self, manifest: Manifest) -> None:
        """Tell the group, in the background, not to wait for this explorer."""
        declining = asyncio.create_task(self.ready(manifest, willing=False))
        self._declining.add(declining)
        declining.add_done_callback(self._declining.discard)

    async def ready(self, manifest: Manifest, willing: bool = True) -> dict[str, Any] | None:
        """Wait until all members are ready. Returns the engines' update info; None to load the version another way."""
        offer = manifest.collective
        if offer is None or offer.epoch != self._number:
            return None
        if self._entering is not None:
            await asyncio.wait([self._entering], timeout=self._timeout)
        if self._store is None:
            return None
        store, version = self._store, manifest.version
        try:
            await asyncio.to_thread(store.say, f"ready/{offer.epoch}/{version}/{self._id}", willing)
            if not willing or not await asyncio.to_thread(store.wait, f"go/{offer.epoch}/{version}", 2 * self._timeout):
                return None
        except GroupBroken as error:
            log.warning("explorer.epoch.broken", epoch=offer.epoch, reason=str(error))
            if self._store is store:
                self._store = None
            return None
        tensors = [[t.name, t.dtype, list(t.shape), t.size_bytes] for t in manifest.tensors]
        return {"epoch": offer.epoch, "bucket_bytes": offer.bucket_bytes, "tensors": tensors}

    async def close(self) -> None:
        """Leave the epoch."""
        self._store = None
        open_calls = [*self._declining, *([self._entering] if self._entering is not None else [])]
        for call in open_calls:
            call.cancel()
        await asyncio.gather(*open_calls, return_exceptions=True)
        self._entering = None
