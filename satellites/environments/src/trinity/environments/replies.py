"""Parses the action in a policy's reply, in time linear in its length. No part of a reply is ever evaluated."""

import re
from dataclasses import dataclass
from enum import StrEnum

MAX_REPLY_CHARACTERS = 100_000
MAX_ACTION_CHARACTERS = 1_000
_MAX_BARE_CHARACTERS = 200
_JSON_ACTION = re.compile(r'"action"\s{0,20}:\s{0,20}"([^"\\\n]{1,1000})"')


class ReplyFormat(StrEnum):
    """The form of a reply."""

    STRICT = "strict"  # exactly one <think>...</think>, then exactly one <action>...</action>
    LENIENT = "lenient"  # the last <action>, else the last ``` block, else "action": "...", else a reply of one line
    PLAIN = "plain"  # all of the reply behind </think> is the action


@dataclass(frozen=True)
class Reply:
    """A parsed reply. `problem`: why there is no action in it; empty if there is one."""

    action: str = ""
    thought: str = ""
    problem: str = ""


def parse(text: str, form: str, tag: str = "action", max_characters: int = MAX_REPLY_CHARACTERS) -> Reply:
    """The action of a reply, spaces collapsed; `tag` is the action's tag. A reply that is too long has a problem."""
    if len(text) > max_characters:
        return Reply(problem=f"the reply has {len(text)} characters, at most {max_characters} are read")
    if form == ReplyFormat.STRICT:
        return _strict(text, tag)
    found = text.rpartition("</think>")[2] if form == ReplyFormat.PLAIN else _lenient(text, tag)
    if found is None:
        return Reply(thought=thought(text), problem=f"there is no <{tag}>...</{tag}> in the reply")
    return _reply(found, thought(text), tag)


def _strict(text: str, tag: str) -> Reply:
    marks = ("<think>", "</think>", f"<{tag}>", f"</{tag}>")
    places = [text.find(mark) for mark in marks]
    if any(text.count(mark) != 1 for mark in marks) or places != sorted(places):
        return Reply(problem=f"the reply must be one <think>...</think> followed by one <{tag}>...</{tag}>")
    return _reply(between(text, marks[2], marks[3]) or "", thought(text), tag)


def _lenient(text: str, tag: str) -> str | None:
    tagged = between(text, f"<{tag}>", f"</{tag}>")
    if tagged is not None:
        return tagged
    rest = text.rpartition("</think>")[2]
    fenced = between(rest, "```", "```")
    if fenced is not None:
        return fenced
    named = _JSON_ACTION.findall(rest)
    if named:
        return str(named[-1])
    bare = rest.strip()
    plain = bare and len(bare) <= _MAX_BARE_CHARACTERS and "\n" not in bare and "<" not in bare
    return bare if plain else None


def _reply(action: str, thought: str, tag: str) -> Reply:
    action = " ".join("".join(c if c.isprintable() else " " for c in action[: 2 * MAX_ACTION_CHARACTERS]).split())
    if not action:
        return Reply(thought=thought, problem=f"the <{tag}> is empty")
    if len(action) > MAX_ACTION_CHARACTERS:
        return Reply(thought=thought, problem=f"the <{tag}> is longer than {MAX_ACTION_CHARACTERS} characters")
    return Reply(action, thought)


def thought(text: str) -> str:
    """Returns the text in the first <think>...</think>; empty without one."""
    begin = text.find("<think>")
    end = text.find("</think>", max(begin, 0))
    return text[begin + len("<think>") : end].strip() if 0 <= begin < end else ""


def between(text: str, opening: str, closing: str) -> str | None:
    """Returns the text in the last complete pair of marks; None without one."""
    end = text.rfind(closing)
    begin = text.rfind(opening, 0, max(end, 0))
    return text[begin + len(opening) : end] if begin != -1 else None


def write(action: str, tag: str = "action", thought: str = "I know what to do.") -> str:
    """A reply in the strict format: what the oracles say."""
    return f"<think>{thought}</think><{tag}>{action}</{tag}>"
