"""An object for checkpoints of an attacker."""

import os
from pathlib import Path
from typing import Any


class Evil:
    """Unpickled with all of pickle, it makes a file."""

    def __init__(self, made: Path) -> None:
        self._made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._made}",)
