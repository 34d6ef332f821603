"""Arguments of what the YAML names: read from a function's signature, and checked without calling it."""

import inspect
import math
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import Field
from pydantic.fields import FieldInfo

Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
MOST_TOP_TOKENS = 256  # of a teacher's in a place; each takes 8 bytes in the log
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
AggregationMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
AGGREGATIONS: tuple[str, ...] = get_args(AggregationMode)
LARGEST = 1e12  # of any number; its sums and squares are finite in float32
_WORDS = {"boolean": "true or false", "integer": "a whole number", "number": "a number", "string": "text"}
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


class PluginError(ValueError):
    """A plugin cannot be used; the message names file and cause."""


def check_name(name: object) -> None:
    """PluginError for a decorator without parentheses: what it decorates is given in place of the name."""
    if callable(name):
        of = getattr(name, "__name__", "it")
        raise PluginError(f'the decorator of {of} has no name; write the YAML\'s name in parentheses: ("{of}")')


@dataclass(frozen=True)
class Argument:
    """The values that an argument takes. type: boolean, integer, number, string or any; choices: no others.

    Bounds are of numbers: `low` and `high` are possible themselves, `above` and `below` are not.
    """

    default: Any
    type: str = "any"
    optional: bool = False
    choices: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None

    def problem(self, value: Any) -> str:
        """Why it cannot be this value; empty if it can."""
        if value is None and self.optional:
            return ""
        if self.choices:
            allowed = [*(["null"] if self.optional else []), *map(str, self.choices)]
            return "" if value in self.choices else f"is {value!r}, must be one of {', '.join(allowed)}"
        wanted: Any = {"boolean": bool, "string": str, "integer": int, "number": (int, float), "any": object}[self.type]
        numeric = self.type in ("integer", "number")
        if not isinstance(value, wanted) or (numeric and (isinstance(value, bool) or not -LARGEST <= value <= LARGEST)):
            return f"is {value!r}, must be {_WORDS[self.type]}"
        return "" if not numeric or self._inside(value) else f"is {value!r}, must be {self._bounds()}"

    def _inside(self, value: float) -> bool:
        inf = math.inf
        low, high = -inf if self.low is None else self.low, inf if self.high is None else self.high
        above, below = -inf if self.above is None else self.above, inf if self.below is None else self.below
        return low <= value <= high and above < value < below

    def _bounds(self) -> str:
        if self.low is not None and self.high is not None:
            return f"in [{self.low}, {self.high}]"
        bounds = {"at least": self.low, "above": self.above, "at most": self.high, "below": self.below}
        return " and ".join(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)


def arguments_of(function: Callable[..., Any]) -> dict[str, Argument]:
    """Returns the keyword-only parameters of a function or constructor. Raises PluginError without a default."""
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            if parameter.default is parameter.empty:
                raise PluginError(f"argument {name!r} of {function.__qualname__} has no default; give it one")
            found[name] = _argument(parameter, vars(sys.modules[function.__module__]))
            if problem := found[name].problem(parameter.default):
                raise PluginError(f"the default of {name!r} of {function.__qualname__} {problem}")
    return found


def _argument(parameter: inspect.Parameter, known: dict[str, Any]) -> Argument:
    annotation, default = parameter.annotation, parameter.default
    if isinstance(annotation, str):  # from __future__ import annotations
        annotation = eval(annotation, known)
    if annotation is parameter.empty:
        return Argument(default, _TYPES.get(type(default), "any"), optional=default is None)
    taken: dict[str, Any] = {}
    kinds = _peeled(annotation, taken)
    optional = type(None) in kinds
    kinds = [kind for kind in kinds if kind is not type(None)]
    return Argument(default, _TYPES.get(kinds[0], "any") if len(kinds) == 1 else "any", optional, **taken)


def _peeled(annotation: Any, taken: dict[str, Any]) -> list[Any]:
    """The types inside an annotation; choices and bounds are added to `taken`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        kind, *metadata = get_args(annotation)
        for item in (
            inner for outer in metadata for inner in (outer.metadata if isinstance(outer, FieldInfo) else [outer])
        ):
            names = {"ge": "low", "le": "high", "gt": "above", "lt": "below"}
            taken |= {ours: getattr(item, name) for name, ours in names.items() if hasattr(item, name)}
        return _peeled(kind, taken)
    if origin is Literal:
        taken["choices"] = get_args(annotation)
        return [str]
    if origin in (Union, types.UnionType):
        return [kind for part in get_args(annotation) for kind in _peeled(part, taken)]
    return [annotation]
