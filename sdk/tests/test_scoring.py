"""A Score call: its items in order, several at once, within the time that its caller waits."""

import asyncio
import math
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from trinity.sdk import InvalidInput, Observation, ScoreItem, scoring, wire
from trinity.sdk.arena import Arena
from trinity.sdk.contract import Answer, Response, ScoreRequest
from trinity.sdk.errors import Broken

pytestmark = pytest.mark.core


def request(*responses: str, scorer: str = "scorer") -> ScoreRequest:
    return ScoreRequest(scorer, [Response(response=response) for response in responses])


@pytest.fixture
async def arena(request: pytest.FixtureRequest) -> AsyncIterator[Arena]:
    made = Arena(scorers={"scorer": request.param})
    yield made
    await made.drain(1)


meeting = threading.Barrier(2)


def meet(item: ScoreItem, args: dict[str, Any]) -> float:
    meeting.wait(20)
    return float(item.response)


@pytest.mark.parametrize("arena", [meet], indirect=True)
async def test_items_are_scored_side_by_side_and_keep_their_order(arena: Arena) -> None:
    scores = await arena.score(request(*map(str, range(40))))
    assert [score.error for score in scores] == [""] * 40
    assert [score.reward for score in scores] == list(range(40))


@pytest.mark.parametrize("arena", [lambda item, args: 1 / float(item.response)], indirect=True)
async def test_an_item_that_fails_fails_alone(arena: Arena) -> None:
    first, second, third = await arena.score(request("1", "0", "4"))
    assert (first.reward, third.reward) == (1, 0.25)
    assert second.error == "ZeroDivisionError: float division by zero"
    assert not await arena.score(request())
    with pytest.raises(InvalidInput, match="at most 4096"):
        await arena.score(request(*["1"] * 4097))


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


ERRORS = {"half": ValueError("half a pair: \ud83d"), "none": Unreadable(), "cancel": asyncio.CancelledError()}


def raising(item: ScoreItem, args: dict[str, Any]) -> float:
    raise ERRORS[item.response]


@pytest.mark.parametrize("arena", [raising], indirect=True)
async def test_any_error_of_a_scorer_is_its_items_own_and_can_be_sent(arena: Arena) -> None:
    scores = await arena.score(request("half", "none", "cancel"))
    assert [score.error for score in scores] == [
        "ValueError: half a pair: ?",
        "Unreadable: its text cannot be read: RuntimeError",
        "CancelledError: ",
    ]


@pytest.mark.parametrize("arena", [lambda item, args: args.pop("limit", 0)], indirect=True)
async def test_an_item_cannot_change_the_arguments_of_the_next(arena: Arena) -> None:
    scores = await arena.score(replace(request("1", "2", "3"), args_json='{"limit": 5}'))
    assert [score.reward for score in scores] == [5.0, 5.0, 5.0]


@pytest.mark.parametrize("arena", [lambda item, args: scoring.seconds_left()], indirect=True)
async def test_a_scorer_knows_how_much_time_is_left(arena: Arena) -> None:
    (score,) = await arena.score(request(""))
    assert 0 < score.reward <= scoring.BUDGET_SECONDS < 60, "before the caller's time-out"
    assert scoring.seconds_left() == math.inf


begun = threading.Semaphore(0)
go_on = threading.Event()


def wait(item: ScoreItem, args: dict[str, Any]) -> float:
    begun.release()
    go_on.wait(20)
    return 0.0


@pytest.mark.parametrize("arena", [wait], indirect=True)
async def test_a_caller_that_leaves_cancels_its_waiting_items(arena: Arena) -> None:
    asking = asyncio.create_task(arena.score(request(*["1"] * 1000)))
    await asyncio.to_thread(begun.acquire, timeout=20)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    go_on.set()
    arena._pools["scorer"].shutdown()
    counted = 1
    while begun.acquire(blocking=False):
        counted += 1
    assert counted <= 16


