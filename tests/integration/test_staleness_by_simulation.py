"""The bound of docs/staleness.md, by simulation: explorers of any speed that come and go, versions that are rejected or
withdrawn, batches in the order of tasks or of storing. Feeding, gates, batches, ages, versions and rollbacks are the
services' own functions; only time, engines and the trainer's mathematics are made up.
"""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity.buffer.state.context import RunContext
from trinity.buffer.tasks.feeder import Feeder
from trinity.buffer.window.groups import StoredGroup
from trinity.buffer.window.policy import policy_of
from trinity.buffer.window.window import Window
from trinity.config import Plan, make_plan
from trinity.config.load import parse
from trinity.config.plan import Staleness
from trinity.runtime.names import RunNames
from trinity.sync.store.records import Record
from trinity.sync.versions import GoLive, RollBack, current, gate_step, next_live, transition
from trinity.weights.pointer import Live
from trinity.weights.wire import VersionState

pytestmark = pytest.mark.core

YAML = """
{{project: p, name: n, checkpoint_root_dir: /tmp/none, algorithm: {{algorithm_type: grpo, repeat_times: 2{strategy}}},
model: {{model_path: m, max_prompt_tokens: 16, max_response_tokens: 16}},
buffer: {{batch_size: {groups}, total_steps: {steps}, explorer_input: {{taskset: {{name: t, path: d.jsonl}}}},
trainer_input: {{experience_buffer: {{capacity: {capacity}}}}}}},
synchronizer: {{sync_style: {style}, sync_interval: {interval}, sync_offset: {offset}}}}}
"""
STYLES = ("fixed", "explorer_driven", "trainer_driven", "fully_async")
STEPS, ATTEMPTS, MOST_TICKS = 10, 2, 4000


@functools.cache
def plan_of(values: tuple[tuple[str, object], ...], strategy: str) -> Plan:
    return make_plan(parse(YAML.format(strategy=strategy, steps=STEPS, **dict(values))))


@dataclass(frozen=True)
class World:
    """What may happen, as chances at each tick. `speeds`: that a task of this explorer ends, that it loads."""

    style: str = "fixed"
    interval: int = 1
    offset: int = 0
    groups: int = 2
    capacity: int = 16
    arrival: bool = False
    speeds: tuple[tuple[float, float], ...] = ((0.5, 0.5), (0.1, 0.1), (0.9, 0.05))
    comes_or_goes: float = 0.02
    fails: float = 0.05
    retried: float = 0.0
    judged: float = 0.5
    rejected: float = 0.0
    withdrawn: float = 0.0
    seed: int = 0

    def plan(self) -> Plan:
        """With arrival, the limit is the bound itself."""
        values = tuple((name, getattr(self, name)) for name in ("style", "interval", "offset", "groups", "capacity"))
        plan = plan_of(values, "")
        arrival = (
            f", sample_strategy: staleness_control, sample_strategy_args: {{staleness_limit: {plan.staleness.bound}}}"
        )
        return plan_of(values, arrival) if self.arrival else plan


@dataclass
class Attempt:
    """A task on an explorer. `oldest` is -1 until weights that meet its gate are served."""

    ordinal: int
    gate: int
    oldest: int = -1


@dataclass
class Explorer:
    """`heard`: the pointer that it has loaded, so its version and the gates that it meets."""

    speed: tuple[float, float]
    is_there: bool = True
    heard: Live = field(default_factory=Live)
    attempt: Attempt | None = None


