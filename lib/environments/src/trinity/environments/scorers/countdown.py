"""Countdown, one reply."""

import re
from typing import Any

from trinity.environments.countdown_rules import Puzzle
from trinity.environments.scorers.base import ScoreItem, ScoreResult

_ANSWER = re.compile(r"<answer>(.{0,400}?)</answer>", re.DOTALL)
_FORMAT_REWARD = 0.1


def countdown_reward(item: ScoreItem, args: dict[str, Any]) -> ScoreResult:
    """1 if the last <answer> solves the row's puzzle, 0.1 if there is an <answer>, else 0 (the TinyZero rule)."""
    puzzle = Puzzle.of(item.task)
    answers = _ANSWER.findall(item.response[-100_000:])
    if not answers:
        return ScoreResult(0.0, {"accuracy": 0.0, "format_score": 0.0})
    solved = not puzzle.judge(answers[-1].strip())
    return ScoreResult(1.0 if solved else _FORMAT_REWARD, {"accuracy": float(solved), "format_score": _FORMAT_REWARD})
