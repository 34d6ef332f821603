"""The part of a configuration that is the same on all nodes of a trainer, since each of its ranks acts on it."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from trinity.config import Config, dump

# Keys that only one machine reads: paths, devices and names of its own, and what only the first node's services do.
_OWN = (
    "mode", "checkpoint_root_dir", "cluster", "explorer", "monitor", "budget", "data_processor",
    "buffer.explorer_input", "buffer.trainer_input", "synchronizer.storage",
)  # fmt: skip


def shared_config(config: Config) -> dict[str, str]:
    """Returns a digest of each value that all nodes share, by its key."""
    return {
        key: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
        for key, value in _leaves("", dump(config))
    }


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if key in _OWN:
        return
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, part in value.items():
        yield from _leaves(f"{key}.{name}" if key else name, part)