class Simulation:
    """run() -> finished, violations."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world, self.plan = world, plan
        self.random = random.Random(world.seed)
        self.context = RunContext(cast(Any, None), RunNames("run"), plan, last_step=STEPS)
        self.window = Window(policy_of(plan))
        source = cast(Any, SimpleNamespace(weight=1.0))
        self.feeder = Feeder(self.context, source, lambda: self.window, cast(Any, None))
        self.queue: list[Attempt] = []
        self.records: list[Record] = []
        self.explorers = [Explorer(speed) for speed in world.speeds]
        self.sequence = 0
        self.step = 0
        self.knows_rollback = 0
        self.staleness: list[int] = []
        self.violations: list[str] = []
        self.withdrawn_at: dict[int, int] = {}  # version -> ledger step from which on it must not be seen

    def run(self) -> bool:
        """Whether every step was trained before the time was over."""
        self._publish(0)
        for _ in range(MOST_TICKS):
            if self.step == STEPS:
                return True
            self._sync()
            self._feed()
            for explorer in self.explorers:
                self._explore(explorer)
            if self.window.dead and self._happens(self.world.retried):
                self.window.requeue(self._next(), self.random.choice(sorted(self.window.dead)))
            self._train()
        return False

    def _happens(self, chance: float) -> bool:
        return self.random.random() < chance

    # -- sync

    def _publish(self, step: int) -> None:
        state = VersionState.VERIFIED if step == 0 else VersionState.STAGED
        self.records.insert(0, Record(step, step, "", state))
        self._live = replace(self.context.live, newest_version=step, newest_step=step)
        self._settle()

    @property
    def _live(self) -> Live:
        return self.context.live

    @_live.setter
    def _live(self, live: Live) -> None:
        self.context.live = live

    def _settle(self) -> None:
        record = next_live(self.records, self._live)
        if record is not None:
            self._live, live = transition(self._live, record, GoLive())
            self.records[self.records.index(record)] = live
        self._live = replace(self._live, gate_step=gate_step(self.records, self._live))

    def _sync(self) -> None:
        """The canary of a version ends, or an operator rolls back."""
        for index, record in enumerate(self.records):
            if record.state is VersionState.STAGED and self._happens(self.world.judged):
                bad = self._happens(self.world.rejected) and record.step < STEPS
                state = VersionState.REJECTED if bad else VersionState.VERIFIED
                self.records[index] = replace(record, state=state)
        self._settle()
        if self._happens(self.world.withdrawn):
            retired = [r for r in self.records if current(r, self._live).state is VersionState.RETIRED and r.was_live]
            if retired:
                self._roll_back(self.random.choice(retired))

    def _roll_back(self, record: Record) -> None:
        """The buffer has fenced it before it writes another entry (LedgerWriter, Fences)."""
        self._live, _ = transition(self._live, record, RollBack(self._happens(0.3)))
        rollback = self._live.rollback
        assert rollback is not None
        if not rollback.keep_experience:
            versions = range(rollback.version + 1, rollback.newest_version + 1)
            self.window.fence(self._next(), versions)
            self.withdrawn_at |= dict.fromkeys(versions, self.step + 1)

    # -- buffer

    def _next(self) -> int:
        self.sequence += 1
        return self.sequence

    def _feed(self) -> None:
        while self.context.fed < self.feeder.allowed():
            ordinal = self.context.fed + 1
            if self.window.to_requeue:
                self.window.requeued_through = self.window.to_requeue[0]
            self.queue.append(Attempt(ordinal, self.feeder.gate(ordinal)))
            self.context.fed = ordinal
        plan = self.plan
        consumed = self.step * plan.groups_per_step + self.window.lost
        if self.context.fed - consumed > (plan.staleness.bound + 1) * plan.groups_per_step:
            self.violations.append(f"{self.context.fed - consumed} groups outstanding after step {self.step}")

    # -- explorers

    def _explore(self, explorer: Explorer) -> None:
        if self._happens(self.world.comes_or_goes):
            self._come_or_go(explorer)
        if not explorer.is_there:
            return
        ends, loads = explorer.speed
        if explorer.heard.version == self._live.version or self._happens(loads):
            explorer.heard = self._live
        if explorer.attempt is None and self.queue:
            explorer.attempt = self.queue.pop(self.random.randrange(min(3, len(self.queue))))
        attempt = explorer.attempt
        if attempt is None:
            return
        if attempt.oldest < 0 and explorer.heard.gate_step >= attempt.gate:
            attempt.oldest = explorer.heard.version
        if attempt.oldest >= 0 and self._happens(ends):
            explorer.attempt = None
            self._end(attempt, explorer.heard.version)

    def _come_or_go(self, explorer: Explorer) -> None:
        """What it worked on runs elsewhere. One of them is always there."""
        if explorer.is_there and sum(other.is_there for other in self.explorers) > 1:
            if explorer.attempt is not None:
                self.queue.insert(0, Attempt(explorer.attempt.ordinal, explorer.attempt.gate))
            explorer.attempt, explorer.is_there = None, False
        elif not explorer.is_there:
            explorer.is_there, explorer.heard = True, Live()

    def _end(self, attempt: Attempt, version: int) -> None:
        """Stored, or failed and tried again. A response that a rollback crossed is by both versions."""
        if self._happens(self.world.fails):
            if self.window.failure(self._next(), attempt.ordinal, ATTEMPTS).value == "retried":
                self.queue.insert(0, Attempt(attempt.ordinal, attempt.gate))
            return
        oldest, newest = sorted((attempt.oldest, version))
        name = f"t{attempt.ordinal}"
        self.window.group(StoredGroup(self._next(), name, attempt.ordinal, 2, oldest, newest, 10, 0.5))

    # -- trainer

    def _train(self) -> None:
        rollback = self._live.rollback
        number = rollback.number if rollback else 0
        if number != self.knows_rollback and self._happens(0.5):
            # It continues from the older weights. The version that it could not publish meanwhile is made of them: the
            # next batch may wait for it.
            self.knows_rollback = number
            interval = self.plan.staleness.interval
            if self.step // interval * interval > self._live.newest_version:
                self._publish(self.step)
        lineage = self.context.lineage
        batch = self.window.next_batch(self.step + 1, lineage=lineage)
        if batch is None:
            return
        self.step += 1
        for group in batch:
            self._judge(group, group.staleness(self.step, lineage))
        if number == self.knows_rollback and self.plan.staleness.publishes(self.step, STEPS):
            self._publish(self.step)

    def _judge(self, group: StoredGroup, age: int) -> None:
        self.staleness.append(age)
        rejected = self._rejected_above(group.oldest_version)
        if self.world.arrival:  # its limit is raised for every group while nothing newer can be had
            rejected = max(rejected, self.context.lineage.rejected)
        allowed = self.plan.staleness.bound + rejected
        if age > allowed:
            self.violations.append(f"step {self.step} learns from {group}: {age} steps old, at most {allowed}")
        if any(group.oldest_version <= v <= group.newest_version for v in self.withdrawn_at):
            self.violations.append(f"step {self.step} learns from {group}, which was withdrawn")

    def _rejected_above(self, version: int) -> int:
        """Steps of the rejected versions that follow a version at once: its tasks may be of their batches."""
        newest = version
        for record in reversed(self.records):
            if record.version > version:
                if record.state is not VersionState.REJECTED and not self._live.is_withdrawn(record.version):
                    break
                newest = record.version
        return self.context.lineage.steps(version, newest)


def worlds(**more: Any) -> st.SearchStrategy[World]:
    chance = st.sampled_from([0.05, 0.1, 0.5, 1.0])
    return st.builds(
        World,
        interval=st.integers(1, 4),
        offset=st.integers(0, 3),
        groups=st.integers(1, 3),
        capacity=st.integers(1, 40),
        arrival=st.booleans(),
        speeds=st.lists(st.tuples(chance, chance), min_size=1, max_size=4).map(tuple),
        judged=chance,
        seed=st.integers(0, 2**32),
        **more,
    )


class ForgetsRejected(Simulation):
    """Gates are met by the LIVE version's own step alone."""

    def _settle(self) -> None:
        super()._settle()
        self._live = replace(self._live, gate_step=self._live.step)


