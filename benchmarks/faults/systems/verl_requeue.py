"""Start a command again until it succeeds, as a scheduler queues a failed job again.

    python verl_requeue.py STARTS COMMAND [ARGUMENT ...]

The processes of a start end with it: Ray's leave their parents, so this process adopts them.
"""

import contextlib
import ctypes
import os
import subprocess
import sys
import time

import psutil

ADOPT = 36  # prctl: orphans of this process become its children
END_SECONDS = 30.0
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "HYDRA_FULL_ERROR": "1",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",  # the host's name has no address in a network namespace of one device
    "NCCL_SOCKET_IFNAME": "lo",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VERL_LOGGING_LEVEL": "WARN",
}


def main() -> int:
    ctypes.CDLL(None).prctl(ADOPT, 1, 0, 0, 0)
    starts, command = int(sys.argv[1]), sys.argv[2:]
    code = 1
    for number in range(starts):
        print(f"start {number + 1} of {starts}", flush=True)
        peer = subprocess.Popen(command, env={**os.environ, **ENVIRONMENT})
        code = wait(peer.pid)
        end_all()
        if code == 0:
            break
        print(f"start {number + 1} ended with {code}", flush=True)
    return code if code >= 0 else 128 - code


def wait(pid: int) -> int:
    """Returns the exit code of a child, and reaps orphans meanwhile."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def end_all() -> None:
    """Kills every process that descends from this one."""
    deadline = time.monotonic() + END_SECONDS
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
