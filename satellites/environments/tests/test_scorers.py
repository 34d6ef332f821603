"""Scoring functions: what counts as right, and bounded time on anything a policy may write."""

import asyncio
import json
import math
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity.environments.scorers import SCORERS, ScoreItem
from trinity.environments.scorers.answers import same_answer
from trinity.environments.scorers.extraction import given_answer, last_boxed
from trinity.runtime.errors import InvalidInput
from trinity.sdk.arena import Arena
from trinity.sdk.contract import Response, ScoreRequest

pytestmark = pytest.mark.core


def score(name: str, response: str, truth: str = "#### 42", task: dict[str, object] | None = None, **args: object):  # type: ignore[no-untyped-def]
    return SCORERS[name](ScoreItem("question", response, truth, task or {}), args)


@pytest.mark.parametrize(
    ("response", "truth", "reward"),
    [
        ("so it is 42", "#### 42", 1),
        ("4+1=5\n#### 42", "step\n#### 42", 1),
        ("#### 41 and 42", "#### 42", 0),
        ("\\boxed{42} not 43", "#### 42", 1),
        ("\\boxed{\\frac{1}{2}}", "0.5", 1),
        ("\\boxed{\\frac12}", "1/2", 1),
        ("<answer> 1,234 </answer>", "#### 1234", 1),
        ("<answer>1</answer> <answer>2</answer>", "#### 2", 1),
        ("$42.00", "#### 42", 1),
        ("x = 42.", "42", 1),
        ("-42", "#### 42", 0),
        ("nothing", "#### 42", 0),
        ("", "#### 42", 0),
        ("42000000000000000000000000000000000001", "42000000000000000000000000000000000000", 0),
        ("\\boxed{x^2}", "\\boxed{x^2}", 1),
        ("٤٢", "#### 42", 0),  # other digits are not ours
        ("<think>so \\boxed{41}? no</think><answer>42</answer>", "42", 1),
        ("<think>so <answer>41</answer>? no</think>It is 42.", "42", 1),
        ("<think>so \\boxed{42}</think>", "42", 1),
        ("\\boxed{41} <answer>\\boxed{42}</answer>", "42", 1),
        ("<answer>42 dollars</answer>", "42", 1),
        ("#### $42 dollars.", "42", 1),
        ("\\boxed{42 \\text{ dollars}}", "42", 1),
        ("\\boxed{42 dollars}", "41", 0),
        ("\\boxed{41 or 42}", "42", 0),
        ("\\boxed{42 or 43}", "42", 0),
        ("\\boxed{42 million}", "42", 0),
        ("\\boxed{3 halves}", "3", 0),
        ("\\boxed{−5}", "-5", 1),
        ("<answer>−5</answer>", "-5", 1),
        ("it is −5.", "-5", 1),
        ("\\boxed{-5}", "−5", 1),
        ("\\boxed{−\\sqrt{8}}", "-2\\sqrt{2}", 1),
        ("Answer: D (none of the above)", "D", 1),
        ("Answer: D (or E)", "D", 0),
    ],
)
def test_accuracy(response: str, truth: str, reward: float) -> None:
    assert score("accuracy_reward", response, truth).reward == reward


def test_a_box_in_the_thoughts_is_no_answer_where_one_follows() -> None:
    assert score("math_reward", "<think>\\boxed{41}?</think><answer>42</answer>").reward == pytest.approx(1.1)
    assert score("math_dapo_reward", "<think>\\boxed{41}?</think>\nAnswer: 42").reward == 1


def test_math_reward_adds_and_takes_a_tenth_for_the_form() -> None:
    assert score("math_reward", "<think>hm</think><answer>42</answer>").reward == pytest.approx(1.1)
    assert score("math_reward", "42").reward == pytest.approx(0.9)
    assert score("math_reward", "<think>hm</think><answer>1</answer>").reward == pytest.approx(0.1)
    assert score("math_reward", "<think><think></think><answer>42</answer>").reward == pytest.approx(0.9)


def test_math_boxed_reward_looks_at_the_box_alone() -> None:
    assert score("math_boxed_reward", "41 \\boxed{42}").reward == 1
    assert score("math_boxed_reward", "42").reward == 0
    assert score("math_boxed_reward", "\\boxed{42}", with_think=True).reward == pytest.approx(0.9)
    assert score("math_boxed_reward", "<think></think>\\boxed{42}", with_think=True).reward == 1


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<answer>(10-4)*4</answer>", 1),
        ("<answer>(10-4)*4=24</answer>", 1),
        ("<answer>(10-4)*4=25</answer>", 0.1),
        ("<answer>10+4+4</answer>", 0.1),
        ("<answer>24</answer>", 0.1),
        ("<answer>4**10</answer>", 0.1),
        ("<answer>__import__('os')</answer>", 0.1),
        ("<answer>4/(10-10)</answer>", 0.1),
        ("(10-4)*4", 0),
    ],
)
def test_countdown(response: str, reward: float) -> None:
    assert score("countdown_reward", response, task={"nums": [10, 4, 4], "target": 24}).reward == reward


