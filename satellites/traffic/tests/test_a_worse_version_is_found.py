"""The guard of live traffic: worse versions are found within 200 rewards, others hardly ever, whatever the order."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from trinity.config.schema.explorer import TrafficConfig
from trinity.data.traffic import CallReward
from trinity.runtime.errors import Conflict
from trinity.traffic import rewards
from trinity.traffic.guard import Alarm, Guard
from trinity.traffic.rewards import RewardedCalls
from trinity.weights.pointer import Live

pytestmark = pytest.mark.core

CALLS = 64  # rewarded calls of a version


def served(guard: Guard, rng: np.random.Generator, version: int, right: float, calls: int = CALLS) -> Alarm | None:
    """The first alarm about a version whose answers are right with this probability."""
    alarms = (guard.add(version, float(rng.random() < right)) for _ in range(calls))
    return next((alarm for alarm in alarms if alarm is not None), None)


def test_of_500_versions_of_a_run_that_learns_at_most_one_in_a_hundred_is_withdrawn() -> None:
    guard, rng = Guard(0.01, 0.05, 0.0, 1.0), np.random.default_rng(0)
    right = np.linspace(0.4, 0.9, 500) + rng.normal(0, 0.01, 500)
    assert sum(served(guard, rng, version, right[version]) is not None for version in range(500)) <= 5


def test_a_version_that_is_as_bad_as_allowed_alarms_no_more_often_than_alpha() -> None:
    """The worst case of the null hypothesis, with many more looks than a run takes: Ville's bound."""
    alarms = 0
    for seed in range(300):
        guard, rng = Guard(0.1, 0.0, 0.0, 1.0), np.random.default_rng(seed)
        served(guard, rng, 1, 0.5, calls=1024)
        alarms += served(guard, rng, 2, 0.5, calls=300) is not None
    assert alarms <= 300 * 0.1


@pytest.mark.parametrize(("drop", "share"), [(0.3, 0.98), (0.5, 1.0)])
def test_a_version_that_is_worse_is_withdrawn_within_200_rewards(drop: float, share: float) -> None:
    found = 0
    for seed in range(100):
        guard, rng = Guard(0.01, 0.05, 0.0, 1.0), np.random.default_rng(seed)
        for version in range(16):
            served(guard, rng, version, 0.7)
        alarm = served(guard, rng, 16, 0.7 - drop, calls=200)
        found += alarm is not None
        assert alarm is None or ((alarm.version, alarm.good) == (16, 15) and alarm.rewards <= 200)
    assert found >= 100 * share


def test_rewards_of_any_range_and_order_are_compared_with_earlier_versions_only() -> None:
    guard = Guard(0.01, 0.0, -1.0, 1.0)
    assert all(guard.add(2, -1.0) is None for _ in range(500)), "nothing is known of earlier versions"
    for _ in range(400):
        guard.add(1, 5.0)  # late, and clipped
    assert all(guard.add(2, -1.0) is None for _ in range(500)), "the test has begun with what was known then"
    guard.forget(lambda version: version == 2)
    alarms = [alarm for _ in range(20) if (alarm := guard.add(3, -1.0)) is not None]
    assert len(alarms) < 20 and (alarms[-1].version, alarms[-1].good) == (3, 1)


def test_in_a_trial_versions_are_compared_with_those_that_are_served_beside_them() -> None:
    """Questions become harder in the middle: both versions are right less often, and neither is withdrawn."""
    alarms = dict.fromkeys((True, False), 0)
    for together in alarms:
        for seed in range(60):
            guard, rng = Guard(0.01, 0.05, 0.0, 1.0, together=together), np.random.default_rng(seed)
            served(guard, rng, 1, 0.9, calls=1024)
            for _ in range(200):
                served(guard, rng, 1, 0.4, calls=4)
                alarm = served(guard, rng, 2, 0.4, calls=1)
                alarms[together] += alarm is not None
                if alarm is not None:
                    break
    assert alarms[True] <= 1 and alarms[False] == 60
    found = 0
    for seed in range(60):
        guard, rng = Guard(0.01, 0.05, 0.0, 1.0, together=True), np.random.default_rng(seed)
        for call in range(1000):
            if served(guard, rng, 1 + (call % 5 == 0), 0.7 - 0.4 * (call % 5 == 0), calls=1) is not None:
                found += 1
                break
    assert found >= 58, "a version that is worse is found within 200 of its rewards"


async def test_rewards_that_an_earlier_process_judged_roll_nothing_back_and_a_refusal_is_not_repeated_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    explorer = SimpleNamespace(traffic=TrafficConfig.model_validate({"guard": {}}))
    plan = SimpleNamespace(config=SimpleNamespace(explorer=explorer))
    calls = RewardedCalls(cast(Any, SimpleNamespace(plan=plan, live=Live(), run="run")), cast(Any, None), "")
    asked: list[object] = []

    class Refusing:
        def __init__(self, *_: object) -> None: ...

        async def __aenter__(self) -> "Refusing":
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def ask(self, *_: object) -> None:
            asked.append(self)
            raise Conflict("the files are gone")

    monkeypatch.setattr(rewards, "SyncClient", Refusing)
    for version, reward, count in ((0, 1.0, 200), (1, 0.0, 100)):
        for number in range(count):
            await calls._judge(CallReward(f"chatcmpl-{version}-{number}", reward, version, version), acts=False)
    assert not asked
    for number in range(20):
        await calls._judge(CallReward(f"chatcmpl-new-{number}", 0.0, 1, 1), acts=True)
    assert len(asked) == 1
