"""The window against models that keep everything in plain lists."""

import math
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trinity.buffer.ledger.wire import cursor_of, window_at
from trinity.buffer.window.groups import EVICTED, FENCED, STALE, Kept, StoredGroup
from trinity.buffer.window.policy import Policy, Priority, staleness_control
from trinity.buffer.window.window import Verdict, Window

pytestmark = pytest.mark.core

GROUPS, ATTEMPTS, TASKS = 3, 3, 12


def stored(sequence: int, ordinal: int, version: int = 0, **more: Any) -> StoredGroup:
    return StoredGroup(sequence, f"t{ordinal}", ordinal, 4, version, version, 10, 0.5, **more)


class Machine(RuleBasedStateMachine):
    """Log entries in any order and any number; the window is rebuilt from its own cursor now and then.

    The model: what became of every task, and in which order groups came.
    """

    policy = Policy(GROUPS)

    def __init__(self) -> None:
        super().__init__()
        self.window = Window(self.policy)
        self.sequence = 0
        self.groups: dict[int, StoredGroup] = {}  # the one of each task that counts
        self.failures: dict[int, int] = {}
        self.dead: set[int] = set()
        self.requeued: set[int] = set()
        self.fenced: set[int] = set()
        self.kept_out: dict[int, str] = {}
        self.waiting: list[int] = []  # ordinals in the pool, in the order of storing
        self.batches: list[list[int]] = []

    def _next(self) -> int:
        self.sequence += 1
        return self.sequence

    @property
    def step(self) -> int:
        return len(self.batches) + 1

    @rule(ordinal=st.integers(1, TASKS), version=st.integers(0, 4), filtered=st.booleans())
    def group(self, ordinal: int, version: int, filtered: bool) -> None:
        group = stored(self._next(), ordinal, version)
        verdict = self.window.group(group, "reward_filter" if filtered else "")
        if self.ended(ordinal):
            assert verdict is Verdict.DUPLICATE
            return
        self.groups[ordinal] = group
        reason = "reward_filter" if filtered else FENCED if version in self.fenced else ""
        assert verdict is (Verdict.DROPPED if reason else Verdict.STORED)
        if reason:
            self.kept_out[ordinal] = reason
        else:
            self.waiting.append(ordinal)
        self._take_batches()

    @rule(ordinal=st.integers(1, TASKS), final=st.booleans())
    def failure(self, ordinal: int, final: bool) -> None:
        verdict = self.window.failure(self._next(), ordinal, ATTEMPTS, final)
        if self.ended(ordinal):
            assert verdict is Verdict.LATE_FAILURE
        else:
            self.failures[ordinal] = self.failures.get(ordinal, 0) + 1
            if final or self.failures[ordinal] >= ATTEMPTS:
                assert verdict is Verdict.DEAD
                self.dead.add(ordinal)
            else:
                assert verdict is Verdict.RETRIED
        self._take_batches()

    @rule(ordinal=st.integers(1, TASKS))
    def requeue(self, ordinal: int) -> None:
        verdict = self.window.requeue(self._next(), ordinal)
        assert verdict is (Verdict.REQUEUED if ordinal in self.dead else Verdict.DUPLICATE)
        if ordinal in self.dead:
            self.dead.discard(ordinal)
            self.requeued.add(ordinal)
        self._take_batches()

    @rule(version=st.integers(1, 4))
    def fence(self, version: int) -> None:
        self.window.fence(self._next(), [version])
        self.fenced.add(version)
        for ordinal in [o for o in self.waiting if self.groups[o].oldest_version == version]:
            self.waiting.remove(ordinal)
            self.kept_out[ordinal] = FENCED
        self._take_batches()

    @rule()
    def foreign(self) -> None:
        assert self.window.skip(self._next()) is Verdict.REFUSED

    @rule()
    def restart(self) -> None:
        self.window = window_at(cursor_of(self.window), self.policy)

    def ended(self, ordinal: int) -> bool:
        return ordinal in self.groups or ordinal in self.dead or ordinal in self.requeued

    def _take_batches(self) -> None:
        while (expected := self.expected()) is not None:
            batch = self.window.next_batch(self.step)
            assert batch is not None
            assert [group.ordinal for group in batch] == expected
            assert all(group.use_count == 1 for group in batch)
            self.waiting = [o for o in self.waiting if o not in expected]
            self.batches.append(expected)
        assert self.window.next_batch(self.step) is None

    def expected(self) -> list[int] | None:
        raise NotImplementedError

    @invariant()
    def counts_add_up(self) -> None:
        window = self.window
        assert window.stored == len(self.groups)
        assert window.dead_letters == len(self.dead)
        assert window.num_ended == sum(map(self.ended, range(1, TASKS + 1)))
        assert len(window.to_requeue) == len(self.requeued), "nothing is fed here"
        used = [ordinal for batch in self.batches for ordinal in batch]
        assert len(used) == len(set(used)), "a group was used twice"
        assert window.stored == len(used) + len(self.waiting) + len(self.kept_out)
        assert window.dropped.total() == len(self.kept_out)
        assert {g.ordinal for g in window.unused.values()} == set(self.waiting)
        assert set(window.outstanding(TASKS)) == {o for o in range(1, TASKS + 1) if not self.ended(o)}

    @invariant()
    def every_drop_is_said_with_its_reason(self) -> None:
        assert {drop.ordinal: drop.reason for drop in self.window.fresh_drops} == self.kept_out

    @invariant()
    def nothing_that_is_needed_lies_below_the_floor(self) -> None:
        assert all(self.groups[ordinal].log_sequence >= self.window.floor() for ordinal in self.waiting)


