"""Reproducible runs: a task begins with the weights of its gate step, and no others.

No weights are loaded while a task runs. Where a task needs an older version than the engines hold, after the death of
the explorer that had it, that version is loaded again; the lowest gate that waits is met first.
"""

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

import structlog

from trinity.weights import Manifest, VersionState
from trinity.weights.client import Version, View

log = structlog.get_logger(__name__)


class ExactGates:
    """The gates that tasks wait for, and the past versions that meet them. Without `enforced` any newer weights do."""

    def __init__(self, enforced: bool = True) -> None:
        self._enforced = enforced
        self._waiting: Counter[int] = Counter()
        self._past: Manifest | None = None
        self._without: set[int] = set()  # gates whose version was rejected or withdrawn: the LIVE one meets them

    @contextlib.contextmanager
    def waiting(self, gate: int) -> Iterator[None]:
        """A task waits for its gate."""
        self._waiting[gate] += self._enforced
        try:
            yield
        finally:
            self._waiting[gate] -= self._enforced

    def allows(self, gate: int, step: int, updating: bool) -> bool:
        """Whether a task with this gate may begin with the weights of `step`, which are new enough."""
        if not self._enforced:
            return True
        return not updating and gate == self._lowest and (step == gate or gate in self._without)

    def wanted(self, step: int) -> Manifest | None:
        """The past version to load next; None if the weights of `step`, or newer ones, will do."""
        past = self._past
        return past if past is not None and past.step == self._lowest != step else None

    def keeps(self, step: int) -> bool:
        """Whether a task waits for the weights of `step`, or for older ones."""
        return self._lowest is not None and self._lowest <= step

    def lacks(self, view: View) -> bool:
        """Whether `find` has to be called: the LIVE version passed the lowest gate, whose version is not known yet."""
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
