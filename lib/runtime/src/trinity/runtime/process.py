"""Processes that do not outlive their parent, their environment, free ports, and locks on folders."""

import atexit
import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import random
import re
import resource
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

_MOST_FILES = 65_536

_PR_SET_PDEATHSIG = 1
_SIOCGIFADDR = 0x8915
PARENT = "TRINITY_PARENT_PID"


def die_with_parent(parent: int | None = None) -> None:
    """Ask Linux to end this process, by SIGKILL, when its parent ends. No effect elsewhere.

    `parent`: pid of the process that started this one; None: what `as_parent` of that process says. Without either, a
    parent that ends before the request is not noticed. It may be process 1: `trinity run` is that in a container.
    """
    said = int(os.environ.pop(PARENT, 0))  # not for this process's own children
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return
    if (parent or said) not in (0, os.getppid()):  # it ended before the request
        os.kill(os.getpid(), signal.SIGKILL)


# What torchrun, accelerate, MPI's launchers and clusters' operators set for the process that they start. With
# FSDP_CPU_RAM_EFFICIENT_LOADING transformers would leave the weights of further ranks empty.
_OF_LAUNCHERS = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|NODE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT)|"
    r"(TORCHELASTIC|PET|ACCELERATE|FSDP|OMPI|PMI|PMIX)_.*"
)
# An address of a Unix socket has 107 bytes; vLLM and multiprocessing add at most 40 to the folder of temporary files.
_LONGEST_TEMPORARY_FOLDER = 64


def inherited() -> dict[str, str]:
    """This process's environment for a service that it starts.

    It has none of a launcher's variables: the trainer starts its own ranks, and would wait for the launcher's. Where
    TMPDIR is too long for the addresses of Unix sockets, it names a short link to the same folder. Raises InvalidInput
    if no folder for that link can be written.
    """
    environment = {name: value for name, value in os.environ.items() if not _OF_LAUNCHERS.fullmatch(name)}
    folder = os.path.abspath(environment.get("TMPDIR") or "/tmp")
    if len(os.fsencode(folder)) > _LONGEST_TEMPORARY_FOLDER:
        environment["TMPDIR"] = _short_link(folder)
    return environment


def _short_link(folder: str) -> str:
    name = f"trinity-{os.getuid()}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}"
    for parent in ("/tmp", "/var/tmp", "/dev/shm"):
        link = f"{parent}/{name}"
        with contextlib.suppress(OSError):
            os.symlink(folder, link)
        with contextlib.suppress(OSError):
            if os.lstat(link).st_uid == os.getuid() and os.readlink(link) == folder:
                return link
    from trinity.runtime.errors import InvalidInput  # loads gRPC, which most commands do not need

    raise InvalidInput(
        "TMPDIR",
        f"is {folder!r}, longer than the {_LONGEST_TEMPORARY_FOLDER} characters that leave room for Unix sockets, and "
        "neither /tmp, /var/tmp nor /dev/shm takes a link to it; set a shorter one",
    )


def as_parent() -> dict[str, str]:
    """Environment of a child of this process that calls `die_with_parent`."""
    return {PARENT: str(os.getpid())}


def ending_signals() -> list[signal.Signals]:
    """The signals that ask a process to drain: SIGINT, SIGTERM, and SIGHUP unless it is ignored, as under nohup."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if is_ignored else [signal.SIGHUP])]


def leave_terminal() -> None:
    """Send further output nowhere: a terminal that hung up refuses it, which must not disturb a drain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode):  # isatty denies a terminal that hung up
            os.dup2(nowhere, stream)
    os.close(nowhere)


def tied(command: Sequence[str]) -> list[str]:
    """The command, made to end with this process, which starts it; for programs that cannot ask for that themselves."""
    return [sys.executable, "-m", "trinity.runtime.process", str(os.getpid()), *command]


def guard_group() -> None:
    """End this process's group with this process, however it ends: for children that cannot watch their parent.

    A small process waits for the end of a pipe that only this one holds open. The group is made if need be, except on
    a terminal, where that would take Ctrl-C away.
    """
    if os.getpgrp() != os.getpid():
        if sys.stdin is not None and sys.stdin.isatty():
            return
        os.setpgrp()
    code = "import os, signal, sys; sys.stdin.read(); os.killpg(os.getpgrp(), signal.SIGKILL)"
    # Only the end of the process closes a plain descriptor; Python closes a file object while it finalizes.
    watched, held = os.pipe()
    _guards.append((subprocess.Popen([sys.executable, "-S", "-c", code], stdin=watched), held))
    os.close(watched)


