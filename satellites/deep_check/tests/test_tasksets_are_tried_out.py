"""`trinity check --deep` begins an episode and scores a reply: bad arguments, rows and missing extras are said."""

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from support.checks.deep_check import check, play
from trinity.deep_check import tasksets
from trinity.environments import ENVIRONMENTS

pytestmark = pytest.mark.core

PUZZLE = {"question": "?", "answer": "2", "nums": [10, 4, 4], "target": 24}
TASKSET = "buffer.explorer_input.taskset"


@pytest.mark.parametrize(
    ("row", "taskset", "code", "said"),
    [
        ({}, play("countdown", max_attempts=3), 0, ""),
        (
            {},
            play("countdown", max_atempts=3),
            2,
            "environment_args.max_atempts: is unknown; did you mean max_attempts?",
        ),
        ({}, play("countdown", max_attempts="3"), 2, "environment_args.max_attempts: is '3', must be an integer >= 1"),
        ({"nums": "x"}, play("countdown"), 2, f"{TASKSET}: row 0, as countdown reads it: task.nums"),
        ({}, play("countdwn"), 0, "'countdwn' is neither built in nor installed; did you mean 'countdown'?"),
        ({}, play("webshop", backend="http", url="http://127.0.0.1:9"), 0, "no episode of 'webshop' could begin"),
        ({}, {"default_workflow_type": "countdown_workflow", "workflow_args": {"max_turn": 3}}, 2, "max_turn: unknown"),
        (
            {},
            {"reward_fn_args": {"with_think": True}},
            0,
            "reward_fn_args.with_think: math_reward does not read it",
        ),
        (
            {},
            {"default_reward_fn_type": "math_boxed_reward", "reward_fn_args": {"with_thnk": True}},
            0,
            "reward_fn_args.with_thnk: math_boxed_reward does not read it; did you mean 'with_think'?",
        ),
        (
            {},
            {"default_reward_fn_type": "math_dapo_reward", "reward_fn_args": {"enable_overlong_penalty": True}},
            2,
            "reward_fn_args.penalty_factor: is None, must be a number > 0",
        ),
        (
            {"answer": "\\boxed{$}"},
            {"default_reward_fn_type": "accuracy_reward"},
            0,
            "accuracy_reward gives no reward to a reply that is its reference answer (4 of 4 rows tried, first row 0",
        ),
        (
            {"nums": "x"},
            {"default_reward_fn_type": "countdown_reward"},
            2,
            "row 0, as countdown_reward reads it: task.",
        ),
        (
            {"answer": ["assert add(1, 2) == 3", "assert add("]},
            {"default_reward_fn_type": "code_tests"},
            2,
            "has the test 'assert add(', which is no Python",
        ),
    ],
)
def test_what_a_taskset_gives_is_tried_out(
    tmp_path: Path, row: dict[str, Any], taskset: dict[str, Any], code: int, said: str
) -> None:
    found, text = check(tmp_path, {**PUZZLE, **row}, **taskset)
    assert (found, said in text) == (code, True), text
    assert said or "countdown" not in text.replace("countdown_", ""), text


def game(name: str, **seats: str) -> dict[str, Any]:
    return {"default_workflow_type": "players_workflow", "workflow_args": {"environment": name, "seats": seats}}


@pytest.mark.parametrize(
    ("taskset", "said"),
    [
        (game("nim", first="policy"), ""),
        (play("nim"), "environment: is 'nim', a game of first and second; environment_workflow plays one player"),
        (game("countdown"), "environment: is 'countdown', of one player; use environment_workflow"),
        (game("nim", third="policy"), "seats.third: is given, and the players of nim are first, second"),
    ],
)
def test_seats_that_do_not_fit_the_environment_are_refused(tmp_path: Path, taskset: dict[str, Any], said: str) -> None:
    code, text = check(tmp_path, {**PUZZLE, "stones": 9}, **taskset)
    assert (code, said in text) == (2 if said else 0, True), text


@pytest.mark.parametrize(
    ("reward", "answer"),
    [
        ("accuracy_reward", "positive"),
        ("math_reward", "2x+1"),
        ("math_boxed_reward", "step\n#### 42"),
        ("math_dapo_reward", "(1, 2)"),
        ("format_reward", "positive"),
        ("countdown_reward", "24"),
    ],
)
def test_built_in_rewards_reward_reference_answers(tmp_path: Path, reward: str, answer: str) -> None:
    code, output = check(tmp_path, {**PUZZLE, "answer": answer}, default_reward_fn_type=reward)
    assert code == 0 and "gives no reward" not in output, output


def test_a_missing_extra_is_said_with_its_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)  # so that its import fails
    code, text = check(tmp_path, PUZZLE, **play("gymnasium", id="Taxi-v3"))
    assert (code, "'gymnasium' cannot be played here" in text, "pip install -e '.[gym]'" in text) == (2, True, True)


def test_an_environment_that_hangs_is_named_and_the_check_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(ENVIRONMENTS["countdown"], "reset", lambda *_, **__: released.wait(60))
    monkeypatch.setattr(tasksets, "_MOST_SECONDS", 0.1)
    code, text = check(tmp_path, PUZZLE, **play("countdown"))
    released.set()
    assert (code, "no episode of 'countdown' began within 0.1 s" in text) == (0, True), text


def test_an_environment_of_a_provider_is_left_to_it(tmp_path: Path) -> None:
    provided = "explorer.environments=[{name: countdown, address: attached}]"
    code, text = check(tmp_path, PUZZLE, provided, **play("countdown", anything=1))
    assert (code, "anything" in text) == (0, False), text


@pytest.mark.parametrize(
    ("mode", "said"), [("both", "are there; 2 optimizer steps"), ("bench", "model and data are there\n")]
)
def test_the_last_line_is_about_what_the_mode_does(tmp_path: Path, mode: str, said: str) -> None:
    evaluated = f"buffer.explorer_input.eval_tasksets=[{{name: test, path: {tmp_path}/rows.jsonl, format: "
    evaluated += "{prompt_key: question, response_key: answer}}]"
    code, text = check(tmp_path, PUZZLE, f"mode={mode}", evaluated)
    assert (code, said in text) == (0, True), text
