"""Optional parts: what to say when they are missing."""

import importlib
from types import ModuleType

from trinity.runtime.errors import Conflict


def require(module: str, extra: str, note: str = "") -> ModuleType:
    """The module. Raises Conflict with the way to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Conflict(
            f"{module} is not installed in the environment service ({error}); pip install -e '.[{extra}]'{note}"
        ) from None