_guards: list[tuple["subprocess.Popen[bytes]", int]] = []


def end(code: int) -> NoReturn:
    """End this process with this exit code, once its threads are joined and its exit handlers have run.

    The interpreter is not finalized: up to Python 3.13 it ends daemon threads by force when they ask for its lock. In
    a destructor of C++ that is std::terminate, and the process aborts after its work is done (python/cpython#87135).
    Libraries have such threads: torch, gRPC, clients of monitors. multiprocessing ends its children in the same way.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
                stream.flush()
        os._exit(code)


_LOWEST_PORT, _END_OF_PORTS = 10_000, 65_536
_ENOUGH_PORTS = 1000
_given_ports: set[int] = set()


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that no process holds now and this process has not returned before.

    Raises OSError for a host that is no IPv4 address of this machine, nor the name of one.

    The port lies outside the kernel's range for outgoing connections, where enough ports are left: such a connection
    could take the port before the caller listens, and keep it for hours.
    """
    ports = _ports()
    for _ in range(1000):
        port = random.SystemRandom().choice(ports)
        if port in _given_ports:
            continue
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
        _given_ports.add(port)
        return port
    raise OSError(errno.EADDRINUSE, f"no free port on {host} from {ports[0]} to {ports[-1]}")


def _ports(outgoing: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> Sequence[int]:
    """Those below the range of outgoing connections; else those above it; else, where both are few, all."""
    try:
        first, last = map(int, outgoing.read_text().split())
    except (OSError, ValueError):
        first, last = 32_768, 60_999
    below, above = range(_LOWEST_PORT, first), range(last + 1, _END_OF_PORTS)
    return next((ports for ports in (below, above) if len(ports) >= _ENOUGH_PORTS), range(_LOWEST_PORT, _END_OF_PORTS))


def loopback_interface() -> str:
    """Its name: lo on Linux, lo0 elsewhere."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def interface_to(host: str) -> str:
    """Returns the network interface of this machine's route to another one; empty where it cannot be told."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # of a datagram socket: sends nothing
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == own:
                    return name
    return ""


def is_suspended(pid: int) -> bool:
    """Returns True if a signal has stopped the process. Always False where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def begun_at(pid: int) -> int:
    """Returns when the process began, in ticks since the start of the machine; 0 without it, or without /proc.

    A process id is given again, after a restart of the machine to any process; both numbers together are not.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def is_alive(pid: int) -> bool:
    """Returns True if a process with this id exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] != "Z"
    except OSError:
        pass
    if os.path.isdir("/proc/self"):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


class FileLock:
    """An exclusive lock on a file, held until `release` or the end of the process. The file holds the owner's pid, and
    what it does if `acquire` was told so."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None

    def acquire(self, doing: str = "") -> bool:
        """Take the lock; False if another process holds it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()} {doing}".rstrip().encode() + b"\n", 0)
        self._handle = handle
        return True

    def is_held(self) -> bool:
        """Returns True if a process holds the lock, also one of another container or machine."""
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in (errno.EAGAIN, errno.EACCES)
        finally:
            os.close(handle)
        return False

    def owner(self) -> int | None:
        """Process id written by the last owner."""
        pid = self._note().partition(" ")[0]
        return int(pid) or None if pid.isdecimal() else None

    def doing(self) -> str:
        """Returns the text that the last owner gave to `acquire`."""
        return self._note().partition(" ")[2]

    def _note(self) -> str:
        try:
            return self.path.read_text(errors="replace").strip()
        except OSError:
            return ""

    def release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set these variables inside the block and restore them after it."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


if __name__ == "__main__":  # see `tied`: the request survives exec, and the pid stays the same
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """TimeoutError in this block after `seconds`, also in a regex or a template's loop. Not within another such block.

    Threads other than the main one have no limit: signals do not reach them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> NoReturn:
        raise TimeoutError(f"not done within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again: Jinja swallows what constants raise as it compiles
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def memory_limit(more_bytes: int) -> Iterator[None]:
    """Raises MemoryError in this block once the process would take over `more_bytes` of addresses more than before.

    No effect where /proc does not say how many it has.
    """
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        yield
        return
    before = soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def allow_many_files() -> None:
    """Raises this process's limit of open files, as far as the system allows: the usual 1024 are few connections."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, min(most, _MOST_FILES)), most))
