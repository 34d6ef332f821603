"""Prompts as conversations, and reference answers. veRL's rows have a list of messages as prompt."""

import json
import math
from typing import Any

_ROLES = ("system", "user", "assistant")
_READ_LISTS = ("code_tests",)  # reward functions whose references are tests, all of which have to pass


def prompt_messages(value: list[Any]) -> list[dict[str, str]]:
    """The messages as {role, content}. Raises ValueError unless they end with a user's text."""
    found = []
    for number, message in enumerate(value):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in _ROLES or not isinstance(content, str):
            raise ValueError(f"has no role of {', '.join(_ROLES)} or no text as content in message {number}")
        found.append({"role": str(role), "content": content})
    if not found or found[-1]["role"] != "user" or not found[-1]["content"].strip():
        raise ValueError("must end with a user's message that has a text")
    return found


def prompt_text(value: list[Any]) -> str:
    """The joined contents, as the question for judges and reward functions. Raises ValueError."""
    return "\n\n".join(message["content"] for message in prompt_messages(value))


def reference_answers(value: Any) -> list[str]:
    """The texts of a reference answer: of a text or number, or of a list of right ones. Raises ValueError."""
    if isinstance(value, list) and value:
        return [text for one in value for text in reference_answers(one)]
    if isinstance(value, str):
        return [value]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        inner = f"; name a column inside of it, such as {next(iter(value))!r}" if isinstance(value, dict) else ""
        raise ValueError(f"is {value!r:.200}, must be text or a list of texts{inner}")
    return [json.dumps(value)]


def references_for(function: str, texts: list[str]) -> list[str]:
    """The references that a reward function gets one by one: each of several right answers, but tests all at once."""
    return [json.dumps(texts)] if function in _READ_LISTS and len(texts) > 1 else texts