@pytest.mark.parametrize(
    ("given", "reference", "same"),
    [
        ("1 1/2", "3/2", True),
        ("1 1/2", "1.5", True),
        ("-2 1/4", "-\\frac{9}{4}", True),
        ("-2 1/4", "-2.25", True),
        ("1 1/2", "11/2", False),
        ("5 1/2", "\\frac{11}{2}", True),
        ("1 1/2", "\\sqrt{9}/2", True),
        ("1 \\frac{1}{2}", "3/2", True),
        ("1\\frac{1}{2}", "11/2", False),
        ("3 4", "34", False),
        ("34", "3 4", False),
        ("3 4", "7", False),
        ("1 234 567", "1,234,567", True),
        ("1 234", "235", False),
        ("2020 100", "2020100", False),
        ("x + 1", "x+1", True),
        ("$ 1 1/2 $", "1 1/2", True),
    ],
)
def test_a_space_between_two_numbers_has_a_meaning(given: str, reference: str, same: bool) -> None:
    assert same_answer(given, reference) is same


def test_the_last_number_of_a_reply_may_be_a_mixed_one() -> None:
    assert given_answer("so it takes 1 1/2 hours") == "1 1/2"
    assert given_answer("of 12 there are 3/4") == "3/4"


HOSTILE = {
    "power tower": "<answer>9**9**9**9</answer>",
    "ten megabytes": "7" * 10_000_000,
    "open tags": "<answer>" * 100_000,
    "open boxes": "\\boxed{" * 100_000,
    "deep boxes": "\\boxed{" + "{" * 50_000,
    "open thoughts": "<think>" * 100_000,
    "parentheses": "<answer>" + "(" * 300 + "1" + ")" * 300 + "</answer>",
    "minus signs": "<answer>" + "-" * 290 + "1</answer>",
    "commas": "1" + "," * 1_000_000,
    "slashes": "1/" * 500_000,
    "control characters": "\x00\x1b[31m\u202e42" * 1000,
    "unicode digits": "④②٤٢" * 10_000,
    "stars": "1" + " *" * 100_000 + "x",
    "emoji": "1" + "✅" * 100_000,
    "fraction by zero": "\\boxed{1/0}",
    "long fraction": "\\boxed{" + "9" * 150 + "/" + "7" * 40 + "}",
}


@pytest.mark.parametrize("name", SCORERS)
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_replies_take_bounded_time(name: str, case: str) -> None:
    begin = time.process_time()
    result = score(name, HOSTILE[case], task={"nums": [1, 2], "target": 3, "tests": "pass"})
    assert time.process_time() - begin < 5
    assert math.isfinite(result.reward)


@pytest.mark.parametrize("name", SCORERS)
@given(response=st.text(max_size=300), truth=st.text(max_size=50))
@settings(max_examples=150, deadline=None)
def test_any_text_gets_a_finite_reward(name: str, response: str, truth: str) -> None:
    assert math.isfinite(score(name, response, truth, {"nums": [1, 2], "target": 3, "tests": "pass"}).reward)


@given(st.integers(-(10**9), 10**9), st.integers(1, 10**4))
def test_equal_numbers_are_equal_however_written(top: int, bottom: int) -> None:
    assert same_answer(f"{top}/{bottom}", f"\\frac{{{top}}}{{{bottom}}}")
    assert same_answer(f"{top:,}", str(top))
    assert same_answer(f"{top}.0", f"${top}$")


def test_boxes_may_nest() -> None:
    assert last_boxed("\\boxed{1} \\boxed{\\frac{1}{2}} \\boxed{") == "\\frac{1}{2}"
    assert given_answer("<answer>a<answer>b</answer>") == "b"


