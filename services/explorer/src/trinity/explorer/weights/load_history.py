"""Loads of weights into the engines, each with a serial number of its own, and whether what they sampled may be used.

A load is GOOD when the engines computed its version's canary right and the version is VERIFIED. Until then responses
with its tokens are deferred; if the load turns out BAD they fail. Loading a version again, for a repair or a rollback,
is another load.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import grpc

from trinity.data.experience import VersionSpan
from trinity.runtime.errors import TrinityError


class WeightsWithdrawn(TrinityError):
    """Tokens were sampled by weights that turned out to be wrong, or were withdrawn. Sampling again helps."""

    code = grpc.StatusCode.UNAVAILABLE


class Verdict(StrEnum):
    OPEN = "open"
    GOOD = "good"
    BAD = "bad"


@dataclass
class _Load:
    """`settled` is set once the verdict is not OPEN any more."""

    version: int
    verdict: Verdict = Verdict.OPEN
    canary_passed: bool = False
    reason: str = ""
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class LoadHistory:
    """All loads of this process. Serial 0 is the model the engines started with, version 0, and good."""

    def __init__(self) -> None:
        self._loads = [_Load(0)]
        self._verified: set[int] = set()
        self._usable = asyncio.Event()
        self.trust(0)

    @property
    def newest(self) -> int:
        """Serial of what the engines hold, or are loading."""
        return len(self._loads) - 1

    def verdict(self, serial: int) -> Verdict:
        return self._loads[serial].verdict

    @property
    def corrupt(self) -> bool:
        """Whether the engines' weights are known to be wrong."""
        return self._loads[-1].verdict is Verdict.BAD

    def hide_initial_weights(self) -> None:
        """Serial 0 is not served until `accept_initial_weights`."""
        self._verified.discard(0)
        self.mark_bad(0, "is the model the engines started with, before its version was LIVE")

    def accept_initial_weights(self) -> int:
        """Serial 0, from now on validated like any other load."""
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
        """Accept this load without a canary or a verdict of the sync service."""
        self.pass_canary(serial)
        self.verify(self._loads[serial].version)

    def mark_bad(self, serial: int, reason: str) -> None:
        """This one load is wrong, for that reason."""
        load = self._loads[serial]
        load.verdict, load.reason = Verdict.BAD, reason
        load.settled.set()
        self._update_usable()

    def reject(self, versions: Iterable[int], reason: str) -> None:
        """These versions may not be served: all their loads are BAD, even those that passed their canary."""
        rejected = set(versions)
        self._verified -= rejected
        for serial, load in enumerate(self._loads):
            if load.version in rejected and load.verdict is not Verdict.BAD:
                self.mark_bad(serial, reason)

    def unverified(self) -> set[int]:
        """Versions with a load whose canary passed here and that the sync service has not verified yet."""
        return {load.version for load in self._loads if load.verdict is Verdict.OPEN and load.canary_passed}

    @property
    def is_usable(self) -> bool:
        return self._usable.is_set()

    async def usable(self) -> None:
        """Wait until the engines hold weights that are not known to be wrong."""
        await self._usable.wait()

    async def require_good(self, serial: int) -> int:
        """The version of a load, once the load is GOOD. Raises WeightsWithdrawn if it is BAD."""
        load = self._loads[serial]
        await load.settled.wait()
        if load.verdict is Verdict.BAD:
            raise WeightsWithdrawn(f"tokens were sampled by version {load.version}, which {load.reason}")
        return load.version

    async def settle(self, spans: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
        """Spans of serials as spans of versions, once all of their loads are GOOD; adjacent ones of a version as one.

        Raises WeightsWithdrawn if one of the loads is BAD.
        """
        settled: list[VersionSpan] = []
        for span in spans:
            version = await self.require_good(span.version)
            if settled and settled[-1].version == version:
                settled[-1] = VersionSpan(version, settled[-1].start, span.end)
            else:
                settled.append(VersionSpan(version, span.start, span.end))
        return tuple(settled)

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
