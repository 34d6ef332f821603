"""Which answers may be evaluated as Python, and which never."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity.environments.bridges.harmless import MAX_CHARACTERS, harmless

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "(3 + 4) * 5",
        "-x**2/2 + sqrt(x) + C",
        "2**10",
        "(x + 1)**3",
        "[['a', 1], (2, -3)]",
        "1 2\n3 4",
        "_ Q _",
        "x = 3",
        "16.91°",
        "(P ∧ ¬Q) → (Q ∨ P) ↔ R",
    ],
)
def test_formulas_values_and_words_are(answer: str) -> None:
    assert harmless(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "9**9**9",
        "9**(9**9)",
        "(9**99)**99",
        "2**101",
        "9999999999!",
        "9^9^9 ** 999",
        "1 << 99999999999",
        "[1] * 10**9",
        "'x' * 10",
        "open('/etc/passwd')",
        "().__class__",
        "x.real()",
        "(lambda: 1)()",
        "[x for x in (1, 2)]",
        "sin(x=1)",
        "f'{1}'",
        "factorial(99)",
        "Integral(x, x)",
        "9**9**9°",
        "open(P) ∧ Q",
        "(p) ∨ q",
        "P(Q())",
        "P ∧ Q ** 99",
        "1" * 31 + " + (1)",
        "(" * 3000,
        "1 + (" + "-" * 4000 + "1)",
        "a" * (MAX_CHARACTERS + 1),
    ],
)
def test_programs_and_towers_are_not(answer: str) -> None:
    begin = time.monotonic()
    assert not harmless(answer)
    assert time.monotonic() - begin < 10


@given(st.text(alphabet="09ax_+-*/^()[]{}<>.,'\"! \n", max_size=60))
def test_every_accepted_answer_is_evaluated_at_once(answer: str) -> None:
    if not harmless(answer):
        return
    begin = time.monotonic()
    try:
        found = eval(answer, {"__builtins__": {}}, {"a": 2, "x": 3})
    except Exception:
        return
    assert time.monotonic() - begin < 10
    assert len(str(found)) < 5000
