"""Experience operators by name: every stored group goes through those of the YAML before it may enter a batch."""

from typing import Any

from trinity.buffer.operators.base import Draft, Operator, Rollout, rollouts
from trinity.plugins import satellites


def __getattr__(name: str) -> Any:
    """Operators of Trinity-RFT import their base class and registry from here."""
    found = satellites.find("operators")
    if found is None or name not in found.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(found, name)


__all__ = ["Draft", "Operator", "Rollout", "rollouts"]
