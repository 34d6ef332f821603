"""Keeps the engines at the version that the sync service wants, and reports the result.

It loads the LIVE version; the run's canary explorer also loads candidates. Samples count once their load is known to be
good (see load_history.py). When weights turn out wrong, or a rollback withdraws them, the engines load the LIVE version
in full. If these engines cannot compute with the LIVE version, the explorer exits with the reason.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import structlog

from trinity.explorer.types import EngineFailed
from trinity.explorer.weights import loader
from trinity.explorer.weights.exact import ExactGates
from trinity.explorer.weights.fetch import Cache, run_in_daemon_thread
from trinity.explorer.weights.load_history import Verdict
from trinity.explorer.weights.loader import Engines, Loaded, Loader
from trinity.explorer.weights.member import SyncMember
from trinity.runtime.errors import InvalidInput, TrinityError, Unavailable
from trinity.runtime.metrics import Gauge
from trinity.weights import ExplorerState, Manifest, VersionState
from trinity.weights.canary import Measured
from trinity.weights.client import Epoch, Membership, Report, View

log = structlog.get_logger(__name__)

VERSION = Gauge("trinity_explorer_weight_version", "Weight version served")

_RETRY_SECONDS = 5.0
_ASK_SECONDS = 2.0
_FORGET_SECONDS = 60.0
# After failing this long to load a LIVE version, return the tasks that need it to other explorers.
_OUT_OF_REACH_SECONDS = 15.0
_NO_FAILURE = (-1, "", False)  # version, reason, whether the version itself may be right


@dataclass(frozen=True)
class Held:
    """What the engines hold. `version` is -1 before the first.

    `corrupt`: known to be wrong, or a load failed. `was_live`: it was LIVE once. `refused` are candidates
    whose canary failed here.
    """

    version: int = -1
    corrupt: bool = False
    was_live: bool = False
    refused: frozenset[int] = frozenset()


def next_load(view: View, held: Held, keeps: bool) -> Manifest | None:
    """What to load now; None: nothing.

    `keeps`: newer versions wait, as while an evaluation runs here, so that it measures one version. A load that
    replaces wrong or withdrawn weights does not wait.
    """
    live = view.live if view.live is None or view.live.version not in view.rejected else None
    candidate, unwanted = view.candidate, view.rejected | held.refused
    if live is not None:
        withdrawn = held.version in view.rejected or (live.version < held.version and held.was_live)
        if held.version < 0 or held.corrupt or withdrawn:
            return live
    newer = live if live is not None and live.version > held.version else None
    if candidate is not None and candidate.version > held.version and candidate.version not in unwanted:
        newer = candidate
    return None if keeps and held.version >= 0 else newer


class WeightsWrong(TrinityError):
    """These engines do not compute a version that other explorers compute right."""


class Collective(loader.Collective, Protocol):
    """The part of a collective group that the follower needs."""

    async def epoch(self, epoch: Epoch | None) -> None:
        """Membership news: the epoch this explorer belongs to now, if any. One call at a time."""

    async def close(self) -> None:
        """The explorer leaves."""


@dataclass
class Activity:
    """What the rest of the explorer adds to each report."""

    state: Callable[[], ExplorerState]
    tokens_per_second: Callable[[], float]
    tokens_generated: Callable[[], int]
    keeps_weights: Callable[[], bool]  # what runs must end before newer weights come


class WeightFollower:
    """`version`, `step`, `transport`, `last_pause_seconds`: of the newest load whose canary passed; -1 before it."""

    def __init__(
        self,
        address: str,
        membership: Membership,
        engines: Engines,
        cache: Cache,
        activity: Activity,
        collective: Collective | None = None,
        exact: ExactGates | None = None,
    ) -> None:
        transport = next((t for t in membership.transports if t.startswith("collective")), "collective")
        self._loads = engines.loads
        self._loads.hide_initial_weights()
        self._loader = Loader(engines, cache, membership.base_model, collective, transport)
        self._link = SyncMember(address, membership, self._observe, self._make_report, self._reported)
        self._cache = cache
        self._activity = activity
        self._collective = collective
        self._exact = exact
        self._view = View()
        self._held = Held()
        self._gate = -1
        self._keeps = False
        self._changed = asyncio.Condition()
        self._failed: tuple[int, str, bool] = _NO_FAILURE
        self._failing_since: float | None = None  # the LIVE version; since the first try that failed began
        self._live_unreachable = False
        self._returned_gate = -1  # highest gate that could not be met here
        self._retry_at: dict[int, float] = {}
        self._canaries: dict[int, Measured] = {}
        self.version = -1
        self.step = -1
        self.updates = 0
        self.last_pause_seconds = 0.0
        self.transport = ""

    @property
    def updating(self) -> bool:
        return self._loader.updating

    def is_usable(self, version: int, most_stale: int | None = None) -> bool:
        """Whether tokens of a version may be trained: neither rejected nor withdrawn, and at most
        `most_stale` versions older than the one served."""
        stale = most_stale is not None and self.version - version > most_stale
        return version not in self._view.rejected and not stale

    async def wait_for_step(self, step: int) -> None:
        """Wait until the engines serve weights that meet the gate of that optimizer step and are known to be good."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._serves(step))

    async def reaches_step(self, step: int) -> bool:
        """As `wait_for_step`. False once the LIVE version meets the gate but cannot be loaded here."""
        with self._exact.waiting(step) if self._exact is not None else contextlib.nullcontext():
            async with self._changed:
                self._changed.notify_all()
                await self._changed.wait_for(lambda: self._meets(step) or self._cannot_load(step))
            if self._meets(step):
                return True
        self._returned_gate = max(self._returned_gate, step)
        return False

    @property
    def falls_short(self) -> bool:
        """Whether new tasks would be returned to the queue, as an earlier one was."""
        return self._cannot_load(self._returned_gate)

    def _meets(self, step: int) -> bool:
        allowed = self._exact is None or (not self.updating and self._exact.allows(step, self.step))
        return allowed and self._serves(step)

    def _serves(self, step: int) -> bool:
        return self._gate >= step and not self._loads.corrupt

    def _cannot_load(self, step: int) -> bool:
        return self._live_unreachable and self._view.gate_step >= step and not self._serves(step)

    async def notify(self) -> None:
        """Called when the explorer may have become busy or idle."""
        keeps = self._activity.keeps_weights()
        if keeps is not self._keeps:
            self._keeps = keeps
            self._link.report_soon()
        async with self._changed:
            self._changed.notify_all()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._link.run())
            group.create_task(self._load_wanted_versions())
            group.create_task(self._poll_verdicts())
            if self._collective is not None:
                group.create_task(self._update_group(self._collective))

    async def leave(self) -> None:
        if self._collective is not None:
            await self._collective.close()
        await self._link.leave()

    async def _observe(self, view: View) -> None:
        """News from the sync service. A LIVE version that it cannot describe leaves the one before it in force."""
        if view.problem:
            if view.problem != self._view.problem:
                log.error("explorer.weights.live_unreadable", version=self.version, reason=view.problem)
            view = replace(view, live=self._view.live, gate_step=self._view.gate_step)
        self._view = view
        self._loads.reject(view.rejected, "was rejected or withdrawn")
        if view.live is not None:
            self._loads.verify(view.live.version)
            if view.live.version == self._held.version:
                self._held = replace(self._held, was_live=True)
        await self._notify_changed()

    async def _notify_changed(self) -> None:
        """Tell the waiting tasks and the sync service that the state of the weights has changed."""
        held, live = self._held, self._view.live
        if held.version >= 0 and self._loads.verdict(self._loads.newest) is Verdict.GOOD:
            is_live = live is not None and live.version == held.version
            self._gate = max(self.step, self._view.gate_step) if is_live else self.step
            if is_live:
                self._failing_since, self._live_unreachable = None, False
        self._link.report_soon()
        await self.notify()

    def _next(self) -> Manifest | None:
        later = {version for version, until in self._retry_at.items() if until > time.monotonic()}
        corrupt = self._held.version >= 0 and self._loads.corrupt
        held = replace(self._held, corrupt=corrupt, refused=self._held.refused | later)
        found = next_load(self._view, held, self._keeps_weights())
        if self._exact is not None and not self._activity.keeps_weights():
            found = self._exact.wanted(self.step) or found
        return None if found is not None and found.version in later else found

    def _keeps_weights(self) -> bool:
        waited_for = self._exact is not None and self._exact.keeps(self.step)
        return waited_for or self._activity.keeps_weights()

    def _is_live(self, manifest: Manifest) -> bool:
        return self._view.live is not None and self._view.live.version == manifest.version

    async def _load_wanted_versions(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):  # a version that was skipped may be tried again
                async with asyncio.timeout(_RETRY_SECONDS), self._changed:
                    await self._changed.wait_for(lambda: self._next() is not None or self._lacks_past())
            if self._exact is not None and self._lacks_past():
                await self._exact.find(self._link)
                await self._notify_changed()
                await asyncio.sleep(_ASK_SECONDS if self._lacks_past() else 0)
            wanted = self._next()
            if wanted is None:
                continue
            begin = time.monotonic()
            try:
                await self._load(wanted)
            except (InvalidInput, Unavailable, EngineFailed) as error:
                if isinstance(error, EngineFailed) and self._is_live(wanted):
                    raise
                await self._schedule_retry(wanted, error, begin)

    def _lacks_past(self) -> bool:
        return self._exact is not None and self._exact.lacks(self._view)

    async def _load(self, wanted: Manifest) -> None:
        def still_wanted() -> bool:
            past = self._exact.wanted(self.step) if self._exact is not None else None
            named = {m.version for m in (self._view.live, self._view.candidate, past) if m is not None}
            waits = self._activity.keeps_weights() and not self._loads.corrupt
            return wanted.version in named - self._view.rejected and not waits

        loaded = await self._loader.load(wanted, partial(self._is_live, wanted), still_wanted)
        if loaded is None:
            return
        self._note_canary(loaded)
        if loaded.right:
            self._hold(loaded)
            with contextlib.suppress(Unavailable):  # a fetch that timed out may still hold the cache
                await run_in_daemon_thread(_FORGET_SECONDS, self._cache.keep_only, self._needed())
        elif self._is_live(wanted):
            raise WeightsWrong(
                f"version {wanted.version} is LIVE, but these engines do not compute its canary, though it was loaded "
                f"again in full: {loaded.measured}. Is it the same model in a dtype like the trainer's? A vLLM that "
                "does not reload tied embeddings needs a model with tie_word_embeddings: false"
            )
        else:
            self._held = replace(self._held, refused=self._held.refused | {wanted.version})
        await self._observe(self._view)  # what the service said of the version during the load

    def _hold(self, loaded: Loaded) -> None:
        manifest = loaded.manifest
        self._held = Held(manifest.version, was_live=self._is_live(manifest), refused=self._held.refused)
        self.version, self.step = manifest.version, manifest.step
        if loaded.transport:
            self.updates += 1
            self.transport, self.last_pause_seconds = loaded.transport, loaded.pause_seconds
        VERSION.set(manifest.version)

    def _needed(self) -> set[int]:
        live = {self._view.live.version} if self._view.live is not None else set()
        return {self._held.version} | live

    async def _schedule_retry(self, wanted: Manifest, error: TrinityError, began: float) -> None:
        """The version is damaged, collected or unreachable: good weights keep serving until it or a newer one loads."""
        now = time.monotonic()
        self._failed = (wanted.version, str(error), isinstance(error, Unavailable))
        self._retry_at[wanted.version] = now + _RETRY_SECONDS
        if self._is_live(wanted):
            self._failing_since = began if self._failing_since is None else self._failing_since
            self._live_unreachable = now - self._failing_since >= _OUT_OF_REACH_SECONDS
        log.warning("explorer.weights.refused", version=wanted.version, reason=str(error))
        await self._notify_changed()

    async def _poll_verdicts(self) -> None:
        """Follow up versions that were loaded before they were LIVE."""
        while True:
            async with self._changed:
                await self._changed.wait_for(self._loads.unverified)
            for version in self._loads.unverified():
                state = await self._link.state_of(version)
                if state in (VersionState.VERIFIED, VersionState.LIVE, VersionState.RETIRED):
                    self._loads.verify(version)
                elif state is VersionState.REJECTED:
                    self._loads.reject([version], "was rejected")
                elif state is VersionState.STAGED and self._view.live and self._view.live.version > version:
                    self._loads.reject([version], "was never judged")
            await self._notify_changed()
            await asyncio.sleep(_ASK_SECONDS)

    async def _update_group(self, collective: Collective) -> None:
        """Update the epoch. While weights stay, tell the group not to wait for this explorer."""
        announced = -1
        while True:
            async with self._changed:
                await self._changed.wait_for(partial(self._group_update_due, announced))
            epoch = self._view.epoch
            if _number(epoch) != announced:
                announced = _number(epoch)
                await collective.epoch(epoch)
            elif self._view.candidate is not None:
                await self._loader.decline(self._view.candidate)

    def _group_update_due(self, announced: int) -> bool:
        candidate = self._view.candidate
        refuses = candidate is not None and self._activity.keeps_weights() and self._loader.is_offered(candidate)
        return refuses or _number(self._view.epoch) != announced

    def _note_canary(self, loaded: Loaded) -> None:
        if loaded.measured is not None:
            self._canaries[loaded.manifest.version] = loaded.measured

    def _make_report(self) -> Report:
        failed_version, failure, is_passing = self._failed
        return Report(
            version=self.version,
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

    def _reported(self, report: Report) -> None:
        """A report arrived. Repeat what the service still waits for: it may have been restarted in between."""
        if self._failed[:2] == (report.failed_version, report.failure):
            self._failed = _NO_FAILURE
        awaited = self._view.candidate.version if self._view.candidate is not None else -1
        for version, measured in report.canaries:
            if version != awaited and self._canaries.get(version) is measured:
                del self._canaries[version]


def _number(epoch: Epoch | None) -> int:
    """0 for none."""
    return epoch.number if epoch is not None else 0
