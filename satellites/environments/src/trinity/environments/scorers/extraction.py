r"""Finds the answer in a reply. Forms, the first that the reply has: `<answer>`; the last of \boxed{}, `####` and
`Answer:`; "the answer is ..."; and, where the scorer allows it, the number or expression that ends the reply.

All of it is linear in a reply's last 200,000 characters.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_TEXT = 200_000
_MAX_BOX = 2000
_MOST_BOXES = 100
_MOST_MARKS = 20
_MAX_VALUE = 1000

FULL_WIDTH = {0xFF01 + offset: 0x21 + offset for offset in range(94)} | {0x3000: 0x20, 0x2212: 0x2D, 0x2013: 0x2D}
_TAG = re.compile(r"</?(?:think|answer)>", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])\s{0,9}")
_BARE_BOX = re.compile(r"[-+]?\$?\d[\d.,/]*(?:\\?%)?|\\[a-zA-Z][^$\n]{0,200}|[a-zA-Z](?![a-zA-Z])")
_BETWEEN_BOXES = re.compile(r"[\s$\\()*,;]*(?:(?:,|\bor\b|\band\b)(?: (?:maybe|perhaps|possibly))?)[\s$\\()*,;]*")
_LABEL = r"\b(?:answer|ans)\b(?:\s?\([^()\n]{0,40}\))?"
_COLON = re.compile(rf"{_LABEL}[\s*_`]{{0,6}}[:=]|答案\s?(?:是|为)?\s?:?|(?<!#)####(?!#)", re.IGNORECASE)
_HEADING = re.compile(
    r"^[ \t]*(?:#{1,6}|\*\*|__)[ \t*_]*(?:the )?(?:final )?answer[ \t]*(?:\*\*|__)?[ \t]*$",
    re.IGNORECASE | re.MULTILINE,
)
_PHRASE = re.compile(
    r"\b(?:answer|option|choice)\b[^.\n:?!]{0,60}?\b(?:is|are|equals)\b(?: (?:that|thus|therefore))?\s?:?",
    re.IGNORECASE,
)
_NO_VALUE = re.compile(
    r"(?:correct|right|wrong|incorrect|clear|unknown|unclear|as follows|given|found|obtained)\b", re.I
)
_REASON = re.compile(r",? (?:because|since)\b", re.IGNORECASE)
_SECTION = re.compile(r"(?:step|part|case|solution|conclusion|explanation|verification|question|problem)\b", re.I)
# Not behind the letter of a choice, "C. Paris"; nor the sign of a factorial within a formula.
_SENTENCE_END = re.compile(r"(?<![\s(*][A-Za-z])(?<!^[A-Za-z])[.!?](?=[\s*_]+[^\W\d]|[\s*_]*$)|。", re.MULTILINE)
_NUMBER = re.compile(
    r"(?<![a-zA-Z\d.])[-+]?(?:\d{1,9} \d{1,9}/\d+|(?:\d[\d,]*\.?\d*|\.\d+)(?:/\d+)?)(?![a-zA-Z]*\d)", re.ASCII
)
_FORMULA = re.compile(r"\$\$?([^$\n]{1,300})\$\$?|\\\((.{1,300}?)\\\)|\\\[(.{1,300}?)\\\]")
_PROSE = re.compile(r"(?<![\\a-zA-Z])(?!sin|cos|tan|log|ln|exp)[a-z]{2,}")
_BOLD = re.compile(r"\*\*([^*\n]{1,100})\*\*")
_CHOSEN = re.compile(r"\([A-J]\)|[^\W\d_]{1,40}(?:['’-][^\W\d_]{1,40})?", re.IGNORECASE)  # a choice, or one word
# Where the last sentence has one of these, its last number is no answer.
_DOUBT = re.compile(
    r"\b(?:n[o']t|\w+n['’]t|never|cannot|nor|or|either|between|unsure|unknown|wrong|incorrect|guess|if|suppose|let|assume|given"
    r"|at (?:least|most)|(?:more|less|fewer|greater|other) than)\b",
    re.IGNORECASE,
)  # fmt: skip
# Words before a number that is no result, and the last words of a sentence that was cut off.
_COUNTED = re.compile(
    r"\b(?:(?:step|part|case|question|problem|exercise|equation|figure|page|chapter|section)s?|number|by|add|subtract|from"
    r"|plus|minus|times|\d+,? and)\s?#?$",
    re.IGNORECASE,
)  # fmt: skip
_UNFINISHED = re.compile(
    r"(?:,|\b(?:and|or|but|so|then|the|an?|we|i|to|of|is|are|which|that|because|with|by|for|from|in|on|have|has|need|must"
    r"|now|next|let me|where|when|if|than|it))$",
    re.IGNORECASE,
)  # fmt: skip
_OPERATOR = re.compile(r"\s?(?:[+*/=×÷^<>]|-\s|\\times|\\cdot)")
_WORD = re.compile(
    r"(?<![\\a-zA-Z])(?:(?!(?:sin|cos|tan|log|ln|exp|sqrt|pi)(?![a-z]))[a-zA-Z]{2,}|[aI](?= \d))"
    r"|\b[a-z]\.[a-z]\.|(?<=[a-z])['’][a-z]{1,2}\b"
    "|[\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0400-\u1fff\u3040-\ud7ff]"
)
# What stands between the last word, or an equation, and a number that is no part of a longer expression; and after it.
_BEFORE = re.compile(
    r"(?:^[^\w+/^<>×÷√±∞≤≥≠∈-]*(?:- )?|^\s*\(?[\da-z]{1,2}[.)]\s|[=≈~→⇒]|[-=>]>|:\s|(?<!\d):"
    r"|\\(?:approx|to|implies|[rR]ightarrow)(?![a-z]))"
    r"[\s$€£¥#\"'“*_`({\[|\\]*$"
)
_AFTER = re.compile(r"(?:[^\w+\-*/=^<>×÷(\[{,&\\]|\\[^a-zA-Z]|\*\*)*+(?:[mgshLJNWVKCF][\s.!)$]*)?")
_LISTED = re.compile(r"\d[,;]\s[^()]*$")
_STEP_END = re.compile(r"[,;] ")
_ASSIGNED = re.compile(r"\s*[A-Za-z]\w? ?=")  # one of several values; other equations are steps to the last
_UNIT_POWER = re.compile(r"(\d ?(?:[mcdk]?m|in|ft|yd|mi))\^\{?[23]\}?(?!\d)")
_SUM = re.compile(r"[\d\s.(){}/+*×^-]*[\d)}]\s?[-+*×^][\d\s.(){}/+*×^-]*")


@dataclass(frozen=True)
class _Mark:
    """An answer and its place in the text."""

    place: int
    answer: str


def final_answer(response: str, prompt: str = "") -> str | None:
    """Returns the marked answer of a reply; None without one, or if the reply only repeats the prompt."""
    behind, thoughts = _parts(response, prompt)
    return _marked(behind) or _explicit(thoughts)


def given_answer(response: str, prompt: str = "", truncated: bool = False) -> str | None:
    """Returns the marked answer of a reply, else the number or expression that ends it, else None.

    truncated: the reply was cut off, so that its end is no answer.
    """
    behind, thoughts = _parts(response, prompt)
    return _marked(behind) or (None if truncated else _ending(behind)) or _explicit(thoughts)


def whole_reply(response: str) -> str:
    """Returns what stands behind a reply's thoughts."""
    return _parts(response, "")[0].strip()


