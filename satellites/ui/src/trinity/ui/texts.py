"""The words of the pages: English in the templates, other languages in texts/<language>.json, keyed by the English
text.

Texts that a run wrote, names of metrics, and messages of commands stay as they are.
"""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream

from trinity.reading.alarms import RULES, Alarm

ENGLISH = "en"
LANGUAGES = (ENGLISH, "zh")
_FOLDER = Path(__file__).parent / "texts"
_PUNCTUATION = re.compile(r"(^|</(?:a|b|code|small|span)>)([,;:.])(?: |(?=[<\\n])|$)")
_CHINESE = dict(zip(",;:.", "，；：。", strict=True))
# A field of a text, such as {share:.0%} of an alarm.
_FIELD = re.compile(r"\{(\w+)[^}]*\}")
# Texts of pages that hold a name or a number: each field is any text.
PATTERNS = (
    "dropped ({reason})", "attempt {attempt} failed", "sampled by {explorer}", "version {version} becomes LIVE",
    "{explorer} loads it", "of {last_step}", "bound {bound}",
)  # fmt: skip


class ChinesePunctuation(Extension):
    """Writes the punctuation of templates, which follows a value or an element, in Chinese."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        for token in stream:
            if token.type == "data":
                text = _PUNCTUATION.sub(lambda match: match[1] + _CHINESE[match[2]], token.value)
                token = Token(token.lineno, "data", text)
            yield token


def language(chosen: str, remembered: str, accepted: str) -> str:
    """Returns the first known language. `accepted`: the header Accept-Language, whose weights are not read."""
    wanted = [chosen, remembered, *(part.partition(";")[0].strip().partition("-")[0] for part in accepted.split(","))]
    return next((one for one in wanted if one in LANGUAGES), ENGLISH)


@cache
def catalogue(language: str) -> dict[str, str]:
    """Returns texts by their English text; empty for English."""
    return {} if language == ENGLISH else dict(json.loads((_FOLDER / f"{language}.json").read_text(encoding="utf-8")))


def functions(language: str) -> dict[str, Any]:
    """Returns the functions of templates: `_` for their own words, the others for words around a name or a number."""
    translated = catalogue(language)

    def own(text: str) -> str:
        return translated.get(text) or _filled(text, PATTERNS, translated)

    def of_alarm(alarm: Alarm) -> str:
        return _filled(alarm.text, (RULES[alarm.rule].text,), translated)

    found: dict[str, Callable[..., str]] = {"_": own, "alarm_text": of_alarm}
    return {**found, "lang": language}


def _filled(text: str, patterns: tuple[str, ...], translated: dict[str, str]) -> str:
    """Returns the translation of the first pattern that matches the text, with its values; else the text."""
    for pattern in patterns:
        if pattern in translated and (match := _expression(pattern).fullmatch(text)):
            return _FIELD.sub(lambda field, match=match: match[field[1]], translated[pattern])  # type: ignore[misc]
    return text


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    names = _FIELD.findall(pattern)
    parts = _FIELD.split(pattern)[::2]
    joined = "".join(f"{re.escape(part)}(?P<{name}>.*)" for part, name in zip(parts, names, strict=False))
    return re.compile(joined + re.escape(parts[-1]), re.DOTALL)
