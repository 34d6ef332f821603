"""One attempt at a task, without an engine: a group, or a failure with its cause; a drain returns leases."""

import argparse
import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from support.fakes.data.experience import make_group, make_task
from trinity.config.schema.buffer import FormatConfig
from trinity.data.experience import AttemptFailure, Experience, Group, Task, VersionSpan
from trinity.data.wire import decode_outcome, encode_outcome, task_to_proto
from trinity.explorer.engine.engine import completion_of
from trinity.explorer.environments.client import EnvironmentFailed, ScorerFailed
from trinity.explorer.rollout import attempt
from trinity.explorer.rollout.task_queue import TaskQueue
from trinity.explorer.types import Completion, EngineFailed
from trinity.explorer.weights.load_history import WeightsWithdrawn
from trinity.explorer.workflows.base import gather_rollouts
from trinity.explorer.workflows.single_turn import SimpleWorkflow
from trinity.runtime.broker import StreamSpec, connect, ensure_consumer, ensure_streams
from trinity.runtime.errors import FailureCause
from trinity.runtime.names import TASK_LEASE_SECONDS, TASKS_CONSUMER

pytestmark = pytest.mark.core


class Tools:
    """A toolbox that answers at once."""

    max_prompt_tokens = 8

    def __init__(self, problem: Exception | None = None, seconds: float = 0, bad: bool = False) -> None:
        self._problem, self._seconds, self._bad = problem, seconds, bad

    def prompt(self, messages: object, reply_prefix: str | None = None, images: object = ()) -> list[int]:
        return [1, 2, 3]

    def placed(self, token_ids: object, images: object) -> tuple[()]:
        return ()

    def text(self, token_ids: object) -> str:
        return "42"

    def reply(self, token_ids: object) -> str:
        return ""

    async def generate(self, prompt_token_ids: object, sampling, images=()) -> list[Completion]:  # type: ignore[no-untyped-def]
        await asyncio.sleep(self._seconds)
        if self._problem is not None:
            raise self._problem
        logprobs = np.full(2, np.nan if self._bad else -1.0, np.float32)
        tokens = np.array([5, 6], np.int32)
        return [Completion(tokens, logprobs, (VersionSpan(3, 0, 2),), "stop") for _ in range(sampling.n)]

    async def score(self, function: str, answers, row: object, args: object):  # type: ignore[no-untyped-def]
        from trinity.explorer.workflows.base import Score

        return [Score(1.0, {"accuracy": 1.0}) for _ in answers]


class CrossedByRollbacks(Tools):
    """The first answers are begun by version 12 and ended by version 9, or their weights are withdrawn at once."""

    def __init__(self, crossed: int, problem: Exception | None = None) -> None:
        super().__init__()
        self._crossed, self._withdrawn = crossed, problem
        self.asked = 0

    async def generate(self, prompt_token_ids: object, sampling, images=()) -> list[Completion]:  # type: ignore[no-untyped-def]
        self.asked += 1
        completions = await super().generate(prompt_token_ids, sampling)
        if self.asked > self._crossed:
            return completions
        if self._withdrawn is not None:
            raise self._withdrawn
        return [replace(c, version_spans=(VersionSpan(12, 0, 1), VersionSpan(9, 1, 2))) for c in completions]


def the_task(**changes: object) -> Task:
    form = FormatConfig(prompt_key="question", response_key="answer").model_dump_json()
    return make_task(**{"format_json": form, **changes})  # type: ignore[arg-type]


async def explore(task: Task, tools: Tools) -> object:
    return await attempt.explore(task, 1, "me", tools)  # type: ignore[arg-type]


async def test_a_group_has_every_rollout_with_its_tokens_and_versions() -> None:
    group = await explore(the_task(), Tools())
    assert isinstance(group, Group)
    assert [e.rollout for e in group.experiences] == [0, 1, 2, 3]
    first = group.experiences[0]
    assert first.token_ids.tolist() == [1, 2, 3, 5, 6]
    assert (first.prompt_length, first.action_mask.tolist(), first.reward) == (3, [True, True], 1.0)
    assert first.version_spans == (VersionSpan(3, 0, 2),)


async def test_a_greedy_baseline_is_the_last_of_the_group_and_says_so() -> None:
    asked = []

    class Watched(Tools):
        async def generate(self, prompt_token_ids: object, sampling, images=()) -> list[Completion]:  # type: ignore[no-untyped-def]
            asked.append((sampling.n, sampling.temperature))
            return await super().generate(prompt_token_ids, sampling)

    group = await explore(the_task(greedy_baseline=True), Watched())
    assert isinstance(group, Group)
    assert sorted(asked) == [(1, 0.0), (3, the_task().sampling.temperature)]
    assert [e.rollout for e in group.experiences] == [0, 1, 2, 3]
    assert [e.metrics.get("greedy", 0.0) for e in group.experiences] == [0.0, 0.0, 0.0, 1.0]


