"""Compares an answer with the reference."""

import re
import unicodedata
from fractions import Fraction

from trinity.environments.scorers.extraction import FULL_WIDTH, last_boxed
from trinity.environments.scorers.verifier import Verifier, shared

_MAX_ANSWER = 200
_MAX_COMPARED = 1000
_MAX_NESTED = 50
_SURELY_DIFFERENT = Fraction(1, 10_000)
_PLAIN = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)", re.ASCII)
_POWER_OF_TEN = re.compile(r"([-+]?\d+(?:\.\d+)?)(?:[eE]|(?:\\times|\\cdot|×|\*)10\^)\{?([-+]?\d{1,3})\}?", re.ASCII)
_FRACTION = re.compile(r"([-+]?\d+)/(\d+)", re.ASCII)
_MIXED = re.compile(r"([-+]?)(\d+) (\d+/\d+)", re.ASCII)
_LATEX_MIXED = re.compile(r"(?<![\d.}])(\d+) ?\\frac\s*(?:\{(\d+)\}\s*\{(\d+)\}|(\d)(\d))", re.ASCII)
_LATEX_FRACTION = re.compile(r"([-+]?)\\frac\s*(?:\{([-+]?\d+)\}\s*\{(\d+)\}|(\d)(\d))", re.ASCII)
_THREE_DIGITS = re.compile(r"(?<![\d./])\d{1,3}(?: \d{3})+(?![\d/])", re.ASCII)
_TWO_NUMBERS = re.compile(r"(?<![\d_])\d+ \d", re.ASCII)  # but the base of a logarithm: \log_2 8
_IN_LATEX = re.compile(
    r"\\(?:text|mathrm|mathbf|textbf|textit|textrm|mathit|mathsf|texttt|textnormal|emph|underline|bm|boldsymbol|mbox"
    r"|operatorname|boxed|fbox)"
    r"\s?\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
)
_SPACING = re.compile(r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-z])|\\displaystyle|\\(?:left|right)(?![a-z])|\\[()\[\]]")
_COLOUR = re.compile(r"\\(?:text)?color\s?\{[a-zA-Z]{1,20}\}")
_VULGAR = re.compile("(\\d?)([\u00bc-\u00be\u2150-\u215e])", re.ASCII)  # ¼ to ⅞
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"
_RAISED = re.compile(f"[{_SUPERSCRIPTS}]+")
_ROOT = re.compile(r"√\s?(\d+|[a-zA-Z]|\([^()]{1,100}\)|\{[^{}]{1,100}\})", re.ASCII)
_SYMBOLS = {
    "π": "\\pi ", "∞": "\\infty ", "×": "\\times ", "·": "\\cdot ", "÷": "/", "±": "\\pm ", "≤": "\\le ", "≥": "\\ge ",
    "≠": "\\ne ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset ",
}  # fmt: skip
_DEGREES = re.compile(
    r"(?:\^\s?\{?\s?\\circ\s?\}?|°|\\degree|(?<=\d) degrees?\b)"
    r"(?:\s?([CF])(?:elsius|entigrade|ahrenheit)?(?![a-zA-Z]))?",
    re.IGNORECASE,
)
_CHEERS = "".join(  # emoji behind an answer, but no crosses
    map(chr, (0x200D, *range(0x2700, 0x2715), *range(0x27A0, 0x27C0), 0x2B50, 0xFE0F, *range(0x1F300, 0x1FB00)))
)
_CURRENCIES = dict.fromkeys(c for c in range(0x80, 0xFFFF) if unicodedata.category(chr(c)) == "Sc")
_SIGNS = FULL_WIDTH | _CURRENCIES | {ord("¢"): " cents", ord("℃"): "°C", ord("℉"): "°F"}
_PERCENT = re.compile(r"\s?\bper ?cent\b|\\%")
_BASE = re.compile(r"\d_")
_NAME = re.compile(r"(?:[a-zA-Z]|\([a-zA-Z](?:, ?[a-zA-Z])*\))\s?(?:=|≈|\\approx|\\in(?![a-z]))\s?")
# A word of another alphabet, or up to four signs without spaces; but no words for a multiple, "or more" and the like.
_FOREIGN_WORD = "(?!(?:тыс|млн|млрд|милли|полов|или|не))[a-zA-Z]*[À-ÖØ-öø-ɏа-яёА-ЯЁ][a-zA-ZÀ-ÖØ-öø-ɏа-яёА-ЯЁ]{0,12}"
_FOREIGN_SIGNS = (
    "(?!이상|이하|미만|초과)"
    "(?:(?!千(?![米克瓦])|[一二三四五六七八九十百万萬亿億兆零半几多余以未超不或非成折만억천백십조])[\u3040-\ud7ff]){1,4}"
)
_POWER = r"(?:\^?\{?[23²³]\}?)?"
_UNIT = re.compile(
    rf"(.*[0-9}}$.%])( ?)((?:[a-zA-Z]{{2,}}|[mgshLJNWVKCFAT]|°[CF]|[kM]?(?:\\Omega|[\u03a9\u2126])){_POWER}"
    rf"(?:/[a-zA-Z]{{1,9}}{_POWER})?|{_FOREIGN_WORD}{_POWER}(?:/{_FOREIGN_WORD})?|{_FOREIGN_SIGNS}(?:/{_FOREIGN_SIGNS})?)\.?"
)
_FOREIGN_END = re.compile(rf"(?<=[0-9}})π²³]) ?(?:°[CF]|{_FOREIGN_WORD}|{_FOREIGN_SIGNS}){_POWER}$")
# Units by their names, the first of which stands for all. Only these may stand right behind a number: 3xy is no 3.
_UNITS = {
    name: names.split()[0]
    for names in """s sec second 秒|ms millisecond|min minute 分钟|h hr hour 小时 ч час|day 天|week wk|month|year yr 年
    dollar usd|cent|euro eur|pound lb|yuan rmb cny 元|yen jpy 円|won krw 원|ruble rub руб
    mm millimeter millimetre мм|cm centimeter centimetre 厘米 см|m meter metre 米 м|km kilometer kilometre 千米 公里 км
    in inch inche|ft foot feet|yd yard|mile mi|mg milligram|g gram г 克|kg kilogram кг 千克|oz ounce|ton tonne
    ml milliliter millilitre|l liter litre|gal gallon|kb kilobyte|mb megabyte|gb gigabyte|tb terabyte
    kwh|w watt|kw kilowatt|mw|hz hertz|khz|mhz|ghz|pa|kpa|mol mole|kj|rad radian|n newton|j joule|v volt|a amp ampere
    km/h kmh kph|mile/h mph|°c c celsius|°f f fahrenheit|k kelvin|st nd rd th""".replace("\n", "|").split("|")
    for name in names.split()
}
_PRODUCT = re.compile(r"\d(?:[a-zA-Z](?![a-zA-Z\d+-])|mg\b)", re.ASCII)  # 3m^2 of a reference may be of a variable m
_UNIT_WORD = r"°?[^\W\d_]+"
# Words that change the number beside them, or say that it is not the answer.
_NO_UNIT = (
    "(?:dozen|hundred|thousand|million|billion|trillion|pi|squared|cubed|factorial|half|halve|third|quarter|fourth|fifth"
    "|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth)s?"
)
_NO_SENTENCE = re.compile(
    rf"\b(?:{_NO_UNIT}|or|nor|not|no|never|cannot|wrong|incorrect|either|between|unsure|unknown|plus|minus|times|over"
    r"|mod|divided|root|log|ln|exp|sin|cos|tan|sqrt|power|if|maybe|perhaps|at (?:least|most)"
    r"|(?:more|less|fewer|greater|other|smaller|larger) than|up to|n['’]t)\b|n['’]t\b|[\\^_+*/<>≤≥√|{}=≠?](?!\d)",
    re.IGNORECASE,
)  # fmt: skip
_HEDGE = re.compile(
    r"\b(?:alternatively|also|instead|rather|actually|possibl[ey]|probably|may|might|could|should)\b", re.IGNORECASE
)
# Texts that are no number, though math-verify reads one: with a relation in front, 42?, 42+, 42...43, 42 (41, 43).
_NO_NUMBER = re.compile(
    r"^(?:[a-zA-Z] ?)?(?:[<>≤≥≠]|!=|\\(?:[lg]t|[lgn]eq?|[lg]eqslant|not)(?![a-z]))|[-+?]$|\d ?(?:\.\.|…|\\[lc]?dots)"
    r"|\d \(\d+,",
    re.ASCII,
)
_DATE = re.compile(r"(?<![\w.])\d{1,4}([-/.])\d{1,2}\1\d{1,4}(?!\w)", re.ASCII)
_STANDING = re.compile(
    r"(?<![\w.^/*+\\{(,-])-?\$?(\d{1,9} \d{1,9}/\d+|\d[\d,]*\.?\d*(?:/\d+)?|\.\d+)%?(?![\w^/*+\\{(-])", re.ASCII
)
_FUNCTIONS = "sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|infinity|inf|arcsin|arccos|arctan|frac|max|min|mod"
_PROSE = re.compile(rf"(?<![\\a-zA-Z])(?!(?:{_FUNCTIONS})(?![a-z]))[a-zA-Z]{{2,}}")
_WORDS = re.compile(r"[a-zA-Z' -]{2,}")
_VARIABLES = re.compile(r"[a-np-z]{2,3}")  # ab is ba; o is no variable, so that no is not on
_CHOICE = re.compile(
    r"(?:(?:option|choice|answer) )?"
    r"(?:\(([A-Ja-j])\)(?![a-z])|(?-i:([A-J]))(?:[.):](?!\w)| (?:[-–—:](?= )|(?=\())|$))[.:]?\s*(.*)",
    re.IGNORECASE | re.DOTALL,
)
_SECOND_CHOICE = re.compile(r"\([A-Ja-j]\)|\b[A-J](?:[.):](?:\s|$)|$)|^(?:or|and|nor)\b|^[,/&]")


