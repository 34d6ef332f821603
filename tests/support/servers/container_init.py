"""The first process of a container: makes its root from a specification, waits for its network, starts the command.

Run by `unshare` in new namespaces (containers.py). It passes SIGTERM on, reaps what its child leaves behind, and ends
as the child does, like the init of Docker's `init: true`.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "usr")
_CONFIGURED = ("alternatives", "group", "ld.so.cache", "nsswitch.conf", "passwd", "ssl")  # below /etc
_PR_SET_PDEATHSIG = 1


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    socket.sethostname(spec["hostname"])
    _make_root(spec)
    print("ready", flush=True)
    sys.stdin.readline()  # the cable is there
    commands = (["link", "set", "lo", "up"], ["addr", "add", spec["address"], "dev", "eth0"],
                ["link", "set", "eth0", "up"], ["route", "add", "default", "via", spec["gateway"]])  # fmt: skip
    for command in commands if spec["address"] else ():
        subprocess.run(["ip", *command], check=True)
    child = os.fork()
    if child == 0:
        os.chroot(spec["root"])
        os.chdir("/")
        user, group = spec["user"]
        os.setgroups([])
        os.setgid(group)
        os.setuid(user)
        os.execve(spec["command"][0], spec["command"], spec["environment"])
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _make_root(spec: dict[str, Any]) -> None:
    """Nothing of the machine but its system folders, read-only, and the volumes."""
    root = Path(spec["root"])
    _mount("--make-rprivate", "/")
    _mount("--bind", str(root), str(root))
    for name in _SYSTEM:
        there = Path("/", name)
        if there.is_symlink():
            if not (root / name).is_symlink():
                (root / name).symlink_to(os.readlink(there))
        elif there.is_dir():
            _bind(there, root / name, read_only=True)
    if not (root / "etc").exists():
        (root / "etc").mkdir()
        there = [str(path) for name in _CONFIGURED if (path := Path("/etc", name)).exists()]
        subprocess.run(["cp", "-a", *there, str(root / "etc")], check=True)
    for name in ("tmp", "run", "root", "proc", "dev", "sys"):
        (root / name).mkdir(exist_ok=True)
    _mount("-t", "proc", "proc", str(root / "proc"))
    _mount("--rbind", "/dev", str(root / "dev"))
    _mount("-t", "tmpfs", "shm", str(root / "dev/shm"))
    _mount("--rbind", "/sys", str(root / "sys"))
    for source, target, read_only in sorted(spec["volumes"], key=lambda one: str(one[1])):  # parents first
        _bind(Path(source), root / target.lstrip("/"), read_only)
    (root / "tmp").chmod(0o1777)
    if spec["read_only"]:
        _mount("-o", "remount,bind,ro", str(root))


def _bind(source: Path, target: Path, read_only: bool) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    elif not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    _mount("--bind", str(source), str(target))
    if read_only:
        _mount("-o", "remount,bind,ro", str(target))


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


if __name__ == "__main__":
    main()
