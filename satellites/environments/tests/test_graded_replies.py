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
