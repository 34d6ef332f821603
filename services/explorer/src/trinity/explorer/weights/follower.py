"""Keeps the engines at the version that the sync service wants, and reports the result.

    the service's view -> Choice (choice.py) -> Loader (loader.py) -> Gates (choice.py), Reports (member.py)

The follower loads the LIVE version; the run's canary explorer also loads candidates. Samples count once their load is
known to be good (load_history.py). When weights turn out wrong, or a rollback withdraws them, the engines load the LIVE
version in full. If these engines cannot compute with the LIVE version, the explorer exits with the reason.
"""

import asyncio
import contextlib
import time
from functools import partial

import structlog

from trinity.explorer.types import EngineFailed
from trinity.explorer.weights.choice import Choice, ExactGates, Gates
from trinity.explorer.weights.loader import Engines, Loaded, Loader
from trinity.explorer.weights.member import Activity, CollectiveMember, Reports, SyncMember
from trinity.runtime.errors import InvalidInput, TrinityError, Unavailable
from trinity.runtime.metrics import Gauge
from trinity.weights.client import Membership, Version, View
from trinity.weights.manifest import Manifest
from trinity.weights.stores.cache import WeightCache
from trinity.weights.wire import VersionState

log = structlog.get_logger(__name__)

VERSION = Gauge("trinity_explorer_weight_version", "Weight version served")

_RETRY_SECONDS = 5.0
_ASK_SECONDS = 2.0


class WeightsWrong(TrinityError):
    """These engines fail the canary of a version that other explorers compute right."""


class WeightFollower:
    """Runs three tasks: the member watches and reports, loads follow the views, verdicts on early loads are polled."""

    def __init__(
        self,
        address: str,
        membership: Membership,
        engines: Engines,
        cache: WeightCache,
        activity: Activity,
        exact: ExactGates,
        collective: CollectiveMember | None = None,
        merges: bool = True,
    ) -> None:
        transport = next((t for t in membership.transports if t.startswith("collective")), "collective")
        self._loads = engines.loads
        self._loads.hide_initial_weights()
        self._loader = Loader(engines, cache, membership.base_model, collective, transport, merges)
        self._choice = Choice(exact)
        self.reports = Reports(activity, self._choice)
        self._member = SyncMember(address, membership, self._watched, self.reports)
        self._exact, self._collective = exact, collective
        self._activity, self._was_busy = activity, False
        self._changed = asyncio.Condition()
        self.gates = Gates(self._changed, self._loader, self._choice, exact)

    @property
    def version(self) -> int:
        """The newest version whose canary passed here; -1 before it."""
        return self._choice.version

    @property
    def step(self) -> int:
        return self._choice.step

    @property
    def updating(self) -> bool:
        return self._loader.updating

    def is_usable(self, version: int, most_stale: int | None = None) -> bool:
        """True if tokens of a version may be trained: it is neither rejected nor withdrawn, and at most `most_stale`
        versions older than the served one."""
        stale = most_stale is not None and self.version - version > most_stale
        return version not in self._choice.view.rejected and not stale

    async def find(self, version: int) -> Version | None:
        """The service's record of a version; None if there is none. Raises Unavailable without an answer."""
        return await self._member.find(version)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._member.run())
            group.create_task(self._load_wanted_versions())
            group.create_task(self._poll_verdicts())

    async def leave(self) -> None:
        if self._collective is not None:
            await self._collective.close()
        await self._member.leave()

    async def notify(self) -> None:
        """Call this when the explorer may have become busy or idle."""
        busy, candidate = self._activity.keeps_weights(), self._choice.view.candidate
        if busy is not self._was_busy:
            self._was_busy = busy
            self._member.report_soon()
        if busy and candidate is not None:
            self._loader.decline(candidate)
        async with self._changed:
            self._changed.notify_all()

    async def _watched(self, view: View) -> None:
        if self._collective is not None:
            self._collective.epoch(view.epoch)
        await self._observe(view)

    async def _observe(self, view: View) -> None:
        self._choice.observe(view)
        self._loads.reject(view.rejected, "was rejected or withdrawn")
        if (live := self._choice.view.live) is not None:
            self._loads.verify(live.version)
        await self._update()

    async def _update(self) -> None:
        """Tell the waiting tasks and the sync service that the state of the weights has changed."""
        self.gates.update()
        self._member.report_soon()
        await self.notify()

    def _next(self) -> Manifest | None:
        corrupt = self.version >= 0 and self._loads.corrupt
        return self._choice.next(corrupt, self._activity.keeps_weights())

    def _lacks_past(self) -> bool:
        return self._exact.lacks(self._choice.view)

    async def _load_wanted_versions(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):  # a version that was postponed may be tried again
                async with asyncio.timeout(_RETRY_SECONDS), self._changed:
                    await self._changed.wait_for(lambda: self._next() is not None or self._lacks_past())
            if self._lacks_past():
                await self._exact.find(self._member.version)
                await self._update()
                await asyncio.sleep(_ASK_SECONDS if self._lacks_past() else 0)
            wanted = self._next()
            if wanted is not None:
                await self._load(wanted)

    async def _load(self, wanted: Manifest) -> None:
        """Load a version. A damaged, collected or unreachable one is tried again later, while good weights serve."""
        began, is_live = time.monotonic(), partial(self._choice.is_live, wanted.version)
        try:
            loaded = await self._loader.load(wanted, is_live, partial(self._still_wants, wanted))
        except (InvalidInput, Unavailable, EngineFailed) as error:
            if isinstance(error, EngineFailed) and is_live():
                raise
            log.warning("explorer.weights.refused", version=wanted.version, reason=str(error))
            self.reports.note_failure(wanted.version, error)
            self._choice.postpone(wanted.version, _RETRY_SECONDS)
            if is_live():
                self.gates.note_failure(began)
            await self._update()
            return
        if loaded is not None:
            await self._note(loaded)

    def _still_wants(self, wanted: Manifest) -> bool:
        waits = self._activity.keeps_weights() and not self._loads.corrupt
        return self._choice.still_wants(wanted) and not waits

    async def _note(self, loaded: Loaded) -> None:
        """Serve what was loaded, if the engines compute its canary right."""
        version = loaded.manifest.version
        self.reports.note(loaded)
        if loaded.right:
            self._choice.hold(loaded.manifest)
            VERSION.set(version)
            await self._loader.forget_all_but(self._choice.needed)
        elif self._choice.is_live(version):
            raise WeightsWrong(
                f"version {version} is LIVE, but these engines do not compute its canary, though it was loaded again "
                f"in full: {loaded.measured}. Is it the same model in a dtype like the trainer's? A vLLM that does not "
                "reload tied embeddings needs a model with tie_word_embeddings: false"
            )
        else:
            self._choice.refuse(version)
        await self._observe(self._choice.view)  # the service's verdict may have come during the load

    async def _poll_verdicts(self) -> None:
        """Follow up versions that were loaded before they were LIVE."""
        while True:
            async with self._changed:
                await self._changed.wait_for(self._loads.unverified)
            for version in self._loads.unverified():
                known, live = await self._member.version(version), self._choice.view.live
                state = known.state if known is not None else None
                if state in (VersionState.VERIFIED, VersionState.LIVE, VersionState.RETIRED):
                    self._loads.verify(version)
                elif state is VersionState.REJECTED:
                    self._loads.reject([version], "was rejected")
                elif state is VersionState.STAGED and live is not None and live.version > version:
                    self._loads.reject([version], "was never judged")
            await self._update()
            await asyncio.sleep(_ASK_SECONDS)
