"""Runs each part of a benchmark in a separate process, so that it has the whole GPU."""

import json
import os
import subprocess
import sys
from typing import Any

# The part prints its result as JSON after this.
FOUND = "FOUND "


def found_by(process: str, *arguments: str, limit_seconds: float, **environment: str) -> dict[str, Any]:
    """The result of this script, called again for one part. Raises SystemExit without a result."""
    command = [sys.executable, *sys.argv, "--process", process, *arguments]
    given = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_seconds, env=given)
    lines = [line for line in done.stdout.splitlines() if line.startswith(FOUND)]
    if not lines:
        raise SystemExit(f"{process}: {done.stdout[-1500:]}{done.stderr[-3000:]}")
    print(f"  {lines[-1]}", file=sys.stderr, flush=True)
    return dict(json.loads(lines[-1].removeprefix(FOUND)))
