"""Answers are compared as math-verify does, in processes that can be killed."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from math_verify import parse, verify

from trinity.environments.scorers import verifier as verifier_module
from trinity.environments.scorers.answers import same_answer
from trinity.environments.scorers.verifier import Verifier
from trinity.sdk import scoring
from trinity.sdk.arena import Arena
from trinity.sdk.contract import Response, ScoreRequest

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    made = Verifier(workers=2)
    assert made.same("2", "2")  # it is loaded
    yield made
    made.close()


def workers() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if child.cmdline()[-1:] == ["math-verify"]]


def of_math_verify(reference: str, answer: str) -> bool:
    gold, found = (parse(f"${text}$", parsing_timeout=None) for text in (reference, answer))
    return bool(gold and found and verify(gold, found, timeout_seconds=None))


PAIRS = [
    ("1/3", "\\frac{1}{3}"), ("1/3", "0.333333"), ("1/3", "0.33"), ("2\\sqrt{2}", "\\sqrt{8}"), ("0.5", "50\\%"),
    ("50", "50\\%"), ("0.3333333", "0.3333334"), ("3", "3.0000001"), ("1,000", "1000"), ("x^2+1", "1+x^2"),
    ("x=3", "3"), ("\\{1,2\\}", "\\{2,1\\}"), ("(1,2)", "(2,1)"), ("[1,2)", "[1,2)"), ("\\pi", "3.14159265"),
    ("30^\\circ", "30"), ("12 \\text{ cm}", "12"), ("-5", "5"), ("007", "7"), ("5.", "5"), ("10^{3}", "1000"),
    ("1<x<2", "(1,2)"), ("\\frac{\\sqrt{3}}{2}", "\\sqrt{3}/2"), ("x+y", "y-x"), ("\\infty", "10"), ("7/2", "3.5"),
]  # fmt: skip


@pytest.mark.parametrize(("reference", "answer"), PAIRS)
def test_verdicts_are_those_of_math_verify(verifier: Verifier, reference: str, answer: str) -> None:
    assert same_answer(answer, reference, verifier) == of_math_verify(reference, answer)


numbers = st.one_of(
    st.integers(-2000, 2000).map(str),
    st.decimals(-1000, 1000, places=3).map(str),
    st.fractions(-50, 50, max_denominator=40).map(lambda f: f"\\frac{{{f.numerator}}}{{{f.denominator}}}"),
    st.fractions(0, 50, max_denominator=40).map(lambda f: f"{f.numerator}/{f.denominator}"),
    st.integers(1000, 10**7).map(lambda n: f"{n:,}"),
)


@given(numbers, numbers, st.booleans())
@settings(max_examples=150, deadline=None)
def test_the_fast_path_agrees_with_math_verify(verifier: Verifier, reference: str, other: str, same: bool) -> None:
    answer = reference if same else other
    assert same_answer(answer, reference, verifier) == of_math_verify(reference, answer)


@given(st.integers(1, 10**6), st.integers(1, 10**6))
@settings(max_examples=50, deadline=None)
def test_plain_numbers_never_need_a_process(top: int, bottom: int) -> None:
    class Never(Verifier):
        def same(self, reference: str, given: str) -> bool:
            raise AssertionError((reference, given))

    assert same_answer(f"{top}/{bottom}", f"\\frac{{{top}}}{{{bottom}}}", Never())
    assert same_answer(f"{top:,}.0", f"${top}$", Never())
    assert same_answer(f"{top}/{bottom}", str(Fraction(top, bottom)), Never())
    assert not same_answer(str(top), str(top + 1), Never())


@pytest.mark.parametrize("text", ["A", "(B)", "\\text{no solution}", "blue", "Ω", "二"])
def test_equal_texts_are_equal_always(verifier: Verifier, text: str) -> None:
    assert same_answer(text, text, verifier)
    assert not same_answer(text + "x", text, verifier)


HOSTILE = {
    "power tower": "9^{9^{9}}",
    "python's power tower": "9**9**9",
    "difference of giants": "2^{1000000000}-2^{1000000000}+1",
    "factorial": "99999999!",
    "parentheses": "(" * 400 + "1" + ")" * 400,
    "fewer parentheses": "(" * 45 + "1" + ")" * 45,
    "fractions": "\\frac{" * 150,
    "boxes": "\\boxed{" * 100,
    "digits": "7" * 900,
    "long sum": "\\sum_{i=1}^{10^9} i^i",
    "code": "__import__('os').system('true')",
    "ten megabytes": "7" * 10_000_000,
    "control characters": "\x00\x1b[31m1\r\n2",
    "newline": "1\n2",
    "other digits": "٤٢",
    "surrogate": "\ud800",
}


@pytest.fixture(scope="module")
def impatient() -> Iterator[Verifier]:
    made = Verifier(workers=1, comparison_seconds=1.0)
    assert made.same("2", "2")
    yield made
    made.close()


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_answer_takes_bounded_time_and_the_next_one_is_judged(impatient: Verifier, case: str) -> None:
    begin = time.monotonic()
    assert not same_answer(HOSTILE[case], "2\\sqrt{2}", impatient)
    assert time.monotonic() - begin < 5
    impatient.comparison_seconds = 30  # the next one may be waiting for a fresh process on a busy machine
    assert same_answer("\\sqrt{8}", "2\\sqrt{2}", impatient)
    impatient.comparison_seconds = 1.0


async def test_a_group_of_hostile_answers_is_scored_before_its_caller_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scoring, "BUDGET_SECONDS", 6.0)
    judge = Verifier(workers=2, comparison_seconds=1.0)
    assert judge.same("2", "2")
    arena = Arena(scorers={"judged": lambda item, args: float(same_answer(item.response, item.truth, judge))})
    items = [Response(response="9^{9^{9}}", truth=f"{n}\\sqrt{{2}}") for n in range(60)]
    items += [Response(response="3.0", truth="3"), Response(response="5", truth="3")]
    before = not_made()
    begin = time.monotonic()
    scores = await arena.score(ScoreRequest("judged", items))
    assert time.monotonic() - begin < 20, "sixty comparisons one after the other take far longer"
    assert [score.error for score in scores] == [""] * 62
    assert [score.reward for score in scores] == [0] * 60 + [1, 0], "what needs no comparison is scored to the end"
    assert not_made() > before
    judge.comparison_seconds = 30
    assert judge.same("\\sqrt{8}", "2\\sqrt{2}"), "the next call has its own time"
    judge.close()
    await arena.drain(1)


def not_made() -> float:
    return float(verifier_module.NOT_MADE._value.get())


def test_it_works_from_threads_and_keeps_its_number_of_processes(verifier: Verifier) -> None:
    def ask(index: int) -> bool:
        return same_answer(f"{index}+x", f"x+{index}", verifier)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(ask, range(40)))
    assert threading.current_thread() is threading.main_thread()
    assert len(workers()) <= 2 + os.cpu_count()  # type: ignore[operator]


def test_a_killed_worker_is_replaced(verifier: Verifier) -> None:
    alone = Verifier(workers=1)
    before = {worker.pid for worker in workers()}
    assert alone.same("\\sqrt{8}", "2\\sqrt{2}")
    (mine,) = [worker for worker in workers() if worker.pid not in before]
    mine.kill()
    mine.wait(10)
    assert alone.same("\\sqrt{8}", "2\\sqrt{2}")
    alone.close()
    assert {worker.pid for worker in workers()} <= before


def test_workers_end_with_their_parent_however_it_ends() -> None:
    code = (
        "from trinity.environments.scorers.verifier import Verifier; import os; v = Verifier(1); v.same('1', '1');"
        "print(v._workers.get()._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    worker = int(done.stdout)
    for _ in range(100):
        if not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    raise AssertionError(f"worker {worker} is still there")
