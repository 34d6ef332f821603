"""`code_tests`: the program in an answer, judged by the row's tests in a sandbox."""

import ast
import functools
import json
import math
import re
import secrets
import textwrap
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import Any

from trinity.environments.arguments import Arguments
from trinity.environments.sandbox.limits import Limits
from trinity.environments.sandbox.sandbox import BubblewrapSandbox, File, Output, Sandbox, put, require
from trinity.runtime.errors import InvalidInput, TimedOut
from trinity.runtime.leases import most_mib
from trinity.sdk.scoring import ScoreItem, ScoreResult, seconds_left

# A fence begins a line, or says that Python follows. The last one may be missing, or end the last line.
_OPENING = r"(?:^[ \t]*`{3,}[ \t]*|```(?=py(?:thon)?3?[ \t]*\n))(\w*)[^\n`]*\n"
_BLOCK = re.compile(rf"(?msi){_OPENING}(.*?)(?:^[ \t]*```|```\s*\Z|\Z)")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_MAX_CODE = 100_000
_MAX_CASES = 1000
_NO_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)
_NO_TIME = "code_tests: the Score call has no time left; give fewer tests, or a lower timeout_seconds"
# Only standard output is judged: programs may log, and Python may warn.
_PYTHON = ["sh", "-c", 'exec python3 -I "$@" 2>/dev/null', "sh"]
# What answers to such tasks use without an import.
_USUAL = """
from typing import *
from bisect import bisect_left, bisect_right, insort
from collections import *
from copy import deepcopy
from functools import cache, cmp_to_key, lru_cache, partial, reduce
from heapq import *
from itertools import *
from math import ceil, comb, factorial, floor, gcd, inf, isqrt, lcm, log, log2, prod, sqrt
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
"""
# The answer as the module `solution`, for which the usual names are built in, then the test, for which they are not.
# A line with the proof tells that the test came to its end.
_TEST = f"""
import builtins, sys, types
module = sys.modules["solution"] = types.ModuleType("solution")
module.__builtins__ = dict(vars(builtins))
exec({_USUAL!r}, module.__builtins__)
exec(compile(open("/app/solution.py").read(), "/app/solution.py", "exec"), module.__dict__)
module.__builtins__ = builtins
exec(compile(sys.argv[1], "test", "exec"), module.__dict__)
"""


@dataclass(frozen=True)
class Case:
    """A text of Python that raises where the answer is wrong, or what the program reads, and what it has to write."""

    test: str = ""
    stdin: str = ""
    stdout: str = ""


def code_tests(item: ScoreItem, args: dict[str, Any]) -> ScoreResult:
    """1 if the program in the answer passes every test of its row, else 0; `partial_credit`: the share that it passes.

    The program is the last block between triple backticks, of Python if any is. The row's `tests_key` (tests; without
    such a column the reference answer) has a text or a list of texts of Python (`assert add(1, 2) == 3`), or {"inputs",
    "outputs"} or a list of {"input", "output"}: what a program reads, and what it has to write. Lists and objects may
    be JSON. A test that only defines HumanEval's `check(candidate)` is called with the row's `entry_point`.
    `timeout_seconds` (10) are for each test, and on a processor for all tests of an answer, without Python's start;
    `memory_mib` (512) for its processes.

    Raises InvalidInput naming the column for tests that would judge nothing.
    """
    given = Arguments(args)
    key = given.text("tests_key", "tests")
    is_truth = "tests_key" not in args and key not in item.task and item.truth
    cases = _cases({**item.task, key: item.truth} if is_truth else item.task, key)
    partial = given.boolean("partial_credit", False)
    seconds = given.number("timeout_seconds", 10.0, low=0.1, high=35)
    memory = given.integer("memory_mib", Limits.memory_mib, low=32, high=most_mib())
    given.finish()
    code = program(item.response)
    if not code:
        return ScoreResult(0.0, {"accuracy": 0.0, "tests_passed": 0.0})
    require()
    limits = Limits(memory_mib=memory, output_bytes=1024**2, ttl_seconds=seconds + 60)
    with closing(BubblewrapSandbox(limits)) as sandbox:
        put(sandbox, {"/app/solution.py": File(code.encode("utf-8", "replace"))})
        passed = sum(_results(sandbox, cases, seconds, stop=not partial))
    share, right = passed / len(cases), passed == len(cases)
    return ScoreResult(share if partial else float(right), {"accuracy": float(right), "tests_passed": share})


def program(response: str) -> str:
    """Returns the last block between triple backticks; empty without one.

    Prefers blocks that are marked as Python. Among several it prefers those that Python can parse.
    """
    blocks = _BLOCK.findall(response[-_MAX_CODE:].rpartition("</think>")[2])
    marked = [code for language, code in blocks if language.lower() in ("python", "py", "python3")]
    codes = [textwrap.dedent(code).strip() for code in reversed(marked or [code for _, code in blocks])] or [""]
    return codes[0] if len(codes) == 1 else next(filter(_is_python, codes), codes[0])


def _is_python(code: str) -> bool:
    try:
        return bool(ast.parse(code).body)
    except _NO_PYTHON:
        return False


