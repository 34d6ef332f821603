"""Chooses the version to load next, and opens the gates of tasks.

The choice follows from what the sync service wants, the engines hold, and failed here before.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

import structlog

from trinity.explorer.weights.load_history import Verdict
from trinity.explorer.weights.loader import Loader
from trinity.weights.client import Version, View
from trinity.weights.manifest import Manifest
from trinity.weights.wire import VersionState

log = structlog.get_logger(__name__)

# After failing this long to load a LIVE version, return the tasks that need it to other explorers.
_OUT_OF_REACH_SECONDS = 15.0


class ExactGates:
    """In a reproducible run (`enforced`) a task begins with the weights of its gate step, and no others.

    No weights are loaded while a task runs. Where a task needs an older version than the engines hold, after the death
    of the explorer that had it, that version is loaded again; the lowest gate that waits is met first.
    """

    def __init__(self, enforced: bool = True) -> None:
        self._enforced = enforced
        self._waiting: Counter[int] = Counter()
        self._past: Manifest | None = None
        self._without: set[int] = set()  # gates with a rejected or withdrawn version, which the LIVE one meets

    @contextlib.contextmanager
    def waiting(self, gate: int) -> Iterator[None]:
        """Count a task that waits for its gate."""
        self._waiting[gate] += self._enforced
        try:
            yield
        finally:
            self._waiting[gate] -= self._enforced

    def allows(self, gate: int, step: int, updating: bool) -> bool:
        """True if a task with this gate may begin with the weights of `step`, which are new enough."""
        if not self._enforced:
            return True
        return not updating and gate == self._lowest and (step == gate or gate in self._without)

    def wanted(self, step: int) -> Manifest | None:
        """The past version to load next; None if the weights of `step` or newer ones suffice."""
        past = self._past
        return past if past is not None and past.step == self._lowest != step else None

    def keeps(self, step: int) -> bool:
        """True if a task waits for the weights of `step` or older ones."""
        return self._lowest is not None and self._lowest <= step

    def lacks(self, view: View) -> bool:
        """True if `find` must be called: the LIVE version passed the lowest gate, whose version is still unknown."""
        gate, live = self._lowest, view.live
        if gate is None or live is None or live.step == gate or view.gate_step < gate:
            return False
        return gate not in self._without and (self._past is None or self._past.step != gate)

    async def find(self, version: Callable[[int], Awaitable[Version | None]]) -> None:
        """Ask the sync service for the version of the lowest gate."""
        gate = self._lowest
        if gate is None or (known := await version(gate)) is None:
            return
        if known.state not in (VersionState.LIVE, VersionState.RETIRED):
            self._without.add(gate)
            log.warning("explorer.gate.without_version", gate_step=gate, state=known.state.name)
        elif known.manifest.files or gate == 0:
            self._past = known.manifest
        else:
            log.error("explorer.gate.version_lost", gate_step=gate, reason="its files were deleted")

    @property
    def _lowest(self) -> int | None:
        return min((gate for gate, count in self._waiting.items() if count), default=None)


class Choice:
    """`version` and `step` are those of the weights that the engines hold, -1 before the first whose canary passed."""

    def __init__(self, exact: ExactGates) -> None:
        self.view = View()
        self.version = self.step = -1
        self._was_live = False  # the held version was LIVE once
        self._refused: set[int] = set()  # candidates whose canary failed here
        self._retry_at: dict[int, float] = {}
        self._exact = exact

    def is_live(self, version: int) -> bool:
        return self.view.live is not None and self.view.live.version == version

    def observe(self, view: View) -> None:
        """Take over a view. A LIVE version that the service cannot describe leaves the one before it in force."""
        if view.problem:
            if view.problem != self.view.problem:
                log.error("explorer.weights.live_unreadable", version=self.version, reason=view.problem)
            view = replace(view, live=self.view.live, gate_step=self.view.gate_step)
        self.view = view
        self._was_live = self._was_live or self.is_live(self.version)

    def hold(self, manifest: Manifest) -> None:
        """Note that the engines hold this version and compute its canary right."""
        self.version, self.step = manifest.version, manifest.step
        self._was_live = self.is_live(manifest.version)

    def refuse(self, version: int) -> None:
        """Exclude a candidate for good."""
        self._refused.add(version)

    def postpone(self, version: int, seconds: float) -> None:
        self._retry_at[version] = time.monotonic() + seconds

    def next(self, corrupt: bool, busy: bool) -> Manifest | None:
        """The version to load now, if any.

        `corrupt`: the held weights are known to be wrong. `busy`: newer versions wait, as while an evaluation runs
        here, so that it measures one version. A load that replaces wrong or withdrawn weights does not wait.
        """
        now = time.monotonic()
        later = {version for version, until in self._retry_at.items() if until > now}
        found = self._replacement(corrupt)
        if found is None and (self.version < 0 or not (busy or self._exact.keeps(self.step))):
            found = self._newer(later)
        if not busy:
            found = self._exact.wanted(self.step) or found
        return None if found is not None and found.version in later else found

    def _replacement(self, corrupt: bool) -> Manifest | None:
        """The LIVE version, if the engines hold no weights, or wrong or withdrawn ones."""
        live, held = self._live, self.version
        if live is None:
            return None
        withdrawn = held in self.view.rejected or (live.version < held and self._was_live)
        return live if held < 0 or corrupt or withdrawn else None

    def _newer(self, later: set[int]) -> Manifest | None:
        """The candidate if it may be loaded, otherwise the LIVE version, if newer than the held weights."""
        unwanted = self.view.rejected | self._refused | later
        candidate = self.view.candidate
        if candidate is not None and candidate.version > self.version and candidate.version not in unwanted:
            return candidate
        live = self._live
        return live if live is not None and live.version > self.version else None

    @property
    def _live(self) -> Manifest | None:
        live = self.view.live
        return None if live is None or live.version in self.view.rejected else live

    def still_wants(self, manifest: Manifest) -> bool:
        """True if an earlier choice is still LIVE, the candidate, or the past version of a waiting gate."""
        named = {m.version for m in (self.view.live, self.view.candidate, self._exact.wanted(self.step)) if m}
        return manifest.version in named - self.view.rejected

    @property
    def needed(self) -> set[int]:
        """Versions that may be loaded again from their files."""
        live = {self.view.live.version} if self.view.live is not None else set()
        return {self.version} | live


class Gates:
    """The gates of tasks: a task starts once the engines hold good weights of its gate's optimizer step or newer ones.

    Gates whose LIVE version cannot be loaded here are given to other explorers.
    """

    def __init__(self, changed: asyncio.Condition, loader: Loader, choice: Choice, exact: ExactGates) -> None:
        """`changed` is notified after every change of the weights."""
        self._changed, self._loader, self._choice, self._exact = changed, loader, choice, exact
        self._met = -1  # highest gate step that the newest good load meets
        self._failing_since: float | None = None  # begin of the first failed try to load the LIVE version
        self._live_unreachable = False
        self._returned = -1  # highest gate step that could not be met here

    async def wait_for_step(self, step: int) -> None:
        """Wait until the engines serve weights that meet the gate of that optimizer step and are known to be good."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._serves(step))

    async def reaches_step(self, step: int) -> bool:
        """Wait until a task with this gate may start. False if the LIVE version meets it but cannot be loaded here."""
        with self._exact.waiting(step):
            async with self._changed:
                self._changed.notify_all()
                await self._changed.wait_for(lambda: self._meets(step) or self._cannot_load(step))
            if self._meets(step):
                return True
        self._returned = max(self._returned, step)
        return False

    @property
    def falls_short(self) -> bool:
        """True if new tasks would be returned to the queue, as an earlier task was."""
        return self._cannot_load(self._returned)

    def update(self) -> None:
        """Open the gates that the newest load meets, if it is known to be good."""
        choice, loads = self._choice, self._loader.loads
        if choice.version < 0 or loads.verdict(loads.newest) is not Verdict.GOOD:
            return
        self._met = choice.step
        if choice.is_live(choice.version):
            self._met = max(choice.step, choice.view.gate_step)
            self._failing_since, self._live_unreachable = None, False

    def note_failure(self, began: float) -> None:
        """Note a failed try to load the LIVE version. `began`: its begin by time.monotonic."""
        self._failing_since = began if self._failing_since is None else self._failing_since
        self._live_unreachable = time.monotonic() - self._failing_since >= _OUT_OF_REACH_SECONDS

    def _meets(self, step: int) -> bool:
        return self._exact.allows(step, self._choice.step, self._loader.updating) and self._serves(step)

    def _serves(self, step: int) -> bool:
        return self._met >= step and not self._loader.loads.corrupt

    def _cannot_load(self, step: int) -> bool:
        return self._live_unreachable and self._choice.view.gate_step >= step and not self._serves(step)
