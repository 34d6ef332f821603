"""Finding the answer in a reply and comparing it with the reference."""

import re
from fractions import Fraction

from trinity.environments.scorers.verifier import Verifier, shared

_MAX_TEXT = 200_000
_MAX_ANSWER = 200
_MAX_OPEN_BOXES = 100
_MAX_COMPARED = 1000
_MAX_NESTED = 50
_SURELY_DIFFERENT = Fraction(1, 10_000)
_NUMBER = re.compile(r"[-+]?(?:\d{1,9} \d{1,9}/\d+|(?:\d[\d,]*\.?\d*|\.\d+)(?:/\d+)?)", re.ASCII)
_PLAIN = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)", re.ASCII)
_FRACTION = re.compile(r"([-+]?\d+)/(\d+)", re.ASCII)
_MIXED = re.compile(r"([-+]?)(\d+) (\d+/\d+)", re.ASCII)
_THREE_DIGITS = re.compile(r"(?<![\d./])\d{1,3}(?: \d{3})+(?![\d/])", re.ASCII)
_TWO_NUMBERS = re.compile(r"\d \d", re.ASCII)
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


def last_tagged(text: str) -> str | None:
    """Content of the last complete <answer>...</answer>; None if there is none. Linear in the text's length."""
    close = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, max(close, 0))
    return text[begin + len("<answer>") : close].strip() if begin != -1 else None


def reference_answer(truth: str) -> str:
    """The answer of a reference: what stands after `####` (GSM8K), in \\boxed{}, or all of it."""
    if "####" in truth:
        return truth.rsplit("####", 1)[1].strip()
    return last_boxed(truth) or truth.strip()


def answer_line(text: str) -> str | None:
    """What follows the last `Answer:` on its line; None without one."""
    _, mark, rest = text[-_MAX_TEXT:].rpartition("Answer:")
    line = rest.split("\n", 1)[0].strip() if mark else ""
    return line or None


def given_answer(response: str) -> str | None:
    """The answer of a reply: \\boxed{}, else <answer>, else after `####`, else the last number. None if nothing."""
    response = response[-_MAX_TEXT:]
    boxed = last_boxed(response)
    if boxed is not None:
        return boxed
    tagged = last_tagged(response)
    if tagged is not None:
        return tagged
    if "####" in response:
        after = response.rsplit("####", 1)[1].strip()
        return after.splitlines()[0].strip() if after else None
    numbers = _NUMBER.findall(response)
    return str(numbers[-1]) if numbers else None


def normalise(answer: str) -> str:
    """Without what carries no meaning: spaces, thousands separators, currency, percent, a final full stop, `x =`."""
    text = answer.strip().strip("$").replace("\\!", "").replace("\\,", "").replace("\\%", "").replace("\\$", "")
    text = re.sub(r"\\(?:text|mathrm|mathbf)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"^[a-zA-Z]\s*=\s*", "", text)
    text = re.sub(r"^\(([A-Za-z])\)$", r"\1", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", text, flags=re.ASCII)
    text = _thousands_joined(text.replace("$", "").replace("%", ""))
    # A space between two numbers has a meaning: 1 1/2 is not 11/2.
    return re.sub(r"(?<!\d) | (?!\d)", "", text, flags=re.ASCII).rstrip(".")


def _thousands_joined(text: str) -> str:
    """Without spaces between groups of three digits; other white space becomes one space."""
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
    """Whether two answers are the same: plain numbers by their exact values, everything else as math-verify says.

    Only what neither equal text nor exact numbers decide goes to math-verify, which is a thousand times slower.
    `verifier`: by default that of this process.
    """
    if len(given) > _MAX_COMPARED or not given.strip():
        return False
    plain_given, plain_reference = normalise(given), normalise(reference[:_MAX_COMPARED])
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
    return (verifier or shared()).same(asked, answered)


def _for_math_verify(text: str) -> str:
    """As math-verify reads it: a mixed number as a sum."""
    return _MIXED.sub(r"\1(\2+\3)", _thousands_joined(text.strip().strip("$")))


def _mathematical(text: str) -> bool:
    """Whether math-verify may have something to say about it: one line of ASCII that is not nested beyond reason."""
    plain = text.isascii() and text.strip().isprintable() and any(c.isalnum() for c in text)
    return plain and len(text) <= _MAX_COMPARED and max(text.count(c) for c in "({[") <= _MAX_NESTED
