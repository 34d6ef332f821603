"""Seats of games of several players: what a YAML may say of them, and what older versions need."""

import re
from typing import Any

import pytest

from trinity.config.advice import advice
from trinity.config.checks.players import plays_older
from trinity.config.checks.sections import check
from trinity.config.schema import Config
from trinity.config.schema.buffer import TasksetConfig
from trinity.config.schema.explorer import OlderVersionsConfig

pytestmark = pytest.mark.core

ADAPTERS = {"model_path": "/m", "max_model_len": 64, "lora_configs": [{"lora_rank": 8, "merged": False}]}
SEATS = "buffer.explorer_input.taskset.workflow_args.seats"


def config(seats: Any = None, **changes: Any) -> Config:
    args = {"environment": "nim", **({} if seats is None else {"seats": seats})}
    taskset = {"path": "/t", "default_workflow_type": "players_workflow", "workflow_args": args}
    given: dict[str, Any] = {
        "model": ADAPTERS,
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
        "buffer": {"batch_size": 4, "total_steps": 2, "explorer_input": {"taskset": taskset}},
        "synchronizer": {"versions_to_keep": 42},
    }
    return Config.model_validate({**given, **changes})


def said(seats: Any = None, **changes: Any) -> dict[str, str]:
    return {problem.path: problem.message for problem in check(config(seats, **changes))}


def test_seats_of_the_policy_and_of_older_versions_need_nothing_more() -> None:
    assert said() == said({"first": "policy"}) == said({"second": "older"}) == {}
    assert [plays_older(config(seats)) for seats in (None, {"first": "policy"}, {"second": "older"})] == [0, 0, 1]


@pytest.mark.parametrize(
    ("seats", "changes", "key", "message"),
    [
        ({"second": "oder"}, {}, f"{SEATS}.second", "is 'oder', which plays no seat; did you mean 'older'"),
        ({"second": 3}, {}, f"{SEATS}.second", "is 3, must be text"),
        ({"second": ["older"]}, {}, f"{SEATS}.second", "is a list, must be text"),
        (
            {"second": "older"},
            {"model": {"model_path": "/m", "max_model_len": 64}},
            "model.lora_configs",
            "has no adapters with merged: false",
        ),
        (
            {"second": "older"},
            {"synchronizer": {}},
            "synchronizer.versions_to_keep",
            "is 3; .* 40 steps old: at least 42",
        ),
        (
            {"second": "older"},
            {"synchronizer": {"versions_to_keep": 42, "sync_interval": 3}},
            "explorer.older_versions.every",
            "is 10, and versions come every 3 steps; give a multiple of 3",
        ),
    ],
)
def test_seats_that_nobody_can_play_are_refused(seats: Any, changes: dict[str, Any], key: str, message: str) -> None:
    found = said(seats, **changes)
    assert list(found) == [key]
    assert re.search(message, found[key])


def test_seats_of_another_form_break_no_advice() -> None:
    list(advice(config({"second": ["older"]})))


def test_an_endpoint_seats_nobody_and_an_explorer_takes_the_numbers_of_its_run() -> None:
    nothing = {"model": {"model_path": "/m", "max_model_len": 64}, "synchronizer": {}}
    assert said({"second": "older"}, mode="serve", **nothing) == {}
    assert not plays_older(config({"second": "older"}, mode="serve"))
    assert said({"second": "older"}, mode="explore", synchronizer={}) == {}
    assert list(said({"second": "older"}, mode="explore", **nothing)) == ["model.lora_configs"]
    assert "mode" in said({"second": "older"}, mode="bench")


@pytest.mark.parametrize(("interval", "rated"), [(100, False), (40, False), (30, True)])
def test_evaluations_whose_versions_never_meet_are_told(interval: int, rated: bool) -> None:
    args = {"environment": "nim", "seats": {"second": "older"}}
    evaluated = {"path": "/e", "default_workflow_type": "players_workflow", "workflow_args": args}
    made = config({"second": "older"}, explorer={"eval_interval": interval})
    source = made.buffer.explorer_input.model_copy(update={"eval_tasksets": [TasksetConfig.model_validate(evaluated)]})
    made = made.model_copy(update={"buffer": made.buffer.model_copy(update={"explorer_input": source})})
    found = [one for one in advice(made) if "have a rating" in one]
    assert [one.endswith("evaluate every 30 or less") for one in found] == ([] if rated else [True])


def test_an_auxiliary_model_may_play_a_seat() -> None:
    explorer = {"auxiliary_models": [{"name": "rival", "model_path": "/r"}]}
    assert said({"second": "rival"}, explorer=explorer) == {}


@pytest.mark.parametrize(
    ("step", "versions"),
    [(0, [0]), (1, [0]), (10, [0]), (11, [0, 10]), (25, [0, 10, 20]), (40, [0, 10, 20, 30]), (41, [10, 20, 30, 40])],
)
def test_the_newest_versions_of_every_tenth_step_play(step: int, versions: list[int]) -> None:
    assert OlderVersionsConfig().before(step) == versions
