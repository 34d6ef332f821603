"""Run TRL's trainer and its vLLM server side by side, and start either again, until the trainer ends.

    python trl_pair.py pair.json        {"server" or "trainer": {"command": [...], "variables": {...}}}

TRL names no supervisor of its server: this one starts it again whenever it ends. torchrun restarts the trainer's
process, and its exit code is this one's; a torchrun that a signal ended is started again. What a part leaves behind
ends with it.
"""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import psutil
from verl_requeue import ADOPT

END_SECONDS = 30.0


class Part:
    def __init__(self, name: str, command: list[str], variables: dict[str, str]) -> None:
        self.name, self._command, self._environment = name, command, {**os.environ, **variables}
        self.start()

    def start(self) -> None:
        self._popen = subprocess.Popen(self._command, env=self._environment)
        self._seen: dict[int, psutil.Process] = {}

    def code(self) -> int | None:
        """Returns the exit code of the part, negative for a signal; None while it runs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._seen |= {one.pid: one for one in psutil.Process(self._popen.pid).children(recursive=True)}
        return self._popen.poll()

    def end(self) -> None:
        """Kills all processes of the part, also those whose parents died."""
        self._popen.kill()
        self._popen.wait(END_SECONDS)
        end_all(self._seen.values())


def end_all(processes: Collection[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, END_SECONDS)


def main() -> int:
    ctypes.CDLL(None).prctl(ADOPT, 1, 0, 0, 0)  # so that it can wait for what a part leaves behind
    told: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    parts = [Part(name, **one) for name, one in told.items()]
    while True:
        for part in parts:
            code = part.code()
            if part.name == "trainer" and code is not None and code >= 0:
                for one in parts:
                    one.end()
                end_all(psutil.Process().children(recursive=True))  # what a part left within a poll of its end
                return code
            if code is not None:
                print(f"the {part.name} ended with {code}, and is started again", flush=True)
                part.end()
                part.start()
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
