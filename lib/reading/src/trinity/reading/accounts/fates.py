"""Fates of device-seconds: trained, dropped, failed, idle and others.

A trainer's seconds are divided by its step times, an explorer's by its attempts. The seconds of stored groups are
divided by response tokens, since an engine samples many groups at once. The rest is `idle` or `other`.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeGuard

from trinity.reading.accounts.device_log import folder_of
from trinity.reading.accounts.lives import Life, Watch
from trinity.runtime import files

Fates = defaultdict[str, float]
Facts = dict[str, Any]

# The trainer's parts of a step, in the monitor.
_PARTS = {"time/wait": "idle", "time/buffer": "idle", "time/publish": "publishing", "time/save": "saving"}
_STEP = "time/step"
_STORED = "stored"
_LATE = "dropped (cut)"  # the group of a cut task, which is not counted among stored ones


def of_watch(watch: Watch, stage: Path, steps: list[Facts]) -> Fates:
    """Returns device-seconds by fate. `steps`: as `read_steps`. All groups of an explorer are `stored`."""
    found: Fates = defaultdict(float)
    for life in watch.lives:
        own = _of_trainer(life, steps) if watch.service == "trainer" else _of_explorer(life, stage)
        for fate, seconds in own.items():
            found[fate] += seconds
    first = watch.lives[0].began if watch.lives else watch.ended
    found["starting"] += first - watch.began
    gaps = watch.ended - first - sum(life.seconds for life in watch.lives)
    # A finished trainer has no process; a dead one is replaced.
    found["idle" if watch.lives and watch.lives[-1].how == "finished" else "restarting"] += gaps
    return defaultdict(float, {fate: watch.devices * seconds for fate, seconds in found.items()})


def losses(watches: Iterable[Watch], steps: list[Facts]) -> list[Facts]:
    """Returns what the ends of the trainer cost, by cause, the dearest first: `cause`, `count`, and wall `seconds`.

    On several machines they are those of the first one, whose trainer ends with each loss. Of each end: the step that
    it cut off, the steps that are trained again, and the time until the next process trains.
    """
    found: dict[str, Facts] = {}
    lives = [life for watch in watches if watch.leads for life in watch.lives]
    for life, after in zip_longest(lives, lives[1:]):
        if life.how != "died":
            continue
        own = _of_trainer(life, steps)
        seconds = own["aborted"] + own["recomputed"]
        if after is not None:
            then = _of_trainer(after, steps)
            seconds += after.began - life.ended + then["starting"]
        one = found.setdefault(life.reason, {"cause": life.reason, "count": 0, "seconds": 0.0})
        one["count"] += 1
        one["seconds"] += seconds
    return sorted(found.values(), key=lambda one: -one["seconds"])


def read_steps(stage: Path) -> list[Facts]:
    """Returns the trainer's lines with step times. `again`: the step was trained once more later."""
    try:
        lines = (stage / "monitor" / "trainer.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        return []
    found = [line for line in files.json_lines(lines) if _is_of_step(line)]
    last = {line["step"]: index for index, line in enumerate(found)}
    return [{**line, "again": last[line["step"]] != index} for index, line in enumerate(found)]


def _is_of_step(line: Facts) -> bool:
    return type(line.get("step")) is int and all(isinstance(line.get(name), float) for name in ("time", _STEP))


def _of_trainer(life: Life, steps: list[Facts]) -> Fates:
    found: Fates = defaultdict(float)
    own = [line for line in steps if life.began < line["time"] <= life.ended]
    end = "aborted" if life.how == "died" else "other"
    if not own:
        return defaultdict(float, {"aborted" if life.how == "died" else "starting": life.seconds})
    for line in own:
        found["recomputed" if line["again"] else "trained"] += line[_STEP]
        for part, fate in _PARTS.items():
            found[fate] += line.get(part) or 0.0
    first = sum(own[0].get(part) or 0.0 for part in (*_PARTS, _STEP))
    found["starting"] += max(0.0, own[0]["time"] - first - life.began)
    found[end] += life.ended - own[-1]["time"]
    found["other"] += max(0.0, life.seconds - sum(found.values()))
    return found


def _of_explorer(life: Life, stage: Path) -> Fates:
    account = _account(life, stage)
    if account is None:  # it died, or ended, before it could work, or serves an endpoint
        return defaultdict(float, {"aborted" if life.how == "died" else "starting": life.seconds})
    found: Fates = defaultdict(float, account["seconds"])
    found["aborted"] += account["running"]
    found["starting"] += account["began"] - life.began
    tail = max(0.0, life.ended - account["time"])
    found["aborted" if life.how == "died" and account["running"] else "idle"] += tail
    found["idle"] += max(0.0, life.seconds - sum(found.values()))
    return found


def _account(life: Life, stage: Path) -> Facts | None:
    for path in folder_of(stage).glob(f"*-{life.pid}.json"):
        found = files.read_json(path)
        if _is_account(found) and life.began <= found["began"] <= life.ended:
            return found
    return None


def _is_account(found: Any) -> TypeGuard[Facts]:
    """Checks the form in which explorers write accounts. Other and damaged files are left out."""
    if not isinstance(found, dict) or not isinstance(found.get("seconds"), dict):
        return False
    numbers = [*found["seconds"].values(), *(found.get(name) for name in ("began", "time", "running"))]
    return all(isinstance(one, (int, float)) and math.isfinite(one) for one in numbers)


@dataclass
class Groups:
    """Response tokens of a stage's groups by fate, from the ledger. `add` its entries in order."""

    fates: dict[int, str] = field(default_factory=dict)  # ordinal -> fate
    tokens: dict[int, int] = field(default_factory=dict)

    def add(self, entry: Facts) -> None:
        """Adds an entry in the form of `trinity batch show --json`."""
        for group in entry["groups"]:
            if self.fates.get(group["ordinal"]) != "trained":
                self.fates[group["ordinal"]] = "skipped" if entry["skip_reason"] else "trained"
            self.tokens[group["ordinal"]] = group["response_tokens"]
        for group in entry["dropped"]:
            self.fates.setdefault(group["ordinal"], f"dropped ({group['reason']})")
            self.tokens.setdefault(group["ordinal"], group["response_tokens"])

    def shares(self, stored: int, duplicates: int) -> dict[str, float]:
        """Returns the share of each fate; all sum to 1.

        Duplicates, and groups in no entry, count with the mean length.
        """
        by_fate: defaultdict[str, float] = defaultdict(float)
        for ordinal, fate in self.fates.items():
            by_fate[fate] += self.tokens[ordinal]
        mean = sum(by_fate.values()) / len(self.fates) if self.fates else 1.0
        counted = sum(fate != _LATE for fate in self.fates.values())
        by_fate["waiting"] += mean * max(0, stored - counted)
        by_fate["duplicate"] += mean * duplicates
        total = sum(by_fate.values())
        return {fate: tokens / total for fate, tokens in by_fate.items() if tokens} if total else {"waiting": 1.0}

    def seconds(self, stored: float, shares: Mapping[str, float]) -> Iterable[Facts]:
        """Yields the engine seconds of each group; `stored` are the seconds of all."""
        known = sum(share for fate, share in shares.items() if fate not in ("waiting", "duplicate"))
        total = sum(self.tokens.values())
        for ordinal, fate in sorted(self.fates.items()):
            seconds = stored * known * self.tokens[ordinal] / total if total else 0.0
            yield {"ordinal": ordinal, "fate": fate, "tokens": self.tokens[ordinal], "seconds": round(seconds, 6)}


def divided(fates: Fates, shares: Mapping[str, float]) -> Fates:
    """Divides the seconds of stored groups by fate."""
    found = defaultdict(float, fates)
    stored = found.pop(_STORED, 0.0)
    for fate, share in shares.items():
        found[fate] += stored * share
    return found
