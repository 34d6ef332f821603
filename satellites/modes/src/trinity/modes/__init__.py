"""Modes of `trinity run` other than both and train, which start or follow no training of their own.

`runner` is the hook `modes`; it imports only the module of the mode.
"""

import importlib
from collections.abc import Callable

_RUNNERS = {
    "explore": ("join", "join"),
    "train_node": ("node", "join_as_node"),
    "serve": ("serve", "serve"),
    "bench": ("bench", "bench"),
}


def runner(mode: str) -> Callable[..., None]:
    """Returns the function that runs a configuration of this mode, given with the name of its YAML."""
    module, function = _RUNNERS[mode]
    run: Callable[..., None] = getattr(importlib.import_module(f"trinity.modes.{module}"), function)
    return run
