"""The runs that this process serves. A request that names a run opens it; a run without requests is closed."""

import asyncio
import time
from dataclasses import dataclass

import structlog

from trinity.runtime.broker import Bucket, is_cancelled
from trinity.runtime.errors import DataLoss, Full, InvalidInput, Unavailable
from trinity.runtime.names import IS_RUN, RunNames
from trinity.sync.canary import Canaries
from trinity.sync.claims import Claims
from trinity.sync.lifecycle import Versions
from trinity.sync.members import Epochs, Members
from trinity.sync.settings import SyncSettings
from trinity.sync.store import records
from trinity.sync.store.manifests import Manifests
from trinity.sync.store.state import RunState
from trinity.sync.watch import Watches
from trinity.weights.pointer import Rollback

log = structlog.get_logger(__name__)

_OPEN_SECONDS = 20.0
_IDLE_SECONDS = 60.0
_MOST_OPEN = 1000
_SETTLE_AGAIN_SECONDS = 1.0


@dataclass(frozen=True)
class Buckets:
    """The KV buckets. NATS takes `most_bytes` in one message."""

    versions: Bucket
    manifests: Bucket
    members: Bucket
    most_bytes: int


class Run:
    """One run's parts, wired."""

    def __init__(self, name: str, buckets: Buckets, settings: SyncSettings) -> None:
        self.name = name
        self.state = RunState(buckets.versions, name)
        self.members = Members(buckets.members, name, settings.lease_seconds)
        self.manifests = Manifests(buckets.manifests, name, buckets.most_bytes, settings.job_folder)
        self.claims = Claims(self.state, settings.claim_seconds)
        self.versions = Versions(self.state, self.manifests, self.claims)
        self.canaries = Canaries(self.state, self.versions, self.members, self.manifests, settings.canary_seconds)
        self.epochs = Epochs(self.state)
        self.watches = Watches(self.state, self.members, self.manifests)
        self.used_at = time.monotonic()
        self.failure = ""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.state.mirror.run())
            group.create_task(self.members.run())
            await self.ready()
            group.create_task(self._settle())
            group.create_task(self.canaries.run())
            group.create_task(self.watches.run())

    async def ready(self) -> None:
        """Waits until all entries in KV are known."""
        await self.state.mirror.ready.wait()
        await self.members.ready.wait()

    async def _settle(self) -> None:
        """Finishes changes that another instance, or this one before a kill, has left half done."""
        while not is_cancelled():
            change = self.state.changed.next()
            try:
                await self.versions.settle()
            except Unavailable as error:
                log.info("sync.settle.postponed", reason=str(error))
                await asyncio.sleep(_SETTLE_AGAIN_SECONDS)
                continue
            await asyncio.wait([change])

    def withdrawn_by(self, rollback: Rollback) -> list[int]:
        """Returns the versions that this rollback withdrew, without those rejected or withdrawn before."""
        before = [other for other in self.state.live.rollbacks if other.number < rollback.number]
        return [
            record.version
            for record in reversed(self.state.newest_first)
            if rollback.withdraws(record.version)
            and not record.reason
            and not any(other.withdraws(record.version) for other in before)
        ]

    def withdrawn(self) -> list[int]:
        """Returns the versions that any rollback withdrew, without versions rejected before."""
        live = self.state.live
        found = (r.version for r in reversed(self.state.newest_first) if live.is_withdrawn(r.version) and not r.reason)
        return list(found)


class Runs:
    """The open runs. A run with unreadable data is refused until it is closed; the next request opens it again."""

    def __init__(self, buckets: Buckets, settings: SyncSettings) -> None:
        self._buckets = buckets
        self._settings = settings
        self._open: dict[str, tuple[Run, asyncio.Task[None]]] = {}
        self._group: asyncio.TaskGroup | None = None

    async def work(self, ready: asyncio.Event) -> None:
        """Runs all open runs. Ends only by an error that one of them raised."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            ready.set()
            while True:
                await asyncio.sleep(_IDLE_SECONDS / 4)
                self._close_what_is_idle()

    @property
    def open(self) -> list[Run]:
        """Returns the runs that are served now."""
        return [run for run, _ in self._open.values() if not run.failure]

    async def find(self, name: str) -> Run | None:
        """Returns the run, or None for a run that no process has used: many names cost no memory."""
        _check_name(name)
        if name not in self._open:
            buckets, members = self._buckets, RunNames(name).members
            if not await buckets.versions.has(name) and not await buckets.members.has(members):
                return None
        return await self.get(name)

    async def get(self, name: str) -> Run:
        """Returns the run once its KV entries have been read. From then on the caller's log lines name it."""
        _check_name(name)
        structlog.contextvars.bind_contextvars(run=name)
        if name not in self._open:
            self._start(name)
        run = self._open[name][0]
        if run.failure:
            raise DataLoss(run.failure)
        run.used_at = time.monotonic()
        try:
            await asyncio.wait_for(run.ready(), _OPEN_SECONDS)
        except TimeoutError:
            raise Unavailable("NATS does not answer; try again") from None
        return run

    def _start(self, name: str) -> None:
        if self._group is None:
            raise Unavailable("the sync service is still starting")
        if len(self._open) >= _MOST_OPEN:
            raise Full(f"run: {_MOST_OPEN} runs are open here, none of them idle; try again later")
        run = Run(name, self._buckets, self._settings)
        self._open[name] = run, self._group.create_task(_alone(run), name=f"run {name}")

    def _close_what_is_idle(self) -> None:
        for name, (run, task) in list(self._open.items()):
            if not run.watches.streams and time.monotonic() - run.used_at > _IDLE_SECONDS:
                task.cancel()
                del self._open[name]


def _check_name(name: str) -> None:
    if not IS_RUN.fullmatch(name):
        problem = f"is {name[:50]!r}, must be letters, digits, underscores and hyphens" if name else "is empty"
        raise InvalidInput("run", problem)


async def _alone(run: Run) -> None:
    """Runs one run. Unreadable records end only this run; any other error ends the service."""
    try:
        await run.run()
    except* (DataLoss, *records.UNREADABLE) as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        run.failure = f"run: {run.name} cannot be served, its records in NATS cannot be read: {first!r}"
        log.error("sync.run.failed", run=run.name, reason=repr(first))
        run.watches.end(run.failure)
