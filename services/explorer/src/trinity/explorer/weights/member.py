"""The explorer as a member of its run: it joins, watches and reports, and does so again until it leaves."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from trinity.explorer.weights.choice import Choice
from trinity.explorer.weights.loader import Loaded
from trinity.runtime.errors import AlreadyExists, Conflict, TrinityError, Unavailable
from trinity.weights import ExplorerState
from trinity.weights import client as calls
from trinity.weights.canary import Measured
from trinity.weights.client import Membership, Report, SyncClient, Version, View

log = structlog.get_logger(__name__)

_RETRY_SECONDS = 0.5
# A restarted explorer finds its own old lease. A lease older than this belongs to another explorer.
_FOREIGN_LEASE_SECONDS = 40.0
_NO_FAILURE = (-1, "", False)  # version, reason, whether the version itself may be right


@dataclass
class Activity:
    """The explorer's state and speed, which each report has beside the weights."""

    state: Callable[[], ExplorerState]
    tokens_per_second: Callable[[], float]
    tokens_generated: Callable[[], int]
    keeps_weights: Callable[[], bool]  # what runs must end before newer weights come


class Reports:
    """Fills reports: the served weights, canaries that the service waits for, and the newest failure to load.

    `updates`, `transport` and `last_pause_seconds` count and describe loads; the model of the start is none.
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
        """Repeat only the canary that the service waits for: it may have been restarted after the report."""
        if self._failed[:2] == (report.failed_version, report.failure):
            self._failed = _NO_FAILURE
        candidate = self._choice.view.candidate
        for version, measured in report.canaries:
            if (candidate is None or version != candidate.version) and self._canaries.get(version) is measured:
                del self._canaries[version]


class CannotJoin(Conflict):
    """The run takes no explorer like this one."""

    for_good = True


class SyncMember:
    """`on_view` is called with every view that the service sends."""

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
        self._due = asyncio.Event()
        self._lease = ""
        self._left = False

    def report_soon(self) -> None:
        """There is something new to report."""
        self._due.set()

    async def run(self) -> None:
        """Join, then watch and report until the lease is lost. Repeats until `leave`. CannotJoin if refused."""
        while not self._left:
            try:
                lease_seconds = await self._join()
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._watch())
                    group.create_task(self._report(lease_seconds))
            except* TrinityError as errors:
                first = errors.exceptions[0]
                if isinstance(first, (AlreadyExists, CannotJoin)):
                    raise
                log.info("explorer.sync.left" if self._left else "explorer.sync.lost", reason=str(first))
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

    async def version(self, version: int) -> Version | None:
        """What the service knows of a version; None if it does not say."""
        try:
            return await self._sync.ask(calls.version(version))
        except TrinityError as error:
            log.info("explorer.sync.silent", version=version, reason=str(error))
            return None

    async def _join(self) -> float:
        waited = 0.0
        while True:
            try:
                self._lease, lease_seconds = await self._sync.ask(calls.join(self._membership), waits=True)
                break
            except AlreadyExists:
                if waited > _FOREIGN_LEASE_SECONDS:
                    raise
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