def boxed_answer(response: str, prompt: str = "") -> str | None:
    r"""Returns the last \boxed{} of a reply, as `last_boxed`; None if the reply only repeats the prompt."""
    return None if _repeats(response[-MAX_TEXT:].strip(), prompt) else last_boxed(response)


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last complete \boxed{} or \fbox{} that has content, braces balanced.

    A box within a box belongs to the outer one. Boxes joined by a comma, "or" or "and" are one answer of several parts.
    Returns None if the last hundred boxes are incomplete or empty.
    """
    found = _last_box(text[-MAX_TEXT:].translate(FULL_WIDTH))
    return found.answer if found else None


def _parts(response: str, prompt: str) -> tuple[str, str]:
    """Returns the text behind the thoughts, and the thoughts. An unclosed <think> is a thought."""
    text = response[-MAX_TEXT:]
    if _repeats(text.strip(), prompt):
        return "", ""
    text = _TAG.sub(lambda found: found[0].lower(), text.translate(FULL_WIDTH))
    thoughts, closed, behind = text.rpartition("</think>")
    behind, opened, unfinished = behind.partition("<think>")
    return behind, thoughts + closed + opened + unfinished


def _repeats(reply: str, prompt: str) -> bool:
    """Tells if the reply is a good part of the prompt. Few-shot prompts may hold a short reply by chance."""
    return len(reply) >= 20 and 4 * len(reply) >= len(prompt) and reply in prompt


def _marked(text: str) -> str | None:
    explicit = _explicit(text, [_last_line(text)])
    if explicit is not None:
        return explicit
    for found in _last(_PHRASE, text):
        begin = max(text.rfind(end, 0, found.start()) for end in ".!?\n")
        value = _value(text, found.end())
        if value and not _DOUBT.search(text[begin + 1 : found.start()]):
            return value
    return None


def _explicit(text: str, others: "list[_Mark | None] | None" = None) -> str | None:
    """Returns <answer>, else the last of the boxes and of `others`. Thoughts mention answers in other forms."""
    _, opened, tagged = text.rpartition("<answer>")
    tagged = tagged.partition("</answer>")[0].strip() if opened else ""
    if tagged:
        return last_boxed(tagged) or (_marked(tagged) if len(tagged) <= _MAX_VALUE else None) or tagged
    marks = [mark for mark in (_last_box(text), *(others or [])) if mark is not None]
    return max(marks, key=lambda mark: mark.place).answer if marks else None


def _last_box(text: str) -> _Mark | None:
    boxes: list[tuple[int, int, str]] = []
    covered = 0
    for found in list(_BOX.finditer(text))[-_MOST_BOXES:]:
        if found.start() >= covered:
            end, content = _content(text, found.end())
            covered = max(covered, end)
            if content:
                boxes.append((found.start(), end, content))
    if not boxes:
        return None
    first, _, answer = boxes[-1]
    for place, end, content in reversed(boxes[:-1]):
        if first - end > 40 or not _BETWEEN_BOXES.fullmatch(text, end, first):
            break
        first, answer = place, f"{content}, {answer}"
    return _Mark(boxes[-1][0], answer)


def _content(text: str, begin: int) -> tuple[int, str]:
    """Returns the end of a box and its content; an incomplete box has none."""
    if text[begin : begin + 1] != "{":
        bare = _BARE_BOX.match(text, begin)
        return (bare.end(), bare[0].rstrip(".,")) if bare else (begin, "")
    depth, index = 0, begin
    while index < min(len(text), begin + _MAX_BOX):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return index + 1, text[begin + 1 : index].strip()
        index += 2 if text[index] == "\\" else 1
    return begin, ""


def _last_line(text: str) -> _Mark | None:
    """Returns what follows the last `Answer:`, heading `Answer` or `####` that has a value."""
    for found in sorted([*_last(_COLON, text), *_last(_HEADING, text)], key=lambda one: -one.start()):
        value = _value(text, found.end())
        if value and not (found[0].endswith("####") and _is_section(text, found.end(), value)):
            return _Mark(found.start(), value)
    return None


def _is_section(text: str, place: int, value: str) -> bool:
    """Tells if the line after `####` is a heading of Markdown, followed by its text."""
    line, _, below = text[place : place + MAX_TEXT].lstrip(" ").partition("\n")
    followed = bool(below.strip()) and not any(character.isdigit() for character in line)
    return bool(_SECTION.match(value)) or (followed and bool(line.strip()))


def _last(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    yield from reversed(list(pattern.finditer(text))[-_MOST_MARKS:])


def _value(text: str, place: int) -> str | None:
    """Returns the first sentence behind `place` with a letter or digit; None for a question."""
    for line in text[place : place + _MAX_VALUE].split("\n")[:6]:
        words = line.replace("**", "").replace("`", "").strip(" \t*_:=#>").lstrip("} ")
        if line.lstrip().startswith(("```", "\\begin")) or not any(character.isalnum() for character in words):
            continue
        end = _SENTENCE_END.search(words)
        sentence = _REASON.split(words[: end.start()] if end else words, maxsplit=1)[0]
        asked = end is not None and end[0] == "?"
        return None if asked or _NO_VALUE.match(sentence) else sentence
    return None


def _ending(text: str) -> str | None:
    """Returns the number or formula of the last sentence; a reply of one choice or of one word is the answer."""
    lines = [line for line in text.split("\n") if any(character.isalnum() for character in line)]
    if not lines:
        return None
    whole = text.strip().strip("*_`\"'.$ ")
    if _CHOSEN.fullmatch(whole):
        return whole
    line = lines[-1][-10 * _MAX_VALUE :].strip(" *_`").lstrip("> ")
    ends = [found.end() for found in _SENTENCE_END.finditer(line) if found.end() < len(line)]
    sentence = _UNIT_POWER.sub(r"\1", line[ends[-1] if ends else 0 :])
    if sentence.endswith("?") or _DOUBT.search(sentence) or _UNFINISHED.search(sentence):
        return None
    bold = [one for one in _BOLD.findall(sentence) if _NUMBER.search(one)]
    if len(bold) == 1:
        return str(bold[0])
    numbers = list(_NUMBER.finditer(sentence))
    formula = next((one for one in _last(_FORMULA, sentence) if not _PROSE.search(one[0])), None)
    if formula and not (numbers and numbers[-1].start() >= formula.end()):
        return next(part for part in formula.groups() if part)
    return _number(sentence, numbers[-1]) if numbers else None if _WORD.search(sentence) else _expression(sentence)


def _number(sentence: str, last: re.Match[str]) -> str | None:
    """Returns the last number of a sentence; if it is a part of the expression that ends the sentence, all of that."""
    if _COUNTED.search(sentence[: last.start()]):
        return None
    words = [found.end() for found in _WORD.finditer(sentence)]
    begin = max((end for end in words if end <= last.start()), default=0)
    before, behind = sentence[begin : last.start()], sentence[last.end() :]
    followed = bool(words) and words[-1] > begin
    listed, glued = _LISTED.search(before), begin > 0 and before.startswith(("-", "+", "/", "^"))
    if glued:
        return None
    alone = _BEFORE.search(before, max(0, len(before) - 60))
    if followed:
        return last[0] if (alone or listed) and not _OPERATOR.match(behind) else None
    return last[0] if alone and not listed and _AFTER.fullmatch(behind) else _expression(sentence[begin:])


def _expression(text: str) -> str | None:
    """Returns an expression without prose; None if it breaks off, or is a calculation without its result."""
    text = text.lstrip(" *_=:,;").rstrip(" *_.,;:")
    steps = _STEP_END.split(text)
    if all("=" in step for step in steps) and not all(map(_ASSIGNED.match, steps)):
        text = steps[-1]
    whole = 0 < len(text) <= _MAX_VALUE and text[-1] not in "+-*/=×÷^<>"
    return text if whole and not _BOX.search(text) and not _SUM.fullmatch(text) else None
