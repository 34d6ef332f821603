"""Packages that some environments need, each an extra of this distribution."""

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from trinity.runtime.errors import Conflict

_Kind = TypeVar("_Kind", bound=type[Any])


def needs(module: str, package: str, extra: str) -> Callable[[_Kind], _Kind]:
    """Declares the module that an environment imports when it begins, and the package and the extra that have it."""

    def unplayable() -> str:
        found = importlib.util.find_spec(module) is not None
        return "" if found else f"{package} is not installed; pip install -e '.[{extra}]'"

    def declare(kind: _Kind) -> _Kind:
        kind.package, kind.unplayable = package, staticmethod(unplayable)
        return kind

    return declare


def require(module: str, extra: str, note: str = "") -> ModuleType:
    """Imports the module. Raises Conflict that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Conflict(
            f"{module} is not installed in the environment service ({error}); pip install -e '.[{extra}]'{note}"
        ) from None
