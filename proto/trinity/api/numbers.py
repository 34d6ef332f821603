"""Checks numbers that users' code returns: rewards, metrics."""

from typing import Any

from trinity.api.errors import InvalidInput


def real_number(value: Any, field: str) -> float:
    """`value` as a float: of an int, a float, a bool, or a scalar of numpy or torch.

    Raises InvalidInput, which names `field`, for everything else. Text is refused also where it spells a number: a
    reward must not grow with the number that a policy writes.
    """
    try:
        if callable(item := getattr(value, "item", None)):  # of numpy or torch; an array of text holds a str
            value = item()
        if hasattr(value, "__float__") and not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # several elements; an integer beyond every float
        pass
    raise InvalidInput(field, f"is {value!r:.100}, must be a number")