def reference_answer(truth: str) -> str:
    """The answer of a reference: what stands after `####` (GSM8K), in \\boxed{}, or all of it."""
    if "####" in truth:
        return truth.rsplit("####", 1)[1].strip()
    return last_boxed(truth) or truth.strip()


def cleaned(text: str) -> str:
    """Removes markup: Markdown's emphasis, quotes, delimiters of formulas, LaTeX's fonts, boxes and spaces."""
    text = text.translate(_SIGNS).replace("\\!", "").replace("{,}", ",").replace("\\$", "$")
    text = re.sub(r"(?<=\d)\\,(?=\d)", "", text)
    text = _VULGAR.sub(lambda found: f"{found[1]} {unicodedata.normalize('NFKC', found[2])}".replace("⁄", "/"), text)
    text = _COLOUR.sub(" ", text).replace("\\varnothing", "\\emptyset")
    for _ in range(4):
        text = _IN_LATEX.sub(lambda found: f" {found[1]}", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", _SPACING.sub(" ", text))
    text = _PERCENT.sub("%", _DEGREES.sub(_temperature, re.sub(r"(?<![\w)])\*\*|\*\*(?![\w(])|`|[“”\"]", "", text)))
    text = " ".join(text.split()).lstrip("*_$ ").rstrip("*_$ .,;:")
    text = text.rstrip(_CHEERS + "*_$ .,;:") or text
    return re.sub(r"^(?:is|are|=|:|≈|\\approx) ?", "", text)


def _temperature(degrees: re.Match[str]) -> str:
    return f" °{degrees[1].upper()}" if degrees[1] else ""


def normalise(answer: str) -> str:
    """Removes parts without meaning: markup, spaces, thousands separators, currency, percent, `x =`."""
    text = _NAME.sub("", cleaned(answer), count=1) if _NAME.match(cleaned(answer)) else cleaned(answer)
    text = re.sub(r"^\(([A-Za-z])\)$", r"\1", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", text, flags=re.ASCII)
    text = _thousands_joined(text.replace("$", "").replace("%", ""))
    text = _LATEX_MIXED.sub(lambda found: f"{found[1]} {found[2] or found[4]}/{found[3] or found[5]}", text)
    # A space between two numbers has a meaning: 1 1/2 is not 11/2.
    return re.sub(r"(?<!\d) | (?!\d)", "", text, flags=re.ASCII).rstrip(".")


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
    if power := _POWER_OF_TEN.fullmatch(text):
        return Fraction(power[1]) * Fraction(10) ** int(power[2])
    mixed = _MIXED.fullmatch(text)
    if mixed and (part := number(mixed[3])) is not None:
        return (int(mixed[2]) + part) * (-1 if mixed[1] == "-" else 1)
    fraction = _FRACTION.fullmatch(text)
    if fraction and int(fraction[2]):
        return Fraction(int(fraction[1]), int(fraction[2]))
    return None


def quantity(text: str) -> tuple[Fraction, str] | None:
    """Returns the value of a cleaned number, and its unit or ""; None for anything else."""
    value = number(normalise(text))
    if value is not None:
        return value, ""
    found = _UNIT.fullmatch(_NAME.sub("", text, count=1) if _NAME.match(text) else text)
    if not found or re.fullmatch(_NO_UNIT, found[3].lower()):
        return None
    value, unit = number(normalise(found[1])), _unit(found[3])
    known = len(found[3]) > 1 and _is_known(unit)
    return (value, unit) if value is not None and (found[2] or known or not found[3].isascii()) else None


def _unit(text: str) -> str:
    """Returns one spelling of a unit: km/h for `kilometers/hour`, cm2 for `cm^{2}`."""
    text = unicodedata.normalize("NFKC", text.lower()).translate(dict.fromkeys(map(ord, "^{}")))
    return _UNITS.get(text) or re.sub(_UNIT_WORD, lambda word: _singular(word[0]), text)


def _is_known(unit: str) -> bool:
    return all(word in _UNITS for word in re.findall(_UNIT_WORD, unit))


def _dates(text: str) -> list[str]:
    return [found[0] for found in _DATE.finditer(text)]


def _singular(word: str) -> str:
    plain = word if word in _UNITS else word.rstrip("s")
    return _UNITS.get(plain, plain)


def _in_sentence(text: str) -> Fraction | None:
    """Returns the one number of a sentence that says nothing else about it, or what its one equation ends with."""
    _, equals, result = text.rpartition("=")
    if equals and text.count("=") == 1 and not re.search(r"\bor\b|\band\b|,(?!\d{3})", text):
        found = quantity(result.strip())
        return found[0] if found else _in_sentence(result)
    if not _PROSE.search(text) or _NO_SENTENCE.search(text):
        return None
    if remark := re.fullmatch(r"([^()]+) \(([^()]*)\)", text):
        if _HEDGE.search(remark[2]):
            return None
        text = f"{remark[1]} is"
    values = {number(normalise(found[0])) for found in _STANDING.finditer(text)}
    digits = sum(map(len, re.findall(r"\d+", text)))
    inside = sum(len(re.sub(r"\D", "", found[0])) for found in _STANDING.finditer(text))
    return values.pop() if len(values) == 1 and digits == inside else None


def _choice(text: str) -> tuple[str, str] | None:
    """Returns the letter of a choice and the text behind it; None for anything else, and for several choices."""
    found = _CHOICE.fullmatch(text)
    if not found or _SECOND_CHOICE.search(found[3]):
        return None
    return (found[1] or found[2]).upper(), found[3]


def same_text(given: str, reference: str) -> bool:
    """Tells if two texts differ at most in markup, white space and case."""
    plain = normalise(given).casefold() or given
    return bool(given) and (given == reference or plain == normalise(reference).casefold())


def same_answer(given: str, reference: str, verifier: Verifier | None = None) -> bool:
    """Compares two answers: choices by letter, plain numbers by their exact values, all others by math-verify.

    A number with a unit (`42 dollars`), or the only one of a sentence, is the number where the reference has no other
    unit. Pairs that neither equal text nor exact numbers decide go to math-verify, which is a thousand times slower.
    `verifier`: None stands for this process's.
    """
    if len(given) > _MAX_COMPARED:
        return False
    given, reference = cleaned(given), cleaned(reference[:_MAX_COMPARED])
    if not given or not normalise(given):
        return False
    chosen, right = _choice(given), _choice(reference)
    if chosen and right:
        silent = not chosen[1] or not right[1]
        return chosen[0] == right[0] and (silent or _same(chosen[1], right[1], verifier))
    if chosen and chosen[1]:
        given = chosen[1]
    elif right and right[1]:
        reference = right[1]
    return _same(given, reference, verifier)


def _same(given: str, reference: str, verifier: Verifier | None) -> bool:
    if normalise(given) == normalise(reference):
        return True
    if all(_WORDS.fullmatch(text) for text in (given, reference)):
        if given.casefold() == reference.casefold():
            return True
        if not _VARIABLES.fullmatch(given) or not _VARIABLES.fullmatch(reference):
            return False
    wanted, found = None if _PRODUCT.search(reference) else quantity(reference), quantity(given)
    if (wanted and _NO_NUMBER.search(given)) or (found and _NO_NUMBER.search(reference)):
        return False
    if _DATE.fullmatch(given) or _DATE.fullmatch(reference):
        return _dates(given) == _dates(reference)
    if wanted and not found and (value := _in_sentence(given)) is not None:
        found = value, wanted[1]
    if wanted and found:
        units = {unit for unit in (wanted[1], found[1]) if unit}
        short = min(map(len, units), default=0) < 3 and all(map(str.isascii, units))
        if len(units) > 1 and (short or all(map(_is_known, units))):
            return False
        if wanted[0] == found[0]:
            return True
        # Percentages have two readings, and rounded decimals are near: those are math-verify's to decide.
        if "%" not in given + reference and abs(wanted[0] - found[0]) > _SURELY_DIFFERENT:
            return False
    if (wanted and not found and _PROSE.search(given)) or bool(_BASE.search(given)) != bool(_BASE.search(reference)):
        return False
    asked, answered = _for_math_verify(reference), _for_math_verify(given)
    if not _mathematical(asked) or not _mathematical(answered):
        return False
    if _TWO_NUMBERS.search(asked) or _TWO_NUMBERS.search(answered):
        return False  # math-verify would add them up
    return (verifier or shared(Verifier)).same(asked, answered)


def _for_math_verify(text: str) -> str:
    """Rewrites signs of Unicode as LaTeX, and a mixed number as a sum; leaves out units that are not ASCII."""
    text = _ROOT.sub(r"\\sqrt{\1}", _FOREIGN_END.sub("", text))
    text = _RAISED.sub(lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}".replace("−", "-"), text)
    text = "".join(_SYMBOLS.get(character, character) for character in text)
    text = _LATEX_MIXED.sub(lambda found: f"{found[1]} {found[2] or found[4]}/{found[3] or found[5]}", text)
    return _MIXED.sub(r"\1(\2+\3)", _thousands_joined(text))


def _mathematical(text: str) -> bool:
    """Tells if math-verify may read a text: one line of ASCII with moderate nesting."""
    plain = text.isascii() and text.isprintable() and any(c.isalnum() for c in text)
    return plain and len(text) <= _MAX_COMPARED and max(text.count(c) for c in "({[") <= _MAX_NESTED
