"""The reward function code_tests runs what an answer has against its row's tests."""

from typing import Any

import pytest

from trinity.environments.sandbox.sandbox import problem
from trinity.environments.scorers import SCORERS, ScoreItem
from trinity.environments.scorers.code import program
from trinity.runtime.errors import InvalidInput
from trinity.sdk.scoring import as_result

pytestmark = [pytest.mark.core, pytest.mark.skipif(bool(problem()), reason=f"no sandbox: {problem()}")]

ADD = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
DOUBLE = "```python\nprint(2 * int(input()))\n```"


def score(response: str, tests: Any, **args: Any) -> tuple[float, float]:
    result = as_result(SCORERS["code_tests"](ScoreItem("", response, "", {"tests": tests}), args))
    return result.reward, result.metrics["tests_passed"]


def test_a_right_program_passes_and_a_wrong_one_does_not() -> None:
    assert score(ADD, "assert add(1, 2) == 3") == (1, 1)
    assert score(ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]) == (0, 0.5)
    assert score(ADD, ["assert add(1, 2) == 4", "assert add(1, 2) == 3"], partial_credit=True) == (0.5, 0.5)
    assert score(DOUBLE, {"inputs": ["2", "-3\n"], "outputs": ["4\n\n", "-6"]}) == (1, 1)
    assert score(DOUBLE, '{"inputs": ["2"], "outputs": ["5"]}') == (0, 0)


@pytest.mark.parametrize(
    "code", ["import os; os._exit(0)", "raise SystemExit", "while True: pass", "x = 'a' * 10**10", "def f(: pass", ""]
)
def test_a_program_that_ends_or_hangs_before_the_test_does_not_pass(code: str) -> None:
    assert score(f"```python\n{code}\n```", "assert True and undefined == 1", timeout_seconds=1) == (0, 0)
    if code != "":
        assert score(f"```python\n{code}\n```", "pass", timeout_seconds=1) == (0, 0)


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("```python\na\n```\n```\nb\n```", "a"),
        ("```py\na\n```\n```python\nb\n```", "b"),
        ("```\na\n```", "a"),
        ("<think>```python\nno\n```</think>no code", ""),
        ("print(1)", ""),
        ("```" * 30_000, ""),
    ],
)
def test_the_program_is_the_last_block_of_python(response: str, found: str) -> None:
    assert program(response) == found


@pytest.mark.parametrize(
    ("tests", "args", "field"),
    [
        (None, {}, "task.tests"),
        ([], {}, "task.tests"),
        ([1], {}, "task.tests"),
        ({"inputs": ["1"], "outputs": []}, {}, "task.tests"),
        ("{", {}, "task.tests"),
        ("pass", {"parial_credit": True}, "args.parial_credit"),
        ("pass", {"timeout_seconds": 100}, "args.timeout_seconds"),
        ("pass", {"tests_key": "test_list"}, "task.test_list"),
    ],
)
def test_a_wrong_row_or_argument_is_named(tests: Any, args: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        score(ADD, tests, **args)
    assert raised.value.field == field
