"""Messages of a chat as the text of observations, and a reply as a message."""

import json
from collections.abc import Sequence
from typing import Any

from trinity.runtime.errors import InvalidInput

_MAX_CALLS = 8  # of one reply
Messages = Sequence[dict[str, Any]] | str


def content(message: dict[str, Any]) -> str:
    """Returns the text of a message. Raises InvalidInput for images and sound: the policy reads only text."""
    found = message.get("content") or ""
    if isinstance(found, str):
        return found
    texts = []
    for part in found:
        if part.get("type") != "text":
            raise InvalidInput("prompt", f"holds a part of type {part.get('type')!r}; observations are text")
        texts.append(str(part["text"]))
    return "\n".join(texts)


def split_system(messages: Messages) -> tuple[str, Messages]:
    """The system prompt, and the other messages."""
    if isinstance(messages, str) or not messages or messages[0]["role"] != "system":
        return "", messages
    return content(messages[0]), messages[1:]


def shown(messages: Messages) -> str:
    """Joins messages into one text, with the role of every speaker unless all are the user."""
    if isinstance(messages, str):
        return messages
    if any(message["role"] == "assistant" for message in messages):
        return "\n\n".join(f"{message['role'].capitalize()}: {content(message)}" for message in messages)
    return "\n\n".join(_one(message) for message in messages)


def _one(message: dict[str, Any]) -> str:
    text = content(message)
    return f"<tool_response>\n{text}\n</tool_response>" if message["role"] == "tool" else text


def news(before: Messages, reply: dict[str, Any], after: Messages) -> str | None:
    """The text since the policy's last reply (`assistant`); None if `after` does not continue from there."""
    if isinstance(before, str) or isinstance(after, str):
        told = f"{before}{reply['content']}"
        return after[len(told) :] if isinstance(after, str) and after.startswith(told) else None
    at = len(before)
    if len(after) < at + 2 or list(after[:at]) != list(before) or after[at]["role"] != "assistant":
        return None
    return shown(after[at + 1 :]) if content(after[at]).strip() == reply["content"].strip() else None


def until_stop(reply: str, stops: Sequence[str]) -> str:
    """The reply up to the first text that ends it."""
    found = [at for stop in stops if (at := reply.find(stop)) >= 0]
    return reply[: min(found)] if found else reply


def has_replied(completion: Any) -> Messages:
    """The messages after the policy's last one."""
    if not isinstance(completion, list):
        return ""
    last = max((n for n, message in enumerate(completion) if message["role"] == "assistant"), default=-1)
    return completion[last + 1 :]


def assistant(reply: str, calls: bool) -> dict[str, Any]:
    """Turns a reply into an assistant's message. `calls`: reads <tool_call>{"name", "arguments"}</tool_call> in it.

    A call that cannot be parsed is kept as a call, so that the program with the tools reports the error.
    """
    parts = reply.split("<tool_call>")[1 : _MAX_CALLS + 1] if calls else []
    if not parts:
        return {"content": reply}
    made = [_call(part.partition("</tool_call>")[0], number) for number, part in enumerate(parts)]
    return {"content": reply.partition("<tool_call>")[0], "tool_calls": made}


def _call(text: str, number: int) -> dict[str, Any]:
    try:
        found = json.loads(text)
        name, arguments = str(found["name"]), json.dumps(found.get("arguments") or {})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        name, arguments = "", text.strip()
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