async def test_each_seat_of_a_greedy_game_is_a_rollout_of_its_own() -> None:
    class TwoSeats(SimpleWorkflow):
        async def run(self) -> list[Experience]:
            made = await super().run()
            return [replace(one, rollout=2 * one.rollout + seat) for one in made for seat in (0, 1)]

    found = await attempt._rollouts(TwoSeats, the_task(greedy_baseline=True), Tools())
    assert [(one.rollout, one.metrics.get("greedy", 0.0)) for one in found] == [
        *((rollout, 0.0) for rollout in range(6)), (6, 1.0), (7, 1.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tools", "changes", "cause", "final"),
    [
        (Tools(RuntimeError("boom")), {}, FailureCause.WORKFLOW_ERROR, False),
        (Tools(EnvironmentFailed("gone")), {}, FailureCause.ENVIRONMENT_ERROR, False),
        (Tools(ScorerFailed("gone")), {}, FailureCause.SCORER_ERROR, False),
        (Tools(WeightsWithdrawn("wrong")), {}, FailureCause.ENGINE_ERROR, False),
        (Tools(seconds=5), {"timeout_seconds": 0.1}, FailureCause.TIMEOUT, False),
        (Tools(), {"workflow": "no_such"}, FailureCause.WORKFLOW_ERROR, False),
        (Tools(bad=True), {}, FailureCause.INVALID_EXPERIENCE, True),
    ],
)
async def test_a_failure_has_its_cause(
    tools: Tools, changes: dict[str, object], cause: FailureCause, final: bool
) -> None:
    failure = await explore(the_task(**changes), tools)
    assert isinstance(failure, AttemptFailure)
    assert (failure.cause, failure.final) == (cause, final)
    assert failure.error


def exits() -> list[Experience]:
    argparse.ArgumentParser().parse_args(["--no-such"])
    return []


class Exits(SimpleWorkflow):
    """An agent that reads arguments which nobody gave."""

    async def run(self) -> list[Experience]:
        return exits()


class ExitsInOneRollout(SimpleWorkflow):
    async def run(self) -> list[Experience]:
        found = await gather_rollouts([super().run(), asyncio.to_thread(exits)])
        return found[0]


@pytest.mark.parametrize("kind", [Exits, ExitsInOneRollout])
@pytest.mark.parametrize("greedy", [False, True])
def test_an_agent_that_exits_fails_its_attempt_alone(
    kind: type[SimpleWorkflow], greedy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "find_workflow", lambda _: kind)
    # Not in pytest's event loop, which SystemExit would end.
    failure = asyncio.run(explore(the_task(greedy_baseline=greedy), Tools()))
    assert isinstance(failure, AttemptFailure)
    assert (failure.cause, failure.error) == (FailureCause.WORKFLOW_ERROR, "RuntimeError: SystemExit: 2")


async def cancelled_by_itself() -> list[Experience]:
    sleeping = asyncio.create_task(asyncio.sleep(60))
    sleeping.cancel()
    await sleeping
    return []


class CancelsItself(SimpleWorkflow):
    async def run(self) -> list[Experience]:
        return await cancelled_by_itself()


class CancelsItselfInOneRollout(SimpleWorkflow):
    async def run(self) -> list[Experience]:
        return (await gather_rollouts([super().run(), cancelled_by_itself()]))[0]


@pytest.mark.parametrize("kind", [CancelsItself, CancelsItselfInOneRollout])
async def test_a_workflow_that_cancels_itself_fails_its_attempt(
    kind: type[SimpleWorkflow], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "find_workflow", lambda _: kind)
    failure = await asyncio.gather(explore(the_task(), Tools()), return_exceptions=True)
    assert isinstance(failure[0], AttemptFailure)
    assert (failure[0].cause, failure[0].final) == (FailureCause.WORKFLOW_ERROR, False)
    assert "RuntimeError: the workflow cancelled itself" in failure[0].error


async def test_an_attempt_that_is_cancelled_makes_no_failure() -> None:
    exploring = asyncio.create_task(explore(the_task(), Tools(seconds=60)))
    await asyncio.sleep(0.05)
    exploring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exploring


HALF = "half a pair: \ud83d"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_text", None),
        ("prompt_text", 5),
        ("info_json", HALF),
        ("step", 1.0),
        ("rollout", 0.0),
        ("reward", "1"),
        ("metrics", {HALF: 1.0}),
        ("metrics", {"a": None}),
        ("action_mask", [True, True]),
        ("token_ids", np.arange(5)),
        ("version_spans", (VersionSpan(0.5, 0, 2),)),
    ],
)
async def test_a_field_that_no_message_holds_is_named_by_a_final_failure(
    field: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd(SimpleWorkflow):
        async def run(self) -> list[Experience]:
            first, *others = await super().run()
            return [first, replace(others[0], **{field: value}), *others[1:]]

    monkeypatch.setattr(attempt, "find_workflow", lambda _: Odd)
    failure = await explore(the_task(), Tools())
    assert isinstance(failure, AttemptFailure)
    assert (failure.cause, failure.final) == (FailureCause.INVALID_EXPERIENCE, True)
    assert f"group.experiences[1].{field}: is " in failure.error
    assert decode_outcome(encode_outcome(failure)) == failure


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("problem", "text"),
    [(ValueError(HALF), "ValueError: half a pair: ?"), (Unreadable(), "its text cannot be read: RuntimeError")],
)
async def test_an_error_is_stored_whatever_its_text(problem: Exception, text: str) -> None:
    failure = await explore(the_task(), Tools(problem))
    assert isinstance(failure, AttemptFailure)
    assert text in failure.error
    assert decode_outcome(encode_outcome(failure)) == failure


