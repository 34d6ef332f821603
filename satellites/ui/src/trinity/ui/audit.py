"""Checks that the ledger adds up: fed = stored + dead + cut + outstanding, and each stored group is in one place.

The counts of the buffer are compared with the content of the entries. An entry is read once. The newest entry has the
lists it must agree with: ended tasks, dead tasks, groups that wait for a later step.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Facts = dict[str, Any]

_SHOWN = 5  # ordinals that a sentence names
_LATE = "cut"  # the reason of a group that came after its task was cut
_REUSING = "replay"  # the policy that takes a group into several steps


@dataclass(frozen=True)
class Row:
    """A ledger entry in the list of steps. `rows`: of the dataset, for a step that learns from one."""

    step: int
    groups: int
    rows: int
    reward_mean: float
    staleness_max: int
    dropped: int
    partial: bool
    skipped: bool


@dataclass
class Audit:
    """Entries of one run, read in the order of steps. `account` belongs to the newest one; None if it has none."""

    steps: list[Row] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)  # steps of age -> groups
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> groups
    account: Facts | None = None
    ordinals: dict[str, int] = field(default_factory=dict)  # id of a trained task -> ordinal
    _used: dict[int, int] = field(default_factory=dict)  # ordinal -> the step that has it
    _uses: Counter[int] = field(default_factory=Counter)
    _dropped: dict[int, int] = field(default_factory=dict)
    _cut: dict[int, int] = field(default_factory=dict)
    _late: dict[int, int] = field(default_factory=dict)  # of cut tasks whose group came after all
    _doubled: list[str] = field(default_factory=list)

    @property
    def newest_step(self) -> int:
        return self.steps[-1].step if self.steps else 0

    @property
    def is_offline(self) -> bool:
        """The run learns from a dataset: no task is fed."""
        return bool(self.steps) and self.steps[-1].rows > 0

    def read(self, entry: Facts, account: Facts | None) -> None:
        """Adds the entry of the next step, as `wire.batch` and `wire.account` return it."""
        step, groups, dropped = entry["step"], entry["groups"], entry["dropped"]
        for group in groups:
            self._use(step, group, entry["policy"] == _REUSING)
            self.staleness[group["staleness_steps"]] += 1
            self.ordinals[group["task_id"]] = group["ordinal"]
        for task in entry["cut"]:
            self._put(self._cut, step, task["ordinal"], "cut")
        for group in dropped:
            late = group["reason"] == _LATE
            self._put(self._late if late else self._dropped, step, group["ordinal"], "late" if late else "dropped")
            self.dropped[group["reason"]] += 1
        oldest = max((group["staleness_steps"] for group in groups), default=0)
        counted = (len(groups), len(entry["rows"]), entry["reward_mean"], oldest, len(dropped))
        self.steps.append(Row(step, *counted, entry["partial"], bool(entry["skip_reason"])))
        self.account = account

    def _use(self, step: int, group: Facts, may_be_again: bool) -> None:
        ordinal = group["ordinal"]
        self._uses[ordinal] += 1
        if ordinal in self._used and not may_be_again:
            self._doubled.append(f"group {ordinal} is in step {self._used[ordinal]} and again in step {step}")
        elif group["use_count"] != self._uses[ordinal]:
            times = f"says it is used for time {group['use_count']}, the ledger has it {self._uses[ordinal]} times"
            self._doubled.append(f"group {ordinal} of step {step} {times}")
        for name, steps in (("dropped before", self._dropped), ("cut at", self._cut)):
            if ordinal in steps:
                self._doubled.append(f"group {ordinal} is in step {step}, and was {name} step {steps[ordinal]}")
        self._used[ordinal] = step

    def _put(self, steps: dict[int, int], step: int, ordinal: int, what: str) -> None:
        if ordinal in steps:
            self._doubled.append(f"group {ordinal} was {what} before step {steps[ordinal]} and before {step}")
        if ordinal in self._used:
            self._doubled.append(f"group {ordinal} was {what} before step {step}, and is in step {self._used[ordinal]}")
        steps[ordinal] = step

    def fate(self, ordinal: int) -> tuple[str, int | None]:
        """Returns the state of a task and its step: trained, dropped, cut, dead, requeued, waiting, outstanding."""
        for name, steps in (("trained", self._used), ("dropped", self._dropped), ("cut", self._cut)):
            if ordinal in steps:
                return name, steps[ordinal]
        lists = self.account or {}
        named = (("dead", "dead"), ("requeued", "requeued"), ("waiting", "pending"))
        return next((name for name, key in named if ordinal in lists.get(key, ())), "outstanding"), None

    def problems(self) -> list[str]:
        """Returns contradictions within the ledger, each with its groups."""
        return [*self._doubled, *(self._missing(self.account) if self.account is not None else ())]

    def _missing(self, account: Facts) -> Iterable[str]:
        ended = {*range(1, account["ended_through"] + 1), *account["ended"]}
        stored = ended.difference(account["dead"], account["requeued"], self._cut)
        found = {*self._used, *self._dropped, *account["pending"]}
        step = self.newest_step
        if lost := stored - found:
            yield f"stored, but in no entry up to step {step}, not dropped and not waiting: {_groups(lost)}"
        if unknown := found - stored:
            yield f"in the ledger, but not stored when step {step} was written: {_groups(unknown)}"
        if twice := {*account["pending"]} & self._dropped.keys():
            yield f"dropped, and waiting for a later step: {_groups(twice)}"
        if account["stored"] != len(stored):
            yield f"step {step} counts {account['stored']} stored groups; its list of ended tasks has {len(stored)}"
        if unended := (self._cut.keys() - ended) | (self._cut.keys() & account["dead"]):
            yield f"cut, but dead or not ended when step {step} was written: {_groups(unended)}"
        if uncut := self._late.keys() - self._cut.keys():
            yield f"late, but of no cut task: {_groups(uncut)}"
        if account["cut_tasks"] != len(self._cut):
            yield f"step {step} counts {account['cut_tasks']} cut tasks; the entries name {len(self._cut)}"
        if account["dead_letters"] != len(account["dead"]):
            yield f"step {step} counts {account['dead_letters']} dead tasks and names {len(account['dead'])}"


def count_problems(counts: Facts) -> list[str]:
    """Returns the problem of the buffer's counts; empty if fed = stored + dead + cut + outstanding and none is
    negative.
    """
    parts = {name: counts[name] for name in ("stored", "dead_letters", "cut_tasks", "outstanding")}
    found = [f"{name.replace('_', ' ')} is {value}" for name, value in parts.items() if value < 0]
    total = sum(parts.values())
    if total != counts["fed"]:
        found.append(f"{counts['fed']} tasks were fed; stored, dead, cut and outstanding together are {total}")
    return found


def _groups(ordinals: set[int]) -> str:
    first = ", ".join(map(str, sorted(ordinals)[:_SHOWN]))
    more = f" and {len(ordinals) - _SHOWN} more" if len(ordinals) > _SHOWN else ""
    return f"{'groups' if len(ordinals) > 1 else 'group'} {first}{more}"
