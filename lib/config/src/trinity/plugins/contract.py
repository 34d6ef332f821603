"""What a class must have to be an environment, known without the SDK."""

from typing import Any


def environment_problem(kind: Any) -> str:
    """What keeps a class from being an environment; empty if nothing does."""
    if not isinstance(kind, type) or not all(hasattr(kind, name) for name in ("reset", "step", "close", "description")):
        return "is no class with reset, step and close; derive it from trinity.sdk.Environment"
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    return f"does not define {', '.join(missing)}" if missing else ""
