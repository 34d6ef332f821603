"""Loads one version into the engines, by collective group or storage, and computes its canary afterwards.

Files are fetched and checked before the engines pause. A failed load leaves the engines paused with part of the weights
new: only another full load resumes them.
"""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from trinity.explorer.types import EngineFailed
from trinity.explorer.weights.fetch import Cache, base_of, fetch, fetch_seconds, run_in_daemon_thread
from trinity.explorer.weights.load_history import LoadHistory
from trinity.runtime import tracing
from trinity.runtime.errors import Unavailable
from trinity.runtime.metrics import Gauge, Histogram
from trinity.weights import Canary, Manifest
from trinity.weights.canary import Measured

log = structlog.get_logger(__name__)

PAUSE = Histogram(
    "trinity_explorer_update_pause_seconds",
    "Pause of the engines for one update, in seconds",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10),
)
CANARY = Gauge("trinity_explorer_canary_max_error_nats", "Largest difference of the newest canary, in nats")

_BASE_SECONDS = 120.0
_FORGET_SECONDS = 60.0


class Engines(Protocol):
    """The part of EnginePool that is needed here."""

    loads: LoadHistory

    async def load(self, version: int, update_info: dict[str, Any]) -> tuple[int, float]: ...
    async def measure(self, canary: Canary) -> Measured: ...


class Collective(Protocol):
    """This explorer's part in the trainer's collective group; none unless the explorer has one."""

    async def ready(self, manifest: Manifest) -> dict[str, Any] | None:
        """What the engines load at once, without a fetch. None: this version comes another way. Called once for each
        version, unless it is declined."""

    def decline(self, manifest: Manifest) -> None:
        """Tell the others, in the background, not to wait for this explorer."""


@dataclass(frozen=True)
class Loaded:
    """A version that the engines hold now. `right`: they compute its canary right, or it has none.

    `transport` is empty, and the pause 0, for the model they started with.
    """

    manifest: Manifest
    serial: int
    transport: str
    pause_seconds: float
    measured: Measured | None
    right: bool


class Loader:
    """Loads into the engines. One version at a time."""

    def __init__(
        self,
        engines: Engines,
        cache: Cache,
        base_model: str,
        collective: Collective | None = None,
        collective_transport: str = "collective",
    ) -> None:
        self.loads = engines.loads
        self._engines = engines
        self._cache = cache
        self._base_model = base_model
        self._collective = collective
        self._collective_transport = collective_transport
        self._answered: set[int] = set()  # versions whose broadcast was taken, missed or declined
        self.updating = False

    async def load(
        self, manifest: Manifest, is_live: Callable[[], bool], still_wanted: Callable[[], bool]
    ) -> Loaded | None:
        """Load a version; None if it was no longer wanted before it touched the engines.

        A LIVE version whose canary fails is loaded again in full, since others could load it; so is any version whose
        load broke off. Raises EngineFailed if the second load breaks off as well, InvalidInput and Unavailable if the
        files cannot be had.
        """
        if not manifest.files and self.loads.newest == 0:
            loaded = await self._check(manifest, self.loads.accept_initial_weights(), "", 0.0)
            if loaded.right or not is_live():
                return loaded
        received = await self._receive(manifest)
        if received is not None and received.right:
            return received
        return await self._load_files(manifest, is_live, still_wanted)

    def decline(self, manifest: Manifest) -> None:
        """Tell the collective group not to wait for this explorer, if a broadcast of this version may still come."""
        if (group := self._offered(manifest)) is not None:
            group.decline(manifest)

    async def forget_all_but(self, versions: Iterable[int]) -> None:
        """Remove fetched files of all other versions."""
        with contextlib.suppress(Unavailable):  # a fetch that timed out may still hold the cache
            await run_in_daemon_thread(_FORGET_SECONDS, self._cache.keep_only, versions)

    def _offered(self, manifest: Manifest) -> Collective | None:
        """The group that will broadcast this version, the first time that it is asked for."""
        if manifest.collective is None or manifest.version in self._answered:
            return None
        self._answered.add(manifest.version)
        return self._collective

    async def _receive(self, manifest: Manifest) -> Loaded | None:
        """Load by the collective group; None if this explorer is not in it or the load failed."""
        group = self._offered(manifest)
        if group is None:
            return None
        base = await run_in_daemon_thread(_BASE_SECONDS, base_of, manifest.lora, self._base_model)
        update_info = await group.ready(manifest)
        if update_info is None:
            return None
        try:
            return await self._put(manifest, {**update_info, **base}, self._collective_transport)
        except EngineFailed as error:
            log.warning("explorer.weights.broadcast_failed", version=manifest.version, error=str(error))
            return None

    async def _load_files(
        self, manifest: Manifest, is_live: Callable[[], bool], still_wanted: Callable[[], bool]
    ) -> Loaded | None:
        for again in (False, True):
            limit = fetch_seconds(manifest)
            update_info, transport = await run_in_daemon_thread(limit, fetch, self._cache, manifest, self._base_model)
            if not still_wanted():
                return None
            try:
                loaded = await self._put(manifest, update_info, transport)
            except EngineFailed as error:
                log.warning("explorer.weights.load_failed", version=manifest.version, error=str(error))
                if again:
                    raise
                continue
            if loaded.right or again or not is_live():
                return loaded
        return None

    async def _put(self, manifest: Manifest, update_info: dict[str, Any], transport: str) -> Loaded:
        told: dict[str, Any] = {"version": manifest.version, "step": manifest.step, "transport": transport}
        with tracing.span("weights.load", **told):
            self.updating = True
            try:
                serial, pause = await self._engines.load(manifest.version, update_info)
            finally:
                self.updating = False
            PAUSE.observe(pause)
            log.info("explorer.weights.loaded", **told, pause=round(pause, 4))
            return await self._check(manifest, serial, transport, pause)

    async def _check(self, manifest: Manifest, serial: int, transport: str, pause: float) -> Loaded:
        """Compute the canary and record the result."""
        loads, canary = self.loads, manifest.canary
        measured: Measured | None = None
        if canary is not None:
            try:
                measured = await self._engines.measure(canary)
            except EngineFailed as error:
                loads.mark_bad(serial, f"could not be checked: {error}")
                raise
            CANARY.set(measured.max_error)
            if not measured.within(canary):
                log.error("explorer.canary.failed", version=manifest.version, transport=transport, found=str(measured))
                loads.mark_bad(serial, f"failed its canary: {measured}")
                return Loaded(manifest, serial, transport, pause, measured, right=False)
        loads.pass_canary(serial)
        return Loaded(manifest, serial, transport, pause, measured, right=True)
