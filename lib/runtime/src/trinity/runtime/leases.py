"""Every sandbox is a lease with a time to live: a file that names its process or container and its owner.

The owner removes the lease with the sandbox. `reap` ends sandboxes whose time is over or whose owner is dead. A lease
names a process by its number and start time, because the kernel reuses numbers.
"""

import json
import os
import secrets
import signal
import stat
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from trinity.runtime.errors import Conflict

log = structlog.get_logger(__name__)

FOLDER_VARIABLE = "TRINITY_ENVIRONMENT_SANDBOX_LEASES"
CONTAINERS_VARIABLE = "TRINITY_ENVIRONMENT_SANDBOX_DOCKER"
MEMORY_VARIABLE = "TRINITY_ENVIRONMENT_SANDBOX_MEMORY_MIB"
DEFAULT_MEMORY_MIB = 4096


def containers_allowed() -> bool:
    """Tells if the operator of this machine lets tasks and YAMLs name images, and tasks build them."""
    return os.environ.get(CONTAINERS_VARIABLE, "").lower() in ("1", "true", "yes", "on")


def most_mib() -> int:
    """The memory, and the disk, that the operator grants a sandbox or container at most."""
    return int(os.environ.get(MEMORY_VARIABLE) or DEFAULT_MEMORY_MIB)


def docker_limits(memory_mib: int, disk_mib: int, processes: int, *, network: bool) -> list[str]:
    """Options of `docker run` that bound a container and take its privileges away."""
    memory = f"{memory_mib}m"
    return [
        *("--network", "bridge" if network else "none", "--pids-limit", str(processes)),
        *("--memory", memory, "--memory-swap", memory, "--ulimit", f"fsize={disk_mib << 20}"),
        *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
    ]


@dataclass(frozen=True)
class Lease:
    """`expires`: Unix time in seconds. `pid` is 0 for a container, `container` is empty for a process."""

    id: str
    pid: int
    started: str
    owner: int
    owner_started: str
    expires: float
    container: str = ""

    @classmethod
    def take(cls, ttl_seconds: float, pid: int = 0, container: str = "") -> "Lease":
        """Write the lease of a sandbox of this process. Raises Conflict where its folder is not ours."""
        owner = os.getpid()
        lease = cls(
            id=secrets.token_hex(8),
            pid=pid,
            started=started(pid),
            owner=owner,
            owner_started=started(owner),
            expires=time.time() + ttl_seconds,
            container=container,
        )
        new = folder() / f".{lease.id}"
        new.write_text(json.dumps(asdict(lease)))
        new.rename(folder() / f"{lease.id}.json")
        return lease

    def release(self) -> None:
        (folder() / f"{self.id}.json").unlink(missing_ok=True)

    @property
    def over(self) -> bool:
        return time.time() >= self.expires or started(self.owner) != self.owner_started

    def end(self) -> bool:
        """Ends the process or container and removes the lease. Returns False, and keeps the lease, if that failed."""
        if self.pid and self.started and started(self.pid) == self.started:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)
        if self.container:
            command = ["docker", "rm", "--force", "--volumes", self.container]
            try:
                done = subprocess.run(command, capture_output=True, timeout=60)
            except (OSError, subprocess.TimeoutExpired):
                return False
            if done.returncode and b"No such container" not in done.stderr:
                return False
        self.release()
        return True


def folder() -> Path:
    """The folder of this user's leases on this machine. Raises Conflict if another user made it."""
    given = os.environ.get(FOLDER_VARIABLE)
    path = Path(given) if given else Path(tempfile.gettempdir()) / f"trinity-sandboxes-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise Conflict(f"{path} belongs to another user; set {FOLDER_VARIABLE} to a folder of this one")
    return path


def leases() -> list[Lease]:
    """Those of this user that can be read. A file that is no lease is removed. Raises OSError, Conflict."""
    found = []
    for path in folder().glob("*.json"):
        try:
            found.append(Lease(**json.loads(path.read_text())))
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("sandbox.lease.unreadable", path=str(path), error=repr(error))
        except (ValueError, TypeError):
            path.unlink(missing_ok=True)
    return found


def reap() -> int:
    """End the sandboxes whose lease is over; how many ended. Raises OSError, Conflict."""
    ended = 0
    for lease in leases():
        if lease.over and lease.end():
            ended += 1
            log.warning(
                "sandbox.lease.reaped", lease=lease.id, pid=lease.pid, container=lease.container, owner=lease.owner
            )
    return ended


def started(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty if there is none (a zombie is none)."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    return ""
