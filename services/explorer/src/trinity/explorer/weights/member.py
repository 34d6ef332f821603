"""The explorer as a member of its run: it joins, watches and reports, and does so again until it leaves."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import structlog

from trinity.runtime.errors import AlreadyExists, Conflict, TrinityError
from trinity.weights import VersionState
from trinity.weights import client as calls
from trinity.weights.client import Membership, Report, SyncClient, Version, View

log = structlog.get_logger(__name__)

_RETRY_SECONDS = 0.5
# A restarted explorer finds its own old lease. A lease older than this belongs to another explorer.
_FOREIGN_LEASE_SECONDS = 40.0


class CannotJoin(Conflict):
    """The run takes no explorer like this one."""

    for_good = True


class SyncMember:
    """`on_view` gets every watched state, `make_report` fills reports, `reported` gets each report that arrived."""

    def __init__(
        self,
        address: str,
        membership: Membership,
        on_view: Callable[[View], Awaitable[None]],
        make_report: Callable[[], Report],
        reported: Callable[[Report], None],
    ) -> None:
        self._sync = SyncClient(address, membership.run)
        self._membership = membership
        self._on_view = on_view
        self._make_report = make_report
        self._reported = reported
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

    async def state_of(self, version: int) -> VersionState | None:
        """A version's state; None if the service does not say."""
        known = await self.version(version)
        return known.state if known is not None else None

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
            report = self._make_report()
            await self._sync.ask(calls.report(self._lease, report))
            self._reported(report)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(lease_seconds / 5):
                    await self._due.wait()
