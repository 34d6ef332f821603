"""over_rollout: tasks, groups and cut tasks add up in any order of entries, and wherever the buffer dies."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trinity.buffer.ledger.wire import cursor_of, window_at
from trinity.buffer.window import window as windows
from trinity.buffer.window.groups import CUT, FENCED, StoredGroup
from trinity.buffer.window.policy import Policy
from trinity.buffer.window.window import Verdict, Window

pytestmark = pytest.mark.core

GROUPS, FEWEST, ATTEMPTS, AHEAD = 4, 2, 2, 2
POLICY = Policy(GROUPS, fewest_groups=FEWEST)


def stored(sequence: int, ordinal: int, version: int = 0) -> StoredGroup:
    return StoredGroup(sequence, f"t{ordinal}", ordinal, 4, version, version, 10, 0.5)


class Machine(RuleBasedStateMachine):
    """A log, a ledger, and a buffer that dies at any moment: its window is then that of the newest entry's cursor, and
    reads the log from there.

    A short batch is written as the LedgerWriter does it: decided on a copy, written, and only then applied.
    """

    def __init__(self) -> None:
        super().__init__()
        self.window = Window(POLICY)
        self.log: list[tuple[str, int, int]] = []  # kind, ordinal, version
        self.fed = 0
        self.ledger: list[tuple[list[int], list[int], list[tuple[int, str]]]] = []  # groups, cut, dropped
        self.cursor = cursor_of(self.window)
        self.dead: set[int] = set()
        self.requeued: set[int] = set()

    @property
    def used(self) -> list[int]:
        return [ordinal for groups, _, _ in self.ledger for ordinal in groups]

    @property
    def cut(self) -> list[int]:
        return [ordinal for _, cut, _ in self.ledger for ordinal in cut]

    def _read(self, window: Window, sequence: int) -> Verdict:
        kind, ordinal, version = self.log[sequence - 1]
        if kind == "group":
            return window.group(stored(sequence, ordinal, version))
        if kind == "failure":
            return window.failure(sequence, ordinal, ATTEMPTS)
        return window.requeue(sequence, ordinal) if kind == "requeue" else window.fence(sequence, [version])

    def _append(self, kind: str, ordinal: int = 0, version: int = 0) -> Verdict:
        self.log.append((kind, ordinal, version))
        return self._read(self.window, len(self.log))

    def _write(self, groups: list[StoredGroup], cut: list[int], after: Window) -> None:
        drops = [(drop.ordinal, drop.reason) for drop in after.fresh_drops]
        after.fresh_drops.clear()
        self.ledger.append(([group.ordinal for group in groups], cut, drops))
        self.cursor = cursor_of(after)

    @precondition(lambda self: self.fed < (len(self.ledger) + AHEAD) * GROUPS + self.window.lost)
    @rule(tasks=st.integers(1, 3))
    def feed(self, tasks: int) -> None:
        self.fed += tasks

    def _known(self, ordinal: int) -> int:
        """One of the newest fed tasks, cut ones among them."""
        return max(1, self.fed - ordinal)

    @precondition(lambda self: self.fed > 0)
    @rule(back=st.integers(0, 3 * GROUPS), version=st.integers(0, 3))
    def group(self, back: int, version: int) -> None:
        ordinal = self._known(back)
        is_late = ordinal in self.cut and ordinal in self.window.cut
        before = self.window.stored
        verdict = self._append("group", ordinal, version)
        assert (verdict is Verdict.LATE) == is_late
        if ordinal in self.cut:
            assert verdict in (Verdict.LATE, Verdict.DUPLICATE), "what was cut enters no batch"
            assert self.window.stored == before

    @precondition(lambda self: self.fed > 0)
    @rule(back=st.integers(0, 3 * GROUPS))
    def failure(self, back: int) -> None:
        ordinal = self._known(back)
        if self._append("failure", ordinal) is Verdict.DEAD:
            assert ordinal not in self.cut
            self.dead.add(ordinal)

    @rule(data=st.data())
    def requeue(self, data: st.DataObject) -> None:
        if not self.dead:
            return
        ordinal = data.draw(st.sampled_from(sorted(self.dead)))
        assert self._append("requeue", ordinal) is Verdict.REQUEUED
        self.dead.discard(ordinal)
        self.requeued.add(ordinal)

    @rule(version=st.integers(1, 3))
    def fence(self, version: int) -> None:
        self._append("fence", version=version)

    @rule()
    def full_batch(self) -> None:
        before, (there, missing) = set(self.window.unused), self.window.next_tasks(self.fed)
        groups = self.window.next_batch(len(self.ledger) + 1)
        is_whole = len(there) == GROUPS and not missing
        assert (groups is not None) == is_whole
        if groups is not None:
            assert [group.ordinal for group in groups] == there == sorted(before)[:GROUPS]
            self._write(groups, [], self.window)
            self.window.covered()

    @precondition(lambda self: self.window.may_cut(self.fed))
    @rule(dies=st.booleans())
    def short_batch(self, dies: bool) -> None:
        tasks = sorted([*self.window.unused, *self.window.outstanding(self.fed)])[:GROUPS]
        before = cursor_of(self.window)
        after = window_at(before, POLICY)
        groups, cut = after.short_batch(self.fed)
        assert cursor_of(self.window) == before, "nothing has happened until the entry is there"
        assert sorted([*(group.ordinal for group in groups), *cut]) == tasks
        assert max(tasks) <= self.fed, "no task is cut that is still to be fed"
        assert FEWEST <= len(groups) <= GROUPS
        if dies:
            self.restart()
            return
        self._write(groups, cut, after)
        self.window.short_batch(self.fed)
        self.window.fresh_drops.clear()
        self.window.covered()
        assert set(cut) <= self.window.unqueued
        assert cursor_of(self.window) == self.cursor

    @rule()
    def restart(self) -> None:
        self.window = self._rebuilt()
        assert self.window.cut <= self.window.unqueued, "they may still lie in the queue"

    def _rebuilt(self) -> Window:
        window = window_at(self.cursor, POLICY)
        for sequence in range(window.log_sequence + 1, len(self.log) + 1):
            self._read(window, sequence)
        return window

    @invariant()
    def another_buffer_finds_the_same(self) -> None:
        assert cursor_of(self._rebuilt()) == cursor_of(self.window)

    @invariant()
    def tasks_of_entries_that_a_restart_judges_again_are_in_the_queue(self) -> None:
        assert all(map(window_at(self.cursor, POLICY).has_ended, self.window.unqueued))

    @invariant()
    def counts_add_up(self) -> None:
        window, outstanding = self.window, set(self.window.outstanding(self.fed))
        dropped = [one for _, _, drops in self.ledger for one in drops]
        dropped += [(drop.ordinal, drop.reason) for drop in window.fresh_drops]
        fenced = {ordinal for ordinal, reason in dropped if reason == FENCED}
        late = [ordinal for ordinal, reason in dropped if reason == CUT]
        places = [self.used, self.cut, window.unused, outstanding, fenced, self.dead, self.requeued]
        assert sorted(ordinal for place in places for ordinal in place) == list(range(1, self.fed + 1))
        assert window.cut_tasks == len(self.cut)
        assert window.late_groups == len(late) == len(set(late))
        assert set(late) <= set(self.cut)
        assert self.fed == window.stored + window.dead_letters + window.cut_tasks + len(outstanding) + len(
            self.requeued
        )
        assert self.fed - window.num_ended == len(outstanding)
        assert set(window.failures) <= outstanding
        assert window.stored == len(self.used) + len(window.unused) + window.dropped.total()

    @invariant()
    def a_step_has_the_tasks_of_its_place(self) -> None:
        """So the staleness bound holds: a step that is short has taken no task of the next one."""
        for groups, cut, _ in self.ledger:
            assert len(groups) + len(cut) == GROUPS
            assert len(groups) >= FEWEST
        tasks = [sorted([*groups, *cut]) for groups, cut, _ in self.ledger]
        assert tasks == sorted(tasks)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


def test_of_cut_tasks_the_newest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "_MOST_CUT", 3)
    window = Window(Policy(4, fewest_groups=1))
    window.group(stored(1, 1))
    window.short_batch(fed=4)
    window.group(stored(2, 5))
    window.short_batch(fed=8)
    assert (window.cut, window.cut_tasks) == ({6, 7, 8}, 6)
    assert [window.group(stored(3, 2)), window.group(stored(4, 6))] == [Verdict.DUPLICATE, Verdict.LATE]


def test_without_over_rollout_no_task_is_cut() -> None:
    window = Window(Policy(2))
    window.group(stored(1, 2))
    assert not window.may_cut(fed=2)


def test_a_step_waits_for_tasks_that_are_not_fed_yet() -> None:
    window = Window(Policy(3, fewest_groups=2))
    window.group(stored(1, 1))
    window.group(stored(2, 2))
    assert not window.may_cut(fed=2), "the third would be cut before it exists"
    assert window.may_cut(fed=3)
