"""The record of a run in KV: its checkpoints, and the evaluations whose blobs are gone."""

import json
from typing import Any

import structlog

from trinity.buffer.state.context import RunContext
from trinity.runtime.broker import Bucket

log = structlog.get_logger(__name__)

# Part of the broker's message limit that new fields may take; the rest is for fields added meanwhile.
_PART = 0.5


class CommitRecord:
    """Fields of the value under the run's commit key, which is JSON."""

    def __init__(self, context: RunContext, runs: Bucket) -> None:
        self._context = context
        self._runs = runs

    async def read(self) -> dict[str, Any]:
        """Empty if no buffer wrote it: then nothing is released before the next checkpoint."""
        return _fields((await self._runs.get(self._context.names.commit_key)).value)

    async def write(self, **fields: Any) -> bool:
        """Change these fields and leave the others. False if they are too long to be kept; then nothing changes."""
        if len(json.dumps(fields)) > _PART * self._context.broker.most_bytes:
            return False
        key = self._context.names.commit_key
        await self._runs.update(key, lambda value: json.dumps({**_fields(value), **fields}).encode())
        return True


def _fields(value: bytes) -> dict[str, Any]:
    try:
        found = json.loads(value or b"{}")
        if isinstance(found, dict):
            return found
        problem = "it is no object"
    except (ValueError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
    log.warning("buffer.commit.refused", reason=problem)
    return {}
