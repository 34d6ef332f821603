"""Counts requests and device-seconds of each tenant by kind, and commands that wait. Each process has a file of them.

{"uses": {"alice": {"forward_backward": {"requests": 12, "seconds": 3.5}}}, "waiting": {"alice": 2}}
"""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from trinity.runtime import files

log = structlog.get_logger(__name__)

SAMPLE = "sample"  # the kind of a request for samples; other kinds are those of commands
_WRITE_SECONDS = 1.0

Uses = dict[str, dict[str, dict[str, Any]]]  # by tenant and kind: requests, seconds


def path_of(folder: Path, process: str) -> Path:
    """Returns the file of a process. folder: of the executor."""
    return folder / "accounts" / f"{process}.json"


class Account:
    """Sums, and the number of commands that wait now, by tenant."""

    def __init__(self, uses: Uses | None = None) -> None:
        self.uses: Uses = uses or {}
        self.waiting: dict[str, int] = {}

    def add(self, tenant: str, kind: str, seconds: float, requests: int = 1) -> None:
        use = self.uses.setdefault(tenant, {}).setdefault(kind, {"requests": 0, "seconds": 0.0})
        use["requests"] += requests
        use["seconds"] += seconds


def read(*paths: Path) -> Account:
    """Returns the sums of several processes; empty before the first."""
    found = Account()
    for path in paths:
        values: Mapping[str, Any] = files.read_json(path) or {"uses": {}, "waiting": {}}
        for tenant, kinds in values["uses"].items():
            for kind, use in kinds.items():
                found.add(tenant, kind, use["seconds"], use["requests"])
        found.waiting |= values["waiting"]
    return found


async def keep(account: Account, path: Path) -> None:
    """Writes an account each second in which it changed, until it is cancelled, and then once more."""
    written = b""
    while True:
        try:
            await asyncio.sleep(_WRITE_SECONDS)
        finally:
            content = json.dumps(vars(account), sort_keys=True).encode()
            if content != written:
                written = _write(path, content)


def _write(path: Path, content: bytes) -> bytes:
    """Returns what the file holds now, or no bytes: a full disk ends nothing."""
    try:
        files.write_atomic(path, content, durable=False)
    except OSError as error:
        log.warning("tenants.account.not_written", path=str(path), reason=str(error))
        return b""
    return content
