"""The reward function code_tests runs what an answer has against its row's tests."""

import json
from typing import Any

import pytest

from trinity.environments.sandbox.sandbox import problem
from trinity.environments.scorers import SCORERS, ScoreItem, code
from trinity.environments.scorers.code import program
from trinity.runtime.errors import InvalidInput, TimedOut
from trinity.sdk.scoring import as_result

pytestmark = [pytest.mark.core, pytest.mark.skipif(bool(problem()), reason=f"no sandbox: {problem()}")]

ADD = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
DOUBLE = "```python\nprint(2 * int(input()))\n```"
WRONG = "```python\ndef add(a, b):\n    return 0\n```"
CHECK = "METADATA = {'author': 'x'}\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n"
DATACLASS = """```python
from __future__ import annotations
import pickle
from dataclasses import dataclass

@dataclass
class Pair:
    a: int
    b: int

def add(a, b):
    pair = pickle.loads(pickle.dumps(Pair(a, b)))
    return pair.a + pair.b
```"""


def score(response: str, tests: Any, entry_point: Any = None, **args: Any) -> tuple[float, float]:
    task = {"tests": tests, "entry_point": entry_point}
    result = as_result(SCORERS["code_tests"](ScoreItem("", response, "", task), args))
    return result.reward, result.metrics["tests_passed"]


def test_a_right_program_passes_and_a_wrong_one_does_not() -> None:
    assert score(ADD, "assert add(1, 2) == 3") == (1, 1)
    assert score(ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]) == (0, 0.5)
    assert score(ADD, ["assert add(1, 2) == 4", "assert add(1, 2) == 3"], partial_credit=True) == (0.5, 0.5)
    assert score(DOUBLE, {"inputs": ["2", "-3\n"], "outputs": ["4\n\n", "-6"]}) == (1, 1)
    assert score(DOUBLE, '{"inputs": ["2"], "outputs": ["5"]}') == (0, 0)


def test_lists_may_be_json() -> None:
    asserts = json.dumps(["assert add(1, 2) == 3", "assert add(0, 0) == 0"])
    assert (score(ADD, asserts), score(WRONG, asserts)) == ((1, 1), (0, 0.0))
    pairs = [{"input": "2\n", "output": "4\n", "testtype": "stdin"}, {"input": "-3", "output": "-6"}]
    assert score(DOUBLE, json.dumps(pairs)) == score(DOUBLE, pairs) == (1, 1)
    assert score(WRONG, json.dumps(pairs)) == (0, 0)


def test_humanevals_check_is_called_with_the_rows_entry_point() -> None:
    assert (score(ADD, CHECK, "add"), score(WRONG, CHECK, "add")) == ((1, 1), (0, 0))
    assert score(WRONG, f"{CHECK}\ncheck(lambda a, b: a + b)") == (1, 1)  # as the test says


def test_a_program_is_a_module() -> None:
    assert score(DATACLASS, "assert add(1, 2) == 3") == (1, 1)


def test_only_standard_output_is_judged() -> None:
    lines = """import atexit, logging, sys, warnings
print("read", file=sys.stderr)
logging.warning("read")
warnings.warn("old")
assert (1, "one")
atexit.register(lambda: sys.stderr.write("bye"))"""
    program = f"```python\n{lines}\nprint(2 * int(input()))\n```"
    assert score(program, {"inputs": ["2"], "outputs": ["4"]}) == (1, 1)
    assert score(f"```python\n{lines}\ndef add(a, b):\n    return a + b\n```", "assert add(1, 2) == 3") == (1, 1)


@pytest.mark.parametrize(
    "line",
    [
        "import atexit; atexit.register(print, 'bye')",
        "print('a', end='', flush=True)\ndef print(*_): pass",
        "import sys; sys.stdout = None",
    ],
)
def test_what_a_program_prints_does_not_hide_that_its_tests_passed(line: str) -> None:
    code = f"```python\n{line}\ndef add(a, b):\n    return a + b\n```"
    assert score(code, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]) == (0, 0.5)


def test_an_answers_time_is_its_own() -> None:
    """Not that of the sandbox, of Python's start, or of a machine with other work."""
    assert score(DOUBLE, {"inputs": ["2"] * 30, "outputs": ["4"] * 30}, timeout_seconds=1) == (1, 1)
    slow = "```python\nimport time\nwhile time.process_time() < 0.15: pass\nprint(4)\n```"
    _, share = score(slow, {"inputs": ["2"] * 20, "outputs": ["4"] * 20}, timeout_seconds=1, partial_credit=True)
    assert 0.2 <= share <= 0.6, "about ten"


