"""Loads of weights into the engines: each has a unique serial, and a verdict that admits or rejects its tokens.

A load is GOOD when the engines computed its version's canary right and the version is VERIFIED. Until then responses
with its tokens are deferred; if the load turns out BAD, they fail. A version that is loaded again, for a repair or a
rollback, is another load.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import grpc

from trinity.data.experience import VersionSpan
from trinity.explorer.types import spans_of
from trinity.runtime.errors import TrinityError


class WeightsWithdrawn(TrinityError):
    """Tokens were sampled by wrong or withdrawn weights. Sampling again helps."""

    code = grpc.StatusCode.UNAVAILABLE


class Verdict(StrEnum):
    OPEN = "open"
    GOOD = "good"
    BAD = "bad"


@dataclass
class _Load:
    """One load. `settled` is set when the verdict is no longer OPEN."""

    version: int
    verdict: Verdict = Verdict.OPEN
    canary_passed: bool = False
    reason: str = ""
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class LoadHistory:
    """All loads of this process, whose engines have one precision.

    Serial 0 is the engines' initial model, version 0, and GOOD at first.
    """

    def __init__(self, precision: str = "") -> None:
        self.precision = precision
        self._loads = [_Load(0)]
        self._verified: set[int] = set()
        self._usable = asyncio.Event()
        self.trust(0)

    @property
    def newest(self) -> int:
        """Serial of the weights that the engines hold or are loading."""
        return len(self._loads) - 1

    def version(self, serial: int) -> int:
        return self._loads[serial].version

    def verdict(self, serial: int) -> Verdict:
        return self._loads[serial].verdict

    @property
    def corrupt(self) -> bool:
        """True if the engines' weights are known to be wrong."""
        return self._loads[-1].verdict is Verdict.BAD

    def hide_initial_weights(self) -> None:
        """Keep serial 0 from being served until `accept_initial_weights`."""
        self._verified.discard(0)
        self.mark_bad(0, "is the model the engines started with, before its version was LIVE")

    def accept_initial_weights(self) -> int:
        """Validate serial 0 from now on like any other load. Returns it."""
        self._loads[0] = _Load(0)
        self._update_usable()
        return 0

    def begin(self, version: int) -> int:
        """The serial of a new load. The previous load is BAD if its canary was not computed before this."""
        before = self._loads[-1]
        if before.verdict is Verdict.OPEN and not before.canary_passed:
            self.mark_bad(self.newest, "was loaded over before its canary was computed")
        self._loads.append(_Load(version))
        self._update_usable()
        return self.newest

    def pass_canary(self, serial: int) -> None:
        """The engines computed what they should, or there is nothing to compute."""
        self._loads[serial].canary_passed = True
        self._update_verdicts()

    def verify(self, version: int) -> None:
        """The sync service says that the version is right."""
        self._verified.add(version)
        self._update_verdicts()

    def trust(self, serial: int) -> None:
        """Accept a load without a canary or a verdict of the sync service."""
        self.pass_canary(serial)
        self.verify(self._loads[serial].version)

    def mark_bad(self, serial: int, reason: str) -> None:
        """Mark one load as wrong, with the reason."""
        load = self._loads[serial]
        load.verdict, load.reason = Verdict.BAD, reason
        load.settled.set()
        self._update_usable()

    def reject(self, versions: Iterable[int], reason: str) -> None:
        """Mark all loads of these versions as BAD, even if they passed their canary."""
        rejected = set(versions)
        self._verified -= rejected
        for serial, load in enumerate(self._loads):
            if load.version in rejected and load.verdict is not Verdict.BAD:
                self.mark_bad(serial, reason)

    def unverified(self) -> set[int]:
        """Versions whose canary passed here and that the sync service has not verified yet."""
        return {load.version for load in self._loads if load.verdict is Verdict.OPEN and load.canary_passed}

    @property
    def is_usable(self) -> bool:
        return self._usable.is_set()

    async def usable(self) -> None:
        """Wait while the engines' weights are known to be wrong."""
        await self._usable.wait()

    async def require_good(self, serial: int) -> int:
        """Wait for a load's verdict. Returns its version if GOOD, raises WeightsWithdrawn if BAD."""
        load = self._loads[serial]
        await load.settled.wait()
        if load.verdict is Verdict.BAD:
            raise WeightsWithdrawn(f"tokens were sampled by version {load.version}, which {load.reason}")
        return load.version

    async def settle(self, spans: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
        """Wait until all loads of the spans are GOOD. Returns spans of versions, merged if adjacent.

        Raises WeightsWithdrawn if a load is BAD.
        """
        good = [(await self.require_good(span.version), span.end) for span in spans]
        return spans_of([(VersionSpan(version, 0, end, self.precision), end) for version, end in good])

    def _update_verdicts(self) -> None:
        for load in self._loads:
            if load.verdict is Verdict.OPEN and load.canary_passed and load.version in self._verified:
                load.verdict = Verdict.GOOD
                load.settled.set()
        self._update_usable()

    def _update_usable(self) -> None:
        if self.corrupt:
            self._usable.clear()
        else:
            self._usable.set()
