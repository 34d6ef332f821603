"""The judge of the log against a model that keeps everything in plain lists."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trinity.buffer.window import StoredGroup, Verdict, Window
from trinity.buffer.wire import cursor_of, window_at

GROUPS, ATTEMPTS = 3, 3


class WindowMachine(RuleBasedStateMachine):
    """Log entries in any order and any number; the window is rebuilt from its own cursor now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.window = Window(GROUPS)
        self.sequence = 0
        self.first_group: dict[int, int] = {}  # ordinal -> sequence of the group that counts
        self.failures: dict[int, int] = {}
        self.dead: set[int] = set()
        self.batches: list[list[int]] = []

    def _next(self) -> int:
        self.sequence += 1
        return self.sequence

    def _take_batches(self) -> None:
        while (batch := self.window.next_batch()) is not None:
            self.batches.append([group.ordinal for group in batch])

    @rule(ordinal=st.integers(1, 12))
    def group(self, ordinal: int) -> None:
        sequence = self._next()
        verdict = self.window.group(StoredGroup(sequence, f"t{ordinal}", ordinal, 4, 0, 0, 10, 0.5))
        if ordinal in self.first_group or ordinal in self.dead:
            assert verdict is Verdict.DUPLICATE
        else:
            assert verdict is Verdict.STORED
            self.first_group[ordinal] = sequence
        self._take_batches()

    @rule(ordinal=st.integers(1, 12), final=st.booleans())
    def failure(self, ordinal: int, final: bool) -> None:
        verdict = self.window.failure(self._next(), ordinal, ATTEMPTS, final)
        if ordinal in self.first_group or ordinal in self.dead:
            assert verdict is Verdict.LATE_FAILURE
        else:
            self.failures[ordinal] = self.failures.get(ordinal, 0) + 1
            if final or self.failures[ordinal] >= ATTEMPTS:
                assert verdict is Verdict.DEAD
                self.dead.add(ordinal)
            else:
                assert verdict is Verdict.RETRIED
        self._take_batches()

    @rule()
    def restart(self) -> None:
        self.window = window_at(cursor_of(self.window), GROUPS)

    @invariant()
    def counts_add_up(self) -> None:
        assert self.window.stored == len(self.first_group)
        assert self.window.dead_letters == len(self.dead)

    @invariant()
    def batches_are_the_stored_ones_in_the_order_of_feeding(self) -> None:
        used = [ordinal for batch in self.batches for ordinal in batch]
        assert all(len(batch) == GROUPS for batch in self.batches)
        assert used == sorted(set(used))
        reach = used[-1] if used else 0
        assert used == [o for o in range(1, reach + 1) if o not in self.dead]
        rest = [o for o in range(reach + 1, 13) if o not in self.dead]
        ready = 0
        for ordinal in rest:
            if ordinal not in self.first_group:
                break
            ready += 1
        assert ready < GROUPS, "a batch was complete and not taken"


TestWindow = WindowMachine.TestCase
TestWindow.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
