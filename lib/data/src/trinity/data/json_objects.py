"""Reads JSON objects of other processes, with a limit on nesting that all readers support."""

import json
from typing import Any

from trinity.runtime.errors import InvalidInput

# json fails at about 1000 levels minus the caller's frames, so an object near that limit has readers that fail.
DEEPEST = 100


def json_object(text: str, name: str) -> dict[str, Any]:
    """The object in a text. Empty text is an empty object. Raises InvalidInput."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidInput(name, f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidInput(name, f"must be a JSON object, is {type(value).__name__}")
    if is_too_deep(text, value):
        raise InvalidInput(name, f"is nested more than {DEEPEST} deep")
    return value


def is_too_deep(text: str, value: Any) -> bool:
    """Returns True if a value is nested deeper than `DEEPEST`. `text` is its JSON."""
    if text.count("{") + text.count("[") <= DEEPEST:
        return False
    level = [value]
    for _ in range(DEEPEST):
        inside = (one.values() if isinstance(one, dict) else one for one in level)
        level = [child for children in inside for child in children if isinstance(child, dict | list)]
    return bool(level)
