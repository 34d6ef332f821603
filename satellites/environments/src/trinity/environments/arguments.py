"""Reads arguments of the YAML and fields of a dataset row, by name and kind. Unknown names are refused."""

import difflib
from collections.abc import Sequence
from typing import Any

from trinity.runtime.errors import InvalidInput


class Arguments:
    """One mapping, read field by field; `finish` then refuses the names that no reader knew."""

    def __init__(self, values: dict[str, Any], where: str = "args") -> None:
        self.values = values
        self._where = where
        self._known: set[str] = set()

    def __contains__(self, name: str) -> bool:
        self._known.add(name)
        return self.values.get(name) not in (None, "")

    def get(self, name: str, default: Any) -> Any:
        """Returns the value; null and empty text count as absent: a row often has columns that only others fill."""
        return self.values[name] if name in self else default

    def integer(self, name: str, default: int, low: int | None = None, high: int | None = None) -> int:
        value = self.get(name, default)
        if type(value) is not int or (low is not None and value < low) or (high is not None and value > high):
            raise self.wrong(name, value, f"an integer{_range(low, high)}")
        return value

    def number(self, name: str, default: float, low: float | None = None, high: float | None = None) -> float:
        value = self.get(name, default)
        # not (low <= value): a NaN compares as False with everything
        if type(value) not in (int, float) or not (-1e300 if low is None else low) <= value <= (high or 1e300):
            raise self.wrong(name, value, f"a number{_range(low, high)}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if type(value) is not bool:
            raise self.wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string; without a default it must be there and hold something."""
        value = self.get(name, default)
        if not isinstance(value, str) or (default is None and not value.strip()):
            raise self.wrong(name, self.values.get(name), "a text")
        return value

    def choice(self, name: str, default: str, choices: Sequence[str]) -> str:
        value = self.get(name, default)
        if value not in choices:
            raise self.wrong(name, value, f"one of {', '.join(choices)}")
        return str(value)

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.wrong(name, value, "a mapping")
        return value

    def wrong(self, name: str, value: Any, wanted: str) -> InvalidInput:
        shown = repr(value)
        return InvalidInput(
            f"{self._where}.{name}", f"is {shown if len(shown) <= 200 else shown[:200] + '...'}, must be {wanted}"
        )

    def finish(self) -> None:
        """Raises InvalidInput for the first name that nothing has read: most likely a misspelt one."""
        for name in self.values:
            if name not in self._known:
                near = difflib.get_close_matches(str(name), self._known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                known = ", ".join(sorted(self._known))
                raise InvalidInput(f"{self._where}.{name}", f"is unknown{hint} (known: {known})")


def _range(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if low is not None:
        return f" >= {low}"
    return f" <= {high}" if high is not None else ""