def test_a_score_call_that_ends_gives_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "seconds_left", lambda: 0.8)
    assert score(WRONG, "assert add(1, 2) == 3") == (0, 0), "it ended by itself"
    with pytest.raises(TimedOut, match="fewer tests"):
        score(ADD, "import time\ntime.sleep(9)")
    assert score(ADD, "import time\ntime.sleep(9)", timeout_seconds=0.6) == (0, 0)
    monkeypatch.setattr(code, "seconds_left", lambda: 0.4)
    with pytest.raises(TimedOut, match="fewer tests"):
        score(ADD, "assert add(1, 2) == 3")


def test_a_program_that_prints_its_arguments_has_no_proof() -> None:
    code = "```python\nimport sys\nprint(sys.argv)\nprint(sys.argv[1])\nprint(*sys.argv[1].split())\nsys.exit(0)\n```"
    assert score(code, "assert False") == (0, 0)


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
        ("Call ```solve()```:\n\n```python\na\n```\nRun ```python3 a.py```\n", "a"),
        ("1. Read:\n   ```python\n   if a:\n       b\n\n   c\n   ```", "if a:\n    b\n\nc"),
        ("```python\na\nb\n", "a\nb"),
        ("```python\na```\n", "a"),
        ("The answer: ```Python\na\n```\nIt adds.", "a"),
        ("````python\na\n````", "a"),
        ("```python\na  # not ``` the end\nb\n```", "a  # not ``` the end\nb"),
        ("```python\na\n```\nExample:\n```python\n>>> 2\n4\n```", "a"),
        ("```python\na\n```\n```python\n# nothing\n```", "a"),
        ("```python\na = (\n```\n```python\nb = (\n```", "b = ("),
        ("```python\na" + "`" * 90_000 + "b", "a" + "`" * 90_000 + "b"),
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
        ({"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]}, {}, "task.tests"),
        ([{"input": "1\n2", "output": "3", "testtype": "functional"}], {}, "task.tests"),
        ([{"input": "1"}], {}, "task.tests"),
        ("{", {}, "task.tests"),
        ("['assert add(1, 2) == 3']", {}, "task.tests"),
        ('["assert add(1, 2) == 3"', {}, "task.tests"),
        (CHECK, {}, "task.tests"),
        ("import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        assert 0", {}, "task.tests"),
        ("def test():\n    assert 0\nif __name__ == '__main__':\n    test()", {}, "task.tests"),
        ("# assert 0", {}, "task.tests"),
        ("add(1, 2) == 3", {}, "task.tests"),
        ("('assert 0', 1)\nx = [1]", {}, "task.tests"),
        ("assert add(1, 2 == 3", {}, "task.tests"),
        ("pass", {"parial_credit": True}, "args.parial_credit"),
        ("pass", {"timeout_seconds": 100}, "args.timeout_seconds"),
        ("pass", {"tests_key": "test_list"}, "task.test_list"),
    ],
)
def test_a_wrong_row_or_argument_is_named(tests: Any, args: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        score(ADD, tests, **args)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("printed", "expected", "right"),
    [
        ("0.5", "0.500000", 1),
        ("0.3333333333333333 -2", "0.333333333333 -2.0", 1),
        ("3e-17", "0.000000", 1),
        ("\\n  a\\tb\\n\\nc\\n", "a b\nc", 1),
        ("0.50001", "0.5", 0),
        ("1000000001", "1000000000", 0),
        ("5.0", "5", 0),
        ("0.5 0.5", "0.5", 0),
        ("a\\nb", "a b", 0),
        ("x" + "1" * 5000, "1.5", 0),
    ],
)
def test_spaces_and_the_last_digits_of_decimals_do_not_matter(printed: str, expected: str, right: int) -> None:
    program = f"```python\nprint('{printed}')\n```"
    assert score(program, {"inputs": [""], "outputs": [expected]}) == (right, right)


def test_usual_names_need_no_import_and_pass_no_test() -> None:
    answer = """```python
def total(numbers: List[int]) -> int:
    return math.prod(deque(numbers)) + pow(2, 3, 5)
```"""
    assert score(answer, "assert total([2, 3]) == 9") == (1, 1)
    assert score(answer, "assert gcd(4, 6) == 2") == (0, 0)
    assert score("```python\ndef gcd(a, b):\n    return 5\n```", "assert gcd(4, 6) == 5") == (1, 1)
