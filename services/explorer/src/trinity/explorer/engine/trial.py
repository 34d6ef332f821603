"""Splits the calls at the endpoint between the newest version and the one before it, until the newest is tried.

    load of a version -> `share` of the calls, the version before answers the others -> `calls` answered -> all calls

Only engines that hold adapters unmerged have two versions at a time (adapters.py). A version that turns out wrong, or
is withdrawn, ends its trial: the version before it is loaded again. While a trial lasts, newer versions wait.
"""

import time
from dataclasses import dataclass, field

from trinity.config.schema.explorer import TrialConfig
from trinity.explorer.engine.adapters import HeldAdapters
from trinity.explorer.weights.load_history import LoadHistory, Verdict

POLICY = ""  # the name of the adapter that loads swap
BEFORE = "the version before"  # the name of the adapter that was the policy's until the newest load


@dataclass
class _Tried:
    """Calls since a load: those of its version, and all."""

    newest: int = 0
    all: int = 0
    began: float = field(default_factory=time.monotonic)


class Trial:
    """The trials of one explorer, whose engines share the calls."""

    def __init__(self, config: TrialConfig, loads: LoadHistory) -> None:
        self._config, self._loads = config, loads
        self._tried: dict[int, _Tried] = {}  # by serial of the newest load

    def is_on(self, adapters: HeldAdapters) -> bool:
        """Returns True while an engine with these adapters answers calls by two versions."""
        newest, before = adapters.serial(POLICY), adapters.serial(BEFORE)
        if newest is None or before is None or self._loads.version(newest) <= self._loads.version(before):
            return False
        if self._loads.verdict(before) is not Verdict.GOOD or self._loads.verdict(newest) is Verdict.BAD:
            return False
        if newest not in self._tried:
            self._tried = {serial: tried for serial, tried in self._tried.items() if serial >= before}
            self._tried[newest] = _Tried()
        tried = self._tried[newest]
        return tried.newest < self._config.calls and time.monotonic() - tried.began < self._config.seconds

    def choose(self, adapters: HeldAdapters) -> str:
        """Returns the name of the adapter that samples the next call."""
        if not self.is_on(adapters):
            return POLICY
        tried = self._tried[adapters.serial(POLICY) or 0]
        tried.all += 1
        if tried.newest >= tried.all * self._config.share:
            return BEFORE
        tried.newest += 1
        return POLICY