def _results(sandbox: Sandbox, cases: list[Case], seconds: float, stop: bool) -> Iterator[bool]:
    """Runs each case until the program has used its time, or until a case fails with `stop`. Raises TimedOut where the
    Score call has no time left: no verdict is better than a wrong one.
    """
    used = 0.0
    for case in cases:
        if used >= seconds:
            return
        if (called := seconds_left()) <= 0.5:
            raise TimedOut(_NO_TIME)
        passed, done = _run(sandbox, case, min(seconds, called))
        if done.ended == "time" and called < seconds:
            raise TimedOut(_NO_TIME)
        used += seconds if done.ended == "time" else max(0.0, done.cpu - _start_seconds())
        yield passed
        if stop and not passed:
            return


@functools.cache
def _start_seconds() -> float:
    """Measures the processor time of Python's start and the usual imports."""
    with closing(BubblewrapSandbox(Limits())) as sandbox:
        return sandbox.run([*_PYTHON, "-c", _USUAL]).cpu


def _run(sandbox: Sandbox, case: Case, seconds: float) -> tuple[bool, Output]:
    """Tells if the program passes, and how it ended."""
    if not case.test:
        done = sandbox.run([*_PYTHON, "/app/solution.py"], seconds=seconds, stdin=case.stdin.encode(), alone=True)
        return done.code == 0 and not done.cut and _same(done.text, case.stdout), done
    proof = secrets.token_hex(16)
    test = f"{case.test}\n__import__('os').write(1, b'\\n{proof}\\n')"
    done = sandbox.run([*_PYTHON, "-c", _TEST, test], seconds=seconds, alone=True)
    return done.code == 0 and proof in done.text.splitlines(), done


def _same(text: str, expected: str) -> bool:
    """Tells if lines have the same words. Spaces and empty lines do not matter, nor the last digits of decimals."""
    lines, right = ([line.split() for line in each.splitlines() if line.strip()] for each in (text, expected))
    return [*map(len, lines)] == [*map(len, right)] and all(map(_near, chain(*lines), chain(*right)))


def _near(word: str, expected: str) -> bool:
    if word == expected or "." not in expected or not (_NUMBER.fullmatch(word) and _NUMBER.fullmatch(expected)):
        return word == expected
    return math.isclose(float(word), float(expected), rel_tol=1e-6, abs_tol=1e-9)


def _cases(task: dict[str, Any], key: str) -> list[Case]:
    """Raises InvalidInput naming the column."""
    where, given = f"task.{key}", task.get(key)
    if isinstance(given, str) and given.lstrip().startswith(("{", "[")):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise InvalidInput(where, f"begins with {given.lstrip()[0]} and is no JSON") from None
    if isinstance(given, str):
        given = [given] if given.strip() else []
    if isinstance(given, dict):
        cases = _read_and_written(given, where)
    elif isinstance(given, list) and all(isinstance(text, str) and text.strip() for text in given):
        cases = [Case(test=_checking(text, task.get("entry_point"), where)) for text in given]
    elif isinstance(given, list) and all(isinstance(one, dict) for one in given):
        lists = [{**one, "inputs": [one.get("input")], "outputs": [one.get("output")]} for one in given]
        cases = [case for one in lists for case in _read_and_written(one, where)]
    else:
        forms = "a text, a list of texts, {inputs, outputs}, or a list of {input, output}"
        raise InvalidInput(where, f"is {given!r:.200}, must be {forms}")
    if not 0 < len(cases) <= _MAX_CASES:
        raise InvalidInput(where, f"has {len(cases)} tests, must have from 1 to {_MAX_CASES}")
    return cases


def _read_and_written(given: dict[str, Any], where: str) -> list[Case]:
    """Raises InvalidInput for anything but text for standard input, arguments of a function included."""
    if given.get("fn_name") or given.get("testtype", given.get("type", "stdin")) not in ("stdin", "stdin_stdout"):
        raise InvalidInput(where, "has arguments of a function, must have texts of Python, or what a program reads")
    inputs, outputs = given.get("inputs") or [], given.get("outputs") or []
    if not all(isinstance(one, list) and all(isinstance(text, str) for text in one) for one in (inputs, outputs)):
        raise InvalidInput(where, "must have what a program reads and what it has to write as texts")
    if len(inputs) != len(outputs):
        raise InvalidInput(where, f"has {len(inputs)} inputs and {len(outputs)} outputs, must have as many of both")
    return [Case(stdin=read, stdout=wrote) for read, wrote in zip(inputs, outputs, strict=True)]


def _checking(test: str, entry_point: Any, where: str) -> str:
    """Returns the test, and adds a call of a `check(candidate)` that it only defines.

    Raises InvalidInput for a test that would pass for every answer.
    """
    try:
        body = ast.parse(test).body
    except _NO_PYTHON as error:
        raise InvalidInput(where, f"has the test {test!r:.200}, which is no Python: {error}") from None
    if not all(map(_idle, body)):
        return test
    if any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in body):
        if not isinstance(entry_point, str) or not entry_point.strip():
            raise InvalidInput(where, "only defines `check`; the row needs the column entry_point: the name to check")
        return _checking(f"{test}\ncheck({entry_point})", None, where)
    raise InvalidInput(where, f"has the test {test!r:.200}, which only defines names: it must assert something")


def _idle(node: ast.stmt) -> bool:
    """Tells if a statement judges nothing: a definition, an import, literals, a comparison whose result is not used,
    or a block that only a main program runs.
    """
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Import() | ast.ImportFrom():
            return True
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__")), orelse=[]) | ast.Expr(value=ast.Compare()):
            return True
        case ast.Expr(value=value) | ast.Assign(value=value):
            return not any(isinstance(part, ast.Call | ast.Name) for part in ast.walk(value))
    return False
