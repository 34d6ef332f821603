"""Classes of Trinity-RFT's registries as declarations of trinity.plugins."""

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

from trinity.common.refusals import NotMapped
from trinity.plugins.arguments import Argument
from trinity.plugins.declarations import Declaration, Registry

_TYPES = {bool: "boolean", int: "number", float: "number", str: "string"}


class Made:
    """Instances of a class, one for each set of arguments."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._instances: dict[str, Any] = {}

    def __call__(self, args: dict[str, Any]) -> Any:
        key = json.dumps(args, sort_keys=True, default=str)
        if key not in self._instances:
            self._instances[key] = self._kind(**args)
        return self._instances[key]


def check_kind(name: str, kind: Any, base: type, registry: str, anchor: str = "registries") -> None:
    if not (isinstance(kind, type) and issubclass(kind, base)):
        known = f"{base.__module__.rpartition('.')[0]}.{base.__name__}"
        raise NotMapped(f"{name!r} of {registry} is {kind!r}; derive it from {known}", anchor)
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise NotMapped(f"{name!r} of {registry} does not define {', '.join(missing)}", anchor)


def arguments(kind: Any, without: Sequence[str] = ()) -> dict[str, Argument]:
    """Returns the constructor's parameters; defaults of default_args() precede those of the signature."""
    defaults = dict(kind.default_args()) if hasattr(kind, "default_args") else {}
    found = {}
    for name, parameter in list(inspect.signature(kind.__init__).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) or name in ("backend", *without):
            continue
        default = defaults.get(name, parameter.default)
        if default is parameter.empty:
            raise NotMapped(f"argument {name!r} of {kind.__name__} has no default; give it one", "registries")
        found[name] = Argument(default, _TYPES.get(type(default), "any"), optional=default is None)
    return found


def inputs(kind: Any, known: dict[str, str], registry: str) -> dict[str, str]:
    """Returns our names of the parameters of __call__. Raises NotMapped for an unknown parameter."""
    found = {}
    for name, parameter in list(inspect.signature(kind.__call__).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if name in known:
            found[name] = known[name]
        elif parameter.default is parameter.empty:
            raise NotMapped(f"{kind.__name__}.__call__ takes {name!r}; {registry} has {', '.join(known)}", "algorithms")
    return found


def declare(
    registry: Registry[Declaration],
    name: str,
    kind: Any,
    function: Callable[..., Any],
    args: dict[str, Argument],
    traits: Sequence[str] = (),
) -> None:
    """The function under the class's name, module and docstring."""
    function.__module__, function.__qualname__, function.__doc__ = kind.__module__, kind.__qualname__, kind.__doc__
    registry.declare(name, function, traits=traits, args=args)