class FifoMachine(Machine):
    """A batch waits for its slowest task."""

    def expected(self) -> list[int] | None:
        first = sorted(self.waiting)[:GROUPS]
        reach = next(o for o in range(1, TASKS + 2) if not self.ended(o))
        return first if len(first) == GROUPS and first[-1] < reach else None


class ArrivalMachine(Machine):
    """In the order of storing; what is older than the limit at its step is dropped."""

    policy = Policy(GROUPS, kind="arrival", keeps=partial(staleness_control, staleness_limit=2))

    def expected(self) -> list[int] | None:
        for ordinal in [o for o in self.waiting if self.step - 1 - self.groups[o].oldest_version > 2]:
            self.waiting.remove(ordinal)
            self.kept_out[ordinal] = STALE
        return self.waiting[:GROUPS] if len(self.waiting) >= GROUPS else None


TestFifo = FifoMachine.TestCase
TestArrival = ArrivalMachine.TestCase
TestFifo.settings = TestArrival.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


class ReplayMachine(RuleBasedStateMachine):
    """Priorities, reuse after a cool-down, use counts and eviction, against a sorted list."""

    policy = Policy(2, kind="replay", priority=Priority(2.0, 0.5, 3), reuse_cooldown_seconds=5.0, capacity=6)

    def __init__(self) -> None:
        super().__init__()
        self.window = Window(self.policy)
        self.sequence = 0
        self.now = 100.0
        self.pool: dict[int, tuple[int, int, float]] = {}  # ordinal -> version, uses, usable from
        self.uses: dict[int, int] = {}
        self.evicted: set[int] = set()

    def _rank(self, ordinal: int) -> tuple[float, int]:
        version, uses, _ = self.pool[ordinal]
        return -self.policy.priority.of(version, uses, ordinal), ordinal

    @rule(version=st.integers(0, 6))
    def group(self, version: int) -> None:
        self.sequence += 1
        self.window.group(stored(self.sequence, self.sequence, version))
        self.pool[self.sequence] = version, 0, -math.inf
        if len(self.pool) > 6:
            worst = max(self.pool, key=self._rank)
            if self.pool.pop(worst)[1] == 0:
                self.evicted.add(worst)

    @rule(seconds=st.floats(0, 10))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def batch(self) -> None:
        usable = sorted((o for o in self.pool if self.pool[o][2] <= self.now), key=self._rank)
        found = self.window.next_batch(1, self.now)
        if len(usable) < 2:
            assert found is None
            return
        assert found is not None
        assert [group.ordinal for group in found] == usable[:2]
        for group in found:
            version, uses, _ = self.pool.pop(group.ordinal)
            assert group.use_count == uses + 1 <= 3
            if uses + 1 < 3:
                self.pool[group.ordinal] = version, uses + 1, self.now + 5.0

    @rule()
    def restart(self) -> None:
        self.window = window_at(cursor_of(self.window), self.policy)

    @invariant()
    def pool_and_drops_agree(self) -> None:
        assert {*self.window.unused, *self.window.reusable} == set(self.pool)
        assert {d.ordinal for d in self.window.fresh_drops if d.reason == EVICTED} == self.evicted


TestReplay = ReplayMachine.TestCase
TestReplay.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_what_operators_left_survives_the_cursor() -> None:
    window = Window(Policy(GROUPS))
    window.group(stored(1, 1, kept=(Kept(0, 0.25), Kept(2, -1.0, True))))
    again = window_at(cursor_of(window), Policy(GROUPS))
    assert again == window


def test_a_partial_batch_takes_what_is_there_and_the_late_group_comes_next() -> None:
    window = Window(Policy(GROUPS))
    assert window.next_batch(1, partial=True) is None, "nothing is no batch"
    window.group(stored(1, 2))
    window.group(stored(2, 3))
    assert window.next_batch(1) is None
    assert [g.ordinal for g in window.next_batch(1, partial=True) or []] == [2, 3]
    for sequence, ordinal in ((3, 4), (4, 1), (5, 5)):
        window.group(stored(sequence, ordinal))
    assert [g.ordinal for g in window.next_batch(2) or []] == [1, 4, 5]


def test_with_a_lockstep_replay_is_one_interval_ahead_of_the_explorers_at_most() -> None:
    window = Window(Policy(1, kind="replay", reuse_cooldown_seconds=0.0, lockstep=2))
    window.group(stored(1, 1))
    assert window.next_batch(1, 1.0)
    assert window.next_batch(2, 1.0), "the only group again"
    assert window.next_batch(3, 1.0) is None, "two groups must have come before the second interval"
    window.group(stored(2, 2))
    assert [g.ordinal for g in window.next_batch(3, 1.0) or []] == [2]


def test_a_log_entry_is_never_judged_twice() -> None:
    window = Window(Policy(GROUPS))
    window.group(stored(1, 1))
    with pytest.raises(ValueError, match="comes after"):
        window.group(stored(1, 2))
