"""Maths answers: is the reply's answer the reference's?"""

import re
from typing import Any

from trinity.environments.scorers.answers import reference_answer, same_answer, same_text
from trinity.environments.scorers.extraction import boxed_answer, final_answer, given_answer, whole_reply
from trinity.environments.scorers.verifier import Matcher, shared
from trinity.runtime.errors import InvalidInput
from trinity.sdk.scoring import ScoreItem, ScoreResult

_THINK_THEN_ANSWER = re.compile(
    r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*", re.DOTALL
)
_FORMAT_REWARD = 0.1
_OPENING, _BETWEEN, _CLOSING = "<think>\n", "\n</think>\n<answer>\n", re.compile("\n</answer>$", re.MULTILINE)
_MOST_MATCHED = 100_000  # characters that a pattern of the YAML is tried on
_PENALTY_KEYS = ("penalty_factor", "max_response_length", "cache_length")


def _judged(answer: str | None, truth: str) -> dict[str, float]:
    """Returns `answered`, 1 if the reply has an answer, right or wrong, and `accuracy`."""
    right = answer is not None and same_answer(answer, reference_answer(truth))
    return {"accuracy": float(right), "answered": float(answer is not None)}


def _given(item: ScoreItem) -> dict[str, float]:
    if not item.truncated and same_text(whole_reply(item.response), reference_answer(item.truth)):
        return {"accuracy": 1.0, "answered": 1.0}
    return _judged(given_answer(item.response, item.prompt, item.truncated), item.truth)


def accuracy_reward(item: ScoreItem, args: dict[str, Any]) -> ScoreResult:
    """1 if the answer is right, else 0.

    The answer: the reply if it is the reference, else <answer>, else \\boxed{}, `####` or `Answer:`, else the last
    sentence's number or expression.
    """
    judged = _given(item)
    return ScoreResult(judged["accuracy"], judged)


def format_reward(item: ScoreItem, args: dict[str, Any]) -> ScoreResult:
    """0.1 if the reply is of Trinity-RFT's form, tags on lines of their own, else -0.1. The answer is not compared.

    args `pattern`: a regular expression in place of that form, which must match from the reply's beginning, within 3 s;
    `.` matches newlines, and `^` and `$` match at every line.
    """
    pattern = args.get("pattern")
    if pattern:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise InvalidInput(
                "args.pattern", f"is {pattern!r:.200}, which is no regular expression: {error}"
            ) from None
        matches = shared(Matcher).matches(pattern, item.response[:_MOST_MATCHED])
    else:
        matches = _tags_on_own_lines(item.response)
    form = _FORMAT_REWARD if matches else -_FORMAT_REWARD
    return ScoreResult(form, {"format_score": form})


def _tags_on_own_lines(response: str) -> bool:
    """Matches `^<think>\\n.*?\\n</think>\\n<answer>\\n.*?\\n</answer>$` in linear time."""
    middle = response.find(_BETWEEN, len(_OPENING)) if response.startswith(_OPENING) else -1
    return middle >= 0 and _CLOSING.search(response, middle + len(_BETWEEN)) is not None


def math_reward(item: ScoreItem, args: dict[str, Any]) -> ScoreResult:
    """Accuracy, plus 0.1 if the reply is <think>...</think><answer>...</answer> and minus 0.1 if it is not."""
    judged = _given(item)
    well_formed = len(item.response) <= 1_000_000 and bool(_THINK_THEN_ANSWER.fullmatch(item.response))
    form = _FORMAT_REWARD if well_formed else -_FORMAT_REWARD
    return ScoreResult(judged["accuracy"] + form, {**judged, "format_score": form})


def math_boxed_reward(item: ScoreItem, args: dict[str, Any]) -> ScoreResult:
    """1 if the last \\boxed{} is right, else 0. With args `with_think`: minus 0.1 without <think>...</think>."""
    judged = _judged(boxed_answer(item.response, item.prompt), item.truth)
    form = 0.0
    if _asked(args, "with_think"):
        opened, closed = item.response.find("<think>"), item.response.find("</think>")
        form = 0.0 if 0 <= opened < closed else -_FORMAT_REWARD
    return ScoreResult(judged["accuracy"] + form, {**judged, "format_score": form})


def math_dapo_reward(item: ScoreItem, args: dict[str, Any]) -> ScoreResult:
    """1 if the final answer is right, else 0; with args `enable_overlong_penalty` minus DAPO's penalty of long replies.

    The penalty (Yu et al. 2025, "DAPO", equation 13) of a response of n tokens, with L = `max_response_length`,
    C = `cache_length` and f = `penalty_factor`: 0 up to L - C, then f (n - (L - C)) / C, and f beyond L.
    """
    judged = _judged(final_answer(item.response, item.prompt), item.truth)
    penalty = 0.0
    if _asked(args, "enable_overlong_penalty"):
        factor, longest, cache = (_positive(args, key) for key in _PENALTY_KEYS)
        penalty = factor * min(max(item.response_tokens - (longest - cache), 0) / cache, 1)
    return ScoreResult(judged["accuracy"] - penalty, {**judged, "format_score": -penalty})


def _asked(args: dict[str, Any], key: str) -> bool:
    value = args.get(key, False)
    if value is not None and not isinstance(value, bool):  # the text "false" would be true
        raise InvalidInput(f"args.{key}", f"is {value!r}, must be true or false")
    return bool(value)


def _positive(args: dict[str, Any], key: str) -> float:
    value = args.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise InvalidInput(f"args.{key}", f"is {value!r}, must be a number > 0 when enable_overlong_penalty is true")
    return float(value)