@pytest.mark.parametrize(
    "response",
    [
        "<think>\na\n</think>\n<answer>\nb\n</answer>",
        "<think>\n\n</think>\n<answer>\n\n</answer>\nand more",
        "<think>\na\n</think>\n<answer>\nb\n</answer> \n</think>\n<answer>\nc\n</answer>",
        "<think>\n</think>\n<answer>\nb\n</answer>",
        "<think>a</think>\n<answer>b</answer>",
        " <think>\na\n</think>\n<answer>\nb\n</answer>",
        "<think>\na\n</think>\n<answer>\nb</answer>",
        "<think>\na\n</think>\n<answer>\n</answer>",
        "<think>\na\n</think>\n<answer>\nb\n</answer>.",
        "",
    ],
)
def test_the_form_is_that_of_trinity_rfts_pattern(response: str) -> None:
    pattern = r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$"
    expected = 0.1 if re.match(pattern, response, re.DOTALL | re.MULTILINE) else -0.1
    assert score("format_reward", response).reward == expected
    assert score("format_reward", response, pattern=pattern).metrics == {"format_score": expected}


def test_a_pattern_is_the_yamls_and_the_form_is_read_in_linear_time() -> None:
    assert score("format_reward", "a 7", pattern=r".*\d$").reward == 0.1
    with pytest.raises(InvalidInput, match=r"args.pattern: is '\(', which is no regular expression"):
        score("format_reward", "a", pattern="(")
    begin = time.process_time()
    score("format_reward", "<think>\n" + "\n</think>\n<answer>\n" * 50_000)
    assert time.process_time() - begin < 5


async def test_a_pattern_that_takes_for_ever_ends_and_stops_nothing_else() -> None:
    arena = Arena(scorers={"format_reward": SCORERS["format_reward"]})
    pattern = r"^<think>(.|\n)*</think>\s*<answer>(.|\n)*</answer>$"
    items = [Response(response="<think>\n" + "a line\n" * lines) for lines in (27, 1)]
    items.append(Response(response="<think>a</think><answer>b</answer>"))
    request = ScoreRequest("format_reward", items, json.dumps({"pattern": pattern}))
    scoring = asyncio.create_task(arena.score(request))
    longest, last = 0.0, time.monotonic()
    while not scoring.done():
        await asyncio.sleep(0.05)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    assert longest < 2
    assert [round(one.reward, 3) for one in await scoring] == [-0.1, -0.1, 0.1]
    await arena.drain(1)


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        ("The answer is 3½.", "3.5", True),
        ("The answer is 3½.", "31/2", False),
        ("\\boxed{¾}", "\\frac{3}{4}", True),
        ("\\boxed{½}", "2", False),
        ("\\boxed{5√2}", "\\sqrt{50}", True),
        ("\\boxed{√(x+1)}", "\\sqrt{1+x}", True),
        ("\\boxed{√2}", "2", False),
        ("\\boxed{4π/2}", "2\\pi", True),
        ("\\boxed{x³ − x²}", "x^3-x^2", True),
        ("\\boxed{x²}", "x^3", False),
        ("\\boxed{x⁻¹}", "1/x", True),
        ("\\boxed{x ≤ 5}", "x \\leq 5", True),
        ("\\boxed{x ≤ 5}", "x \\geq 5", False),
        ("\\boxed{(−∞, 4)}", "(-\\infty,4)", True),
        ("\\boxed{\\log_3 81}", "4", True),
        ("\\boxed{2 8}", "10", False),
        ("\\boxed{\\color{blue}{17}}", "17", True),
        ("\\boxed{\\textcolor{red}{-4}}", "-4", True),
        ("\\boxed{\\underline{9}}", "9", True),
        ("\\boxed{\\boldsymbol{k+1}}", "1+k", True),
        ("\\boxed{\\varnothing}", "\\emptyset", True),
        ("\\boxed{∅}", "\\varnothing", True),
    ],
)
def test_signs_of_unicode_and_colours_mean_what_latex_writes(response: str, truth: str, right: bool) -> None:
    assert score("accuracy_reward", response, truth).reward == right


UNITS = r"""42cm 42kg 42km 42ml 42mph 42km/h 42m^2 42cm² 42hours 42hrs 42USD 42nd 42~C 42~K 42~F 42~A 42~°C 42°C 42℃
42^\circ~C 42\,^\circ\mathrm{C} 42~degrees~Celsius 42~\Omega 42~kΩ 42元 42~元 42\text{元} 42个 42人 42円 42원
42~см 42~руб 42~días ₹42 ₩42 42¢
￥42 **42**~✅ 42~🎉"""


@pytest.mark.parametrize("given", UNITS.split())
def test_a_number_with_a_unit_is_the_number(given: str) -> None:
    given = given.replace("~", " ")
    for reply in (f"\\boxed{{{given}}}", f"The answer is {given}.", f"答案：{given}"):
        assert score("accuracy_reward", reply, "42").reward == 1
        assert score("accuracy_reward", reply, "41").reward == 0