@pytest.mark.parametrize("problem", [None, WeightsWithdrawn("wrong")])
async def test_what_a_rollback_crosses_is_sampled_again_in_the_same_attempt(problem: Exception | None) -> None:
    """A task that may fail once alone must not become a dead letter by it."""
    tools = CrossedByRollbacks(3, problem)
    group = await explore(the_task(max_attempts=1), tools)
    assert isinstance(group, Group)
    assert tools.asked == 4
    assert group.versions == (3, 3)


async def test_weights_that_are_withdrawn_again_and_again_fail_the_attempt_and_not_the_task() -> None:
    tools = CrossedByRollbacks(100)
    failure = await explore(the_task(), tools)
    assert isinstance(failure, AttemptFailure)
    assert (failure.cause, failure.final) == (FailureCause.ENGINE_ERROR, False)
    assert "version 12, which a rollback withdrew" in failure.error
    assert tools.asked == 4


async def test_a_dead_engine_is_raised_and_is_no_failure_of_the_task() -> None:
    with pytest.raises(EngineFailed):
        await explore(the_task(), Tools(EngineFailed("core is gone")))


def test_spans_follow_the_pauses() -> None:
    def spans(loads: list[int]) -> tuple[VersionSpan, ...]:
        logprobs = SimpleNamespace(logprobs=[0.0] * len(loads), ranks=loads)
        part = SimpleNamespace(token_ids=loads, logprobs=logprobs, finish_reason="stop")
        return completion_of(part, [1, 2, 3]).version_spans

    assert spans([0] * 5) == (VersionSpan(1, 0, 5),)
    assert spans([0, 0, 0, 2, 2]) == (VersionSpan(1, 0, 3), VersionSpan(3, 3, 5))
    assert spans([]) == ()


async def test_a_drain_finishes_what_it_can_and_returns_the_rest(nats_url: str) -> None:
    finished: list[int] = []
    async with await connect(nats_url, "test") as broker:
        await ensure_streams(broker, [StreamSpec("TASKS", ("t.>",))])
        await ensure_consumer(broker, "TASKS", TASKS_CONSUMER, lease_seconds=TASK_LEASE_SECONDS)
        for ordinal in (1, 2):
            task = replace(make_task(ordinal), timeout_seconds=60.0)
            await broker.publish("t.x", task_to_proto(task).SerializeToString(), message_id=str(ordinal))

        async def work(task: Task, message) -> None:  # type: ignore[no-untyped-def]
            await asyncio.sleep(0.3 if task.ordinal == 1 else 60)
            finished.append(task.ordinal)
            await message.ack()

        queue = TaskQueue(broker, "TASKS", 4, work)
        running = asyncio.create_task(queue.run())
        async with asyncio.timeout(20):
            while queue.running < 2:
                await asyncio.sleep(0.02)
        assert (await queue.drain(1.0), finished) == ((1, 1), [1])
        running.cancel()

        seen: list[int] = []

        async def take(task: Task, message) -> None:  # type: ignore[no-untyped-def]
            seen.append(task.ordinal)
            await message.ack()

        other = TaskQueue(broker, "TASKS", 4, take)
        again = asyncio.create_task(other.run())
        async with asyncio.timeout(10):  # much sooner than the lease would run out
            while seen != [2]:
                await asyncio.sleep(0.05)
        again.cancel()


def test_make_group_is_what_the_log_takes() -> None:
    make_group(make_task()).check()
