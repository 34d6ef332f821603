"""explorer.dynamic_timeout: attempts that take much longer than others at their taskset are cut, and say so."""

import asyncio
from dataclasses import replace

import pytest

from support.fakes.data.experience import make_group, make_task
from trinity.config.schema.buffer import FormatConfig
from trinity.config.schema.explorer import DynamicTimeoutConfig
from trinity.data.experience import AttemptFailure, Experience, Group, Task, TaskKind
from trinity.explorer.rollout import attempt
from trinity.explorer.rollout.attempt import Patience
from trinity.explorer.workflows import WORKFLOWS
from trinity.explorer.workflows.base import Workflow
from trinity.runtime.errors import FailureCause

pytestmark = pytest.mark.core

ON = DynamicTimeoutConfig(enable=True, ratio=3, warmup_min_steps=2)


def the_task(**changes: object) -> Task:
    form = FormatConfig(prompt_key="question", response_key="answer").model_dump_json()
    return make_task(**{"format_json": form, "timeout_seconds": 100.0, **changes})  # type: ignore[arg-type]


def warm(config: DynamicTimeoutConfig, seconds: float, attempts: int) -> Patience:
    patience = Patience(config, tasks_per_step=4)
    for _ in range(attempts):
        patience.count(the_task(), seconds)
    return patience


def test_the_limit_is_a_multiple_of_the_mean_once_enough_attempts_ended() -> None:
    assert warm(ON, 10, 7).limit_seconds(the_task()) == 100, "two steps of four tasks are needed"
    assert warm(ON, 10, 8).limit_seconds(the_task()) == 30
    assert warm(ON, 50, 8).limit_seconds(the_task()) == 100, "max_timeout is a limit still"
    assert warm(DynamicTimeoutConfig(), 10, 80).limit_seconds(the_task()) == 100


def test_each_taskset_has_its_own_mean_and_evaluations_none() -> None:
    patience = warm(ON, 10, 8)
    assert patience.limit_seconds(replace(the_task(), taskset="slow")) == 100
    evaluation = replace(the_task(), kind=TaskKind.EVALUATION)
    patience.count(evaluation, 1000)
    assert patience.limit_seconds(evaluation) == 100
    assert patience.limit_seconds(the_task()) == 30


def test_limits_that_became_too_short_grow_again() -> None:
    patience = warm(ON, 1, 8)
    for _ in range(30):  # every attempt takes 20 s from now on
        patience.count(the_task(), min(20, patience.limit_seconds(the_task())))
    assert patience.limit_seconds(the_task()) > 20


async def test_an_attempt_is_cut_with_the_key_that_cut_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Workflow):
        async def run(self) -> list[Experience]:
            await asyncio.sleep(20)
            return []

    monkeypatch.setitem(WORKFLOWS, "slow", Slow)
    patience = warm(ON, 0.02, 8)
    failure = await attempt.explore(the_task(workflow="slow"), 1, "me", None, patience=patience)  # type: ignore[arg-type]
    assert isinstance(failure, AttemptFailure)
    assert failure.cause is FailureCause.TIMEOUT and not failure.final
    assert failure.error == "TimeoutError: the attempt took longer than 0.06 s (explorer.dynamic_timeout)"
    assert patience.limit_seconds(the_task()) == pytest.approx(3 * (8 * 0.02 + 0.06) / 9)


async def test_a_timeout_of_the_workflows_own_is_not_the_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Impatient(Workflow):
        async def run(self) -> list[Experience]:
            raise TimeoutError("the tool server was silent for 5 s")

    monkeypatch.setitem(WORKFLOWS, "impatient", Impatient)
    patience = warm(ON, 10, 8)
    failure = await attempt.explore(the_task(workflow="impatient"), 1, "me", None, patience=patience)  # type: ignore[arg-type]
    assert isinstance(failure, AttemptFailure)
    assert failure.cause is FailureCause.WORKFLOW_ERROR and not failure.final
    assert failure.error == "TimeoutError: the tool server was silent for 5 s"
    assert patience.limit_seconds(the_task()) == 30


async def test_an_attempt_that_ends_with_a_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    given = the_task()
    experiences = list(make_group(given).experiences)

    class Quick(Workflow):
        async def run(self) -> list[Experience]:
            await asyncio.sleep(0.05)
            return experiences

    monkeypatch.setitem(WORKFLOWS, "quick", Quick)
    patience = Patience(DynamicTimeoutConfig(enable=True, warmup_min_steps=0), 4)
    group = await attempt.explore(replace(given, workflow="quick"), 1, "me", None, patience=patience)  # type: ignore[arg-type]
    assert isinstance(group, Group)
    assert 3 * 0.05 <= patience.limit_seconds(given) < 3 * 5
