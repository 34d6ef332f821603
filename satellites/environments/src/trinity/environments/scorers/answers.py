"""Finding the answer in a reply and comparing it with the reference."""

import re
from collections.abc import Callable
from fractions import Fraction

from trinity.environments.replies import between
from trinity.environments.scorers.verifier import Verifier, shared

_MAX_TEXT = 200_000
_MAX_ANSWER = 200
_MAX_OPEN_BOXES = 100
_MAX_COMPARED = 1000
_MAX_NESTED = 50
_SURELY_DIFFERENT = Fraction(1, 10_000)
_NUMBER = re.compile(r"[-+−]?(?:\d{1,9} \d{1,9}/\d+|(?:\d[\d,]*\.?\d*|\.\d+)(?:/\d+)?)", re.ASCII)
_PLAIN = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)", re.ASCII)
_FRACTION = re.compile(r"([-+]?\d+)/(\d+)", re.ASCII)
_MIXED = re.compile(r"([-+]?)(\d+) (\d+/\d+)", re.ASCII)
_THREE_DIGITS = re.compile(r"(?<![\d./])\d{1,3}(?: \d{3})+(?![\d/])", re.ASCII)
_TWO_NUMBERS = re.compile(r"\d \d", re.ASCII)
_IN_LATEX = re.compile(r"\\(?:text|mathrm|mathbf)\{([^{}]*)\}")
_WITH_UNIT = re.compile(r"(.*[\d}$.]) ([a-zA-Z]{2,})\.?", re.ASCII)
# Words that change the number in front of them.
_NO_UNIT = re.compile(
    "(?:dozen|hundred|thousand|million|billion|trillion|percent|pi|squared|cubed|factorial|half|halve|third|quarter"
    "|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth)s?"
)
_LATEX_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\s*(?:\{([-+]?\d+)\}\s*\{(\d+)\}|(\d)(\d))", re.ASCII)


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete \boxed{...}, braces balanced; None if the last hundred are all incomplete."""
    text = text[-_MAX_TEXT:]
    at = len(text)
    for _ in range(_MAX_OPEN_BOXES):
        at = text.rfind("\\boxed{", 0, at)
        if at == -1:
            return None
        begin = at + len("\\boxed{")
        depth = 1
        for index in range(begin, min(len(text), begin + 10 * _MAX_ANSWER)):
            depth += {"{": 1, "}": -1}.get(text[index], 0)
            if depth == 0:
                return text[begin:index].strip()
    return None


def reference_answer(truth: str) -> str:
    """The answer of a reference: what stands after `####` (GSM8K), in \\boxed{}, or all of it."""
    if "####" in truth:
        return truth.rsplit("####", 1)[1].strip()
    return last_boxed(truth) or truth.strip()


def answer_line(text: str) -> str | None:
    """Returns the text after the last `Answer:` on its line; None without one."""
    _, mark, rest = text.rpartition("Answer:")
    line = rest.split("\n", 1)[0].strip() if mark else ""
    return line or None


def final_answer(response: str) -> str | None:
    r"""The answer of a reply in the style of DAPO's: the last \boxed{} inside of <answer>, else <answer> itself, else
    \boxed{}, else what follows the last `Answer:`; never just the last number. None if nothing."""
    return _behind_thoughts(response, answer_line)


def given_answer(response: str) -> str | None:
    r"""The answer of a reply: the last \boxed{} inside of <answer>, else <answer> itself, else \boxed{}, else after
    `####`, else the last number. None if nothing."""
    return _behind_thoughts(response, _last_number)


def _behind_thoughts(response: str, unmarked: Callable[[str], str | None]) -> str | None:
    """Thoughts may mark an answer and reject it later: they count only where nothing behind them does."""
    response = response[-_MAX_TEXT:]
    for text in (response.rpartition("</think>")[2], response):
        marked = _marked_answer(text)
        found = unmarked(text) if marked is None else marked
        if found is not None:
            return found
    return None


def _marked_answer(text: str) -> str | None:
    tagged = between(text, "<answer>", "</answer>")
    return last_boxed(text) if tagged is None else last_boxed(tagged) or tagged.strip()


def _last_number(text: str) -> str | None:
    if "####" in text:
        after = text.rsplit("####", 1)[1].strip()
        return after.splitlines()[0].strip() if after else None
    numbers = _NUMBER.findall(text)
    return str(numbers[-1]) if numbers else None


def normalise(answer: str) -> str:
    """Removes parts without meaning: spaces, thousands separators, currency, percent, a final full stop, `x =`."""
    text = answer.strip().strip("$").replace("\\!", "").replace("\\,", "").replace("\\%", "").replace("\\$", "")
    text = _IN_LATEX.sub(r"\1", text)
    text = re.sub(r"^[a-zA-Z]\s*=\s*", "", text)
    text = re.sub(r"^\(([A-Za-z])\)$", r"\1", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", text, flags=re.ASCII)
    text = _thousands_joined(text.replace("$", "").replace("%", ""))
    # A space between two numbers has a meaning: 1 1/2 is not 11/2.
    return re.sub(r"(?<!\d) | (?!\d)", "", text, flags=re.ASCII).rstrip(".")


def _without_unit(text: str) -> str:
    found = _WITH_UNIT.fullmatch(" ".join(_IN_LATEX.sub(r"\1", text).split()))
    return found[1] if found and not _NO_UNIT.fullmatch(found[2].lower()) else text


def _thousands_joined(text: str) -> str:
    """Removes spaces between groups of three digits; other white space becomes one space."""
    return _THREE_DIGITS.sub(lambda found: found[0].replace(" ", ""), " ".join(text.split()))


def number(text: str) -> Fraction | None:
    """The exact value of a normalised integer, decimal, fraction or mixed number; None for anything else or beyond 200
    characters."""
    if len(text) > _MAX_ANSWER:
        return None
    latex = _LATEX_FRACTION.fullmatch(text)
    if latex:
        sign, top, bottom, digit_top, digit_bottom = latex.groups()
        text = f"{sign}{top or digit_top}/{bottom or digit_bottom}"
    if _PLAIN.fullmatch(text):
        return Fraction(text)
    mixed = _MIXED.fullmatch(text)
    if mixed and (part := number(mixed[3])) is not None:
        return (int(mixed[2]) + part) * (-1 if mixed[1] == "-" else 1)
    fraction = _FRACTION.fullmatch(text)
    if fraction and int(fraction[2]):
        return Fraction(int(fraction[1]), int(fraction[2]))
    return None


def same_answer(given: str, reference: str, verifier: Verifier | None = None) -> bool:
    """Compares two answers: plain numbers by their exact values, all others by math-verify.

    A number with a unit (`42 dollars`) is the number where the reference has none. Pairs that
    neither equal text nor exact numbers decide go to math-verify, which is a thousand times slower. `verifier`: None
    stands for this process's.
    """
    if len(given) > _MAX_COMPARED or not given.strip():
        return False
    given, reference = given.replace("−", "-"), reference.replace("−", "-")
    plain_reference = normalise(reference[:_MAX_COMPARED])
    plain_given = normalise(given if number(plain_reference) is None else _without_unit(given))
    if plain_given and plain_given == plain_reference:
        return True
    values = number(plain_given), number(plain_reference)
    if values[0] is not None and values[1] is not None:
        if values[0] == values[1]:
            return True
        # Percentages have two readings, and rounded decimals are near: those are math-verify's to decide.
        if "%" not in given + reference and abs(values[0] - values[1]) > _SURELY_DIFFERENT:
            return False
    if not _mathematical(given) or not _mathematical(reference):
        return False
    asked, answered = _for_math_verify(reference), _for_math_verify(given)
    if _TWO_NUMBERS.search(asked) or _TWO_NUMBERS.search(answered):
        return False  # math-verify would add them up
    return (verifier or shared(Verifier)).same(asked, answered)


def _for_math_verify(text: str) -> str:
    """Rewrites a mixed number as a sum, which math-verify reads."""
    return _MIXED.sub(r"\1(\2+\3)", _thousands_joined(text.strip().strip("$")))


def _mathematical(text: str) -> bool:
    """Tells if math-verify may read a text: one line of ASCII with moderate nesting."""
    plain = text.isascii() and text.strip().isprintable() and any(c.isalnum() for c in text)
    return plain and len(text) <= _MAX_COMPARED and max(text.count(c) for c in "({[") <= _MAX_NESTED
