"""The small form of a benchmark's script, in a process that is forked with everything imported.

Its whole runs are forked as well, and sample with transformers where vLLM would (forked_run.py): a script that reads
what a run has left shows as much with either. Engines that a script starts itself are vLLM's.
"""

import contextlib
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support.programs.forked import Forked, server_address, use_server, write_to


def printed(script: Path, arguments: Sequence[str], folder: Path, seconds: float = 580) -> str:
    """Output of the script. Raises AssertionError with its errors if it fails or exceeds the time."""
    folder.mkdir(exist_ok=True)
    out, err = folder / "out.txt", folder / "err.txt"
    given = script, list(arguments), dict(os.environ), out, err, server_address()
    process, code = Forked(_script, given), None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what a script that hangs has started
    assert code == 0, f"exit code {code}: {err.read_text(errors='replace')[-3000:]}"
    return out.read_text()


def _script(script: Path, arguments: list[str], environment: dict[str, str], out: Path, err: Path, server: str) -> None:
    """Main function of the process."""
    from support.programs import forked_run, run

    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    write_to(out, 1)
    write_to(err, 2)
    use_server(server)
    run.TrinityRun = forked_run.ForkedRun  # type: ignore[misc]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