def simulate(
    world: World,
    wrong: Callable[[Staleness], Staleness] = lambda right: right,
    kind: type[Simulation] = Simulation,
) -> Simulation:
    plan = world.plan()
    simulation = kind(world, replace(plan, staleness=wrong(plan.staleness)))
    finished = simulation.run()
    if not finished:
        stuck = f"stuck at step {simulation.step} with {len(simulation.queue)} tasks in the queue, {simulation._live}"
        simulation.violations.append(stuck)
    return simulation


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_style_exceeds_its_bound_or_gets_stuck(style: str, data: st.DataObject) -> None:
    world = data.draw(worlds(style=st.just(style), retried=st.sampled_from([0.0, 0.1, 0.9])))
    assert simulate(world).violations == []


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_nor_when_versions_are_rejected_and_withdrawn(style: str, data: st.DataObject) -> None:
    world = data.draw(
        worlds(style=st.just(style), rejected=st.sampled_from([0.0, 0.3, 0.9]), withdrawn=st.sampled_from([0.01, 0.1]))
    )
    assert simulate(world).violations == []


@dataclass(frozen=True)
class GateTooLow(Staleness):
    """Weights one interval too old may start a task."""

    def gate(self, batch: int) -> int:
        return max(0, super().gate(batch) - self.interval)


@dataclass(frozen=True)
class GateTooHigh(Staleness):
    """A task waits for weights that are made with its own batch."""

    def gate(self, batch: int) -> int:
        return super().gate(batch) + self.offset + self.interval


@dataclass(frozen=True)
class FeedsTooMuch(Staleness):
    def open_batches(self, gate_step: int) -> int:
        return super().open_batches(gate_step) + 1


def found(wrong: type[Staleness], word: str, worlds_: list[World]) -> int:
    """In how many of the worlds a violation is found that says the word."""
    seen = (simulate(world, lambda right: wrong(right.interval, right.offset)).violations for world in worlds_)
    return sum(any(word in violation for violation in violations) for violations in seen)


@pytest.mark.parametrize("style", STYLES)
def test_a_gate_that_is_too_low_violates_the_bound(style: str) -> None:
    tried = [World(style=style, interval=i, seed=seed, capacity=8) for i in (1, 2) for seed in range(10)]
    assert found(GateTooLow, "steps old", tried) >= 5


@pytest.mark.parametrize("style", STYLES)
def test_a_gate_that_is_too_high_gets_stuck(style: str) -> None:
    tried = [World(style=style, interval=2, seed=seed, capacity=8) for seed in range(3)]
    assert found(GateTooHigh, "stuck", tried) == len(tried)


@pytest.mark.parametrize("chances", [{"rejected": 0.9}, {"withdrawn": 0.1}])
def test_gates_of_versions_that_may_not_be_served_count_as_met(chances: dict[str, float]) -> None:
    tried = [World(seed=seed, **chances) for seed in range(3)]  # type: ignore[arg-type]
    assert all("stuck" in simulate(world, kind=ForgetsRejected).violations[0] for world in tried)


def test_feeding_too_much_is_found() -> None:
    assert found(FeedsTooMuch, "outstanding", [World(seed=seed) for seed in range(3)]) == 3


def test_the_bound_is_reached() -> None:
    """It is no smaller than it has to be: some experience is as old as it allows."""
    for style in STYLES:
        world = World(style=style, interval=2, offset=1, capacity=30, speeds=((0.9, 0.05), (0.05, 0.05)))
        oldest = max(max(simulate(replace(world, seed=seed)).staleness) for seed in range(10))
        assert oldest == world.plan().staleness.bound, style