async def test_a_scorer_that_hangs_keeps_no_other_waiting() -> None:
    end = threading.Event()
    arena = Arena(scorers={"hung": lambda item, args: end.wait(30), "well": lambda item, args: 1.0}, scoring_threads=2)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(arena.score(request("1", scorer="hung")), 0.2)
    (score,) = await asyncio.wait_for(arena.score(request("1", scorer="well")), 10)
    assert score.reward == 1
    end.set()
    await arena.drain(1)


@pytest.mark.parametrize("arena", [lambda item, args: 1.0], indirect=True)
async def test_what_a_shutdown_leaves_unscored_is_an_error_never_a_reward(arena: Arena) -> None:
    made = scoring.Scoring(lambda item, args: 1.0, request("1", "2"))
    made.stop()
    made.work()
    assert [score.error for score in made.scores] == ["not scored: the service shut down"] * 2


def test_a_mapping_with_a_score_is_read_as_verl_does() -> None:
    given = {"score": -1.0, "acc": True, "pred": "43", "extra": {"a": 1}, "far": math.inf, "steps": np.int64(3)}
    found = scoring.as_result(given)
    assert (found.reward, found.metrics) == (-1.0, {"score": -1.0, "acc": 1.0, "steps": 3.0})
    assert scoring.as_result({"right": True, "format": np.float32(0.5)}).reward == 1.5


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ("1.0", "reward"),
        (b"1", "reward"),
        (np.str_("7"), "reward"),
        (None, "reward"),
        ({}, "reward"),
        (np.zeros(2), "reward"),
        (10**400, "reward"),
        (np.array("43"), "reward"),
        (np.array(["43"], dtype=object), "reward"),
        (np.complex64(1 + 2j), "reward"),
        (np.timedelta64(3, "s"), "reward"),
        ({"right": 1.0, "pred": np.array("43")}, "pred"),
        ({"score": "43", "acc": 1.0}, "score"),
        ({"right": 1.0, "pred": "43"}, "pred"),
        ({"right": 1.0, "parts": [1, 2]}, "parts"),
        (scoring.ScoreResult("3"), "reward"),  # type: ignore[arg-type]
        (scoring.ScoreResult(1.0, {"pred": "3"}), "pred"),  # type: ignore[dict-item]
    ],
)
def test_only_real_numbers_count(given: Any, field: str) -> None:
    with pytest.raises(InvalidInput, match=rf"^{field}: is .*must be a number") as raised:
        scoring.results(lambda item, args: given, [ScoreItem("", "", "")], {})
    assert raised.value.field == field


@pytest.mark.parametrize("given", [True, np.float32(1), np.array(1.0), np.array([1]), Decimal(1), Fraction(2, 2)])
def test_an_environments_reward_may_be_any_real_number(given: Any) -> None:
    assert wire.answer(Observation("", reward=given, metrics={"won": given}), 1) == Answer(
        reward=1.0, metrics={"won": 1.0}, turn=1
    )


@pytest.mark.parametrize("given", [None, "43", np.array("43"), [1.0], 10**400, 1j, {"score": 1.0}])
def test_an_environments_other_rewards_are_its_fault(given: Any) -> None:
    with pytest.raises(Broken, match=r"cannot be sent: reward: is .*must be a number"):
        wire.answer(Observation("", reward=given), 1)
    with pytest.raises(Broken, match=r"cannot be sent: metrics.won: is .*must be a number"):
        wire.answer(Observation("", metrics={"won": given}), 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"text": None}, "the text of its observation is NoneType, must be a str"),
        ({"text": b"abc"}, "the text of its observation is bytes, must be a str"),
        ({"done": "false"}, "the done of its observation is 'false', must be True or False"),
        ({"metrics": None}, "the metrics of its observation are None, must be a dict"),
        ({"images": None}, "the images of its observation are None, must be a list of bytes"),
    ],
)
def test_a_wrong_type_in_an_observation_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(Broken, match=said):
        wire.answer(replace(Observation(""), **given), 1)
    assert wire.answer(Observation("", done=np.bool_(True)), 1).done is True  # type: ignore[arg-type]