@pytest.mark.parametrize(
    ("given", "reference", "same"),
    [
        ("25", "25 °C", True),
        ("25 degrees Celsius", "25 °C", True),
        ("25^\\circ\\text{C}", "25 ℃", True),
        ("25 °F", "25 °C", False),
        ("25 K", "25 °C", False),
        ("42 hours", "42 h", True),
        ("42 m²", "42 m^{2}", True),
        ("42 m^3", "42 m^2", False),
        ("42 km", "42 cm", False),
        ("5 hours", "5 minutes", False),
        ("5 weeks", "5 days", False),
        ("5 dollars", "5 cents", False),
        ("5 miles", "5 kilometers", False),
        ("5 grams", "5 kilograms", False),
        ("5 km per hour", "5 km/h", True),
        ("5 kilometers/hour", "5 km/h", True),
        ("5 apples", "5 pieces", True),
        ("5元", "5 yuan", True),
        ("42 meters", "42m", True),
        ("5 N", "5 newtons", True),
        ("5 MB", "5 megabytes", True),
        ("42千克", "42 kg", True),
        ("42公里/小时", "42 km/h", True),
        ("42 км/ч", "42", True),
        ("42平方厘米", "42", True),
        ("42千元", "42", False),
        ("\\sqrt{12}元", "2\\sqrt{3}", True),
        ("\\sqrt{12}", "2√3 см²", True),
        ("2\\sqrt{3}^\\circ C", "\\sqrt{12}", True),
        ("\\sqrt{12}以上", "2\\sqrt{3}", False),
        ("100000", "1e5", True),
        ("0.0015", "1.5e-3", True),
        ("3xy", "3", False),
        ("6abc", "6xyz", False),
        ("3", "3m^2", False),
        ("2", "2mg", False),
        ("42万", "42", False),
        ("42以上", "42", False),
        ("42 млн", "42", False),
        ("42π", "42", False),
        ("42 ❌", "42", False),
        ("♥", "♠", False),
        ("🍎", "🍌", False),
        ("🍎", "🍎", True),
    ],
)
def test_units_are_told_from_variables_multiples_and_other_units(given: str, reference: str, same: bool) -> None:
    assert same_answer(given, reference) is same


@pytest.mark.parametrize(
    ("given", "reference", "same"),
    [
        ("YES", "Yes", True),
        ("NO", "no", True),
        ("\\text{yes}", "YES", True),
        ("BAC", "ABC", False),
        ("GOD", "DOG", False),
        ("AM", "MA", False),
        ("on", "no", False),
        ("Nan", "Ann", False),
        ("ba", "ab", True),
        ("ac", "ab", False),
    ],
)
def test_short_words_are_compared_as_words(given: str, reference: str, same: bool) -> None:
    assert score("accuracy_reward", f"Answer: {given}", reference).reward == same
    assert score("math_boxed_reward", f"\\boxed{{{given}}}", reference).reward == same


WRONG = r"""≥~42 ≠~42 >~42 >42 >=~42 <~42~apples \ge~42 \le~42 \neq~42 k\ge42 42? 42+ 42- 42~(43~is~also~possible)
42~(alternatively~43) 42~(also~forty-three) 42~(may~differ) 42~(41,~43) 42...43 42…43 42~\ldots~43"""


@pytest.mark.parametrize("given", WRONG.split())
def test_a_relation_a_range_or_a_hedge_is_no_number(given: str) -> None:
    given = given.replace("~", " ")
    assert score("math_boxed_reward", f"\\boxed{{{given}}}", "42").reward == 0
    assert not same_answer("42", given)
    assert same_answer(given, given)


@pytest.mark.parametrize(
    ("given", "reference", "same"),
    [
        ("x \\ge 42", "x ≥ 42", True),
        ("x \\ge 42", "x > 42", False),
        ("42 (forty-two)", "42", True),
        ("42 apples (in total)", "42", True),
        ("42 (21 twice)", "42", True),
        ("42 (actually 43)", "42", False),
        ("2024-05-01", "2024-01-05", False),
        ("2018", "2024-01-05", False),
        ("2024-01-05", "2018", False),
        ("4/3/2024", "3/4/2024", False),
        ("The date is 2024-01-05", "2024-01-05", True),
        ("10-3", "7", True),
    ],
)
def test_relations_remarks_and_dates_are_compared(given: str, reference: str, same: bool) -> None:
    assert same_answer(given, reference) is same
