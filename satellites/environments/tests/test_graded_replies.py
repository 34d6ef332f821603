"""Replies with a known verdict: ours is right, and docs/graders.md has the agreement of public graders.

`python benchmarks/graders.py` records the others' verdicts. `right` was set when each reply was written.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from trinity.environments.scorers import SCORERS, ScoreItem

pytestmark = pytest.mark.core

REPLIES = [json.loads(line) for line in Path(__file__).with_name("graded_replies.jsonl").read_text().splitlines()]
CATEGORIES = sorted({reply["category"] for reply in REPLIES})


def metrics_of(reply: dict[str, Any], scorer: str = "accuracy_reward") -> dict[str, float]:
    item = ScoreItem(reply.get("prompt", ""), reply["response"], reply["truth"], {}, reply.get("truncated", False))
    metrics: dict[str, float] = SCORERS[scorer](item, {}).metrics  # type: ignore[operator]
    return metrics


@pytest.mark.parametrize("category", CATEGORIES)
def test_right_replies_are_right_and_wrong_ones_wrong(category: str) -> None:
    mine = [reply for reply in REPLIES if reply["category"] == category]
    verdicts = [(reply["response"], reply["truth"], bool(metrics_of(reply)["accuracy"])) for reply in mine]
    assert verdicts == [(reply["response"], reply["truth"], reply["right"]) for reply in mine]


REFERENCES = r"""positive Paris 2\sqrt{3} x^2+1 (1,~2) [0,~1) {1,~2} 3~+~4i 2x+1 sqrt(2) 2^{10} 3:30~PM 2021-03-04 C3H8
SELECT~1 New~York AB left 1,~2 f(x)=2x a/b $x+1$ 5~km/h 192.168.1.1 +1~555~0100 v1.2.3 -1/2 1~1/2 100~-~5 7~R~2
3/4~cup x~=~1~or~x~=~2 (-\infty,~3] 10~and~20 no [[4,~0]] e4e5 0012 March~4,~2021 ? I~am~not~sure."""

NO_ANSWERS = r"""2 <- \sqrt{2}
1 <- 2x+1
3 <- 2\sqrt{3}
2 <- (1, 2)
5 <- 100 - 5
95 <- 100 - 5
10 <- 2^10
30 <- 3:30
4 <- 3:4
4 <- 3 + 4i
2 <- 1, 2
20 <- 10 and 20
2 <- sqrt(2)
0100 <- +1 555 0100
3 <- -\infty < x < 3
2 <- The solutions are 1 and 2.
2 <- The point is (1, 2).
1 <- So f(x) = 2x+1.
3 <- So y = 3x.
2 <- x = 1, y = 2
8 <- C3H8
30 <- It is at 3:30 PM
5 <- He has 3-5 apples
14 <- He pays 3 * $14 = $42 for it.
positive <- negative
positive <- <think>positive"""

ANSWERS = r"""positive <- Positive.
(1, 2) <- The point is (1, 2).
2x + 1 <- So the derivative is 2x+1.
\sqrt{12} <- So it is 2\sqrt{3}.
[0,2) <- The interval is [0, 2).
\frac{3}{2} <- Thus x = 3 / 2
42 <- That's 42.
42 <- He pays 3 * $14 = $42 for it.
42 <- 所以小明有42个苹果
42 <- Total — 42
42 <- Step 3: 42
42 <- Of the 50, 42 are left
42 <- **Total:** $42
42 <- 84 - 42 = 42 😊
42 <- x + 1 = 43 → x = 42
42 <- 42 m^2
42 <- The area is 42 cm^2.
42 <- So 2x = 84, x = 42
42 <- 50 - 3 - 5 = 42; 42 / 1 = 42
42 <- a = 2, b = 40, a + b = 42
42 <- 84/4 = 21; 21+21 = 42
x=1, y=2 <- So x = 1, y = 2
42 <- It moves at 42 m/s.
42 <- Janet makes 6 * 7 = $<<6*7=42>>42 every day
42 <- So 6*7=<<6*7=42>>42
42 <- (1) 42
42 <- The angle is 42^{\circ}.
10^6 <- It is 1 \times 10^6
42 <- It is a 42.
42 <- > 42
1234567 <- 1 234 567
3.14 <- 22/7 ≈ 3.14"""


@pytest.mark.parametrize(
    "truth", dict.fromkeys([r["truth"] for r in REPLIES] + [one.replace("~", " ") for one in REFERENCES.split()])
)
def test_a_reply_that_is_its_reference_is_right(truth: str) -> None:
    for reply in (truth, f"<think>7?</think>\n{truth}\n"):
        for prompt in ("", f"What is meant by {truth}?"):
            found = metrics_of({"response": reply, "truth": truth, "prompt": prompt})
            assert found == {"accuracy": 1, "answered": 1}


def test_a_reply_that_reached_its_limit_is_not_its_reference() -> None:
    assert metrics_of({"response": "positive", "truth": "positive", "truncated": True})["answered"] == 0


@pytest.mark.parametrize("line", NO_ANSWERS.splitlines())
def test_a_part_of_an_expression_is_no_answer(line: str) -> None:
    truth, response = line.split(" <- ")
    assert metrics_of({"response": response, "truth": truth})["accuracy"] == 0


@pytest.mark.parametrize("line", ANSWERS.splitlines())
def test_the_expression_that_ends_a_reply_is_its_answer(line: str) -> None:
    truth, response = line.split(" <- ")
    assert metrics_of({"response": response, "truth": truth})["accuracy"] == 1


def test_no_scorer_takes_a_wrong_reply_for_right() -> None:
    for reply in REPLIES:
        if not reply["right"]:
            for scorer in ("math_dapo_reward", "math_boxed_reward", "math_reward"):
                found = metrics_of(reply, scorer)["accuracy"]
                assert not found or (scorer == "math_boxed_reward" and "Corrected" in reply["response"]), reply


def test_the_page_has_the_agreement_of_each_grader(repository: Path) -> None:
    graders = list(REPLIES[0]["verdicts"])
    sizes = Counter(reply["category"] for reply in REPLIES)
    right = {name: Counter(r["category"] for r in REPLIES if r["verdicts"][name] == r["right"]) for name in graders}
    lines = [
        f"| {category} | {sizes[category]} | {sizes[category]} | "
        + " | ".join(str(right[name][category]) for name in graders)
        + " |"
        for category in CATEGORIES
    ]
    totals = [len(REPLIES), len(REPLIES), *(right[name].total() for name in graders)]
    false = [sum(r["verdicts"][name] and not r["right"] for r in REPLIES) for name in graders]
    lines.append(f"| all | {' | '.join(map(str, totals))} |")
    lines.append(f"| wrong replies taken for right | | 0 | {' | '.join(map(str, false))} |")
    page = (repository / "docs/graders.md").read_text()
    table = re.search(r"\| replies \|.*\n\|.*\n((?:\|.*\n)+)", page)
    assert table is not None and table[1].splitlines() == lines


@pytest.mark.parametrize(
    ("response", "answered"),
    [("\\boxed{41}", 1), ("Answer: 41", 1), ("It is 41.", 1), ("I give up.", 0), ("", 0), ("\\boxed{}", 0)],
)
@pytest.mark.parametrize("scorer", ["accuracy_reward", "math_reward"])
def test_no_answer_is_told_from_a_wrong_one(scorer: str, response: str, answered: float) -> None:
    found = metrics_of({"response": response, "truth": "42"}, scorer)
    assert (found["accuracy"], found["answered"]) == (0, answered)


def test_scorers_of_one_form_count_replies_of_other_forms_as_unanswered() -> None:
    assert metrics_of({"response": "Answer: 42", "truth": "42"}, "math_boxed_reward")["answered"] == 0
    assert metrics_of({"response": "It is 42.", "truth": "42"}, "math_dapo_reward")["answered"] == 0
    assert metrics_of({"response": "\\boxed{42}", "truth": "42"}, "math_dapo_reward")["answered"] == 1
