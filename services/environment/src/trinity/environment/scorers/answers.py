"""Finding the answer in a reply and comparing it with the reference: exact arithmetic on short strings."""

import re
from fractions import Fraction

_MAX_TEXT = 200_000
_MAX_ANSWER = 200
_MAX_OPEN_BOXES = 100
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:/\d+)?", re.ASCII)
_PLAIN = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)", re.ASCII)
_FRACTION = re.compile(r"([-+]?\d+)/(\d+)", re.ASCII)
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
    text = re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", text, flags=re.ASCII)
    return text.replace("$", "").replace("%", "").replace(" ", "").rstrip(".")


def number(text: str) -> Fraction | None:
    """The exact value of a normalised integer, decimal or fraction; None for anything else or beyond 200 characters."""
    if len(text) > _MAX_ANSWER:
        return None
    latex = _LATEX_FRACTION.fullmatch(text)
    if latex:
        sign, top, bottom, digit_top, digit_bottom = latex.groups()
        text = f"{sign}{top or digit_top}/{bottom or digit_bottom}"
    if _PLAIN.fullmatch(text):
        return Fraction(text)
    fraction = _FRACTION.fullmatch(text)
    if fraction and int(fraction[2]):
        return Fraction(int(fraction[1]), int(fraction[2]))
    return None


def same_answer(given: str, reference: str) -> bool:
    """Equal as numbers if both are, as text otherwise."""
    given, reference = normalise(given[:1000]), normalise(reference[:1000])
    values = number(given), number(reference)
    if values[0] is not None and values[1] is not None:
        return values[0] == values[1]
    return bool(given) and given == reference
