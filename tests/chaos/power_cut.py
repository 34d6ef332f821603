"""A power cut for one program: a copy of its folder with only what it had synced. Linux; no root, nothing to install.

The program runs under ptrace. A seccomp filter stops it at the system calls that matter, all others run at full speed,
and a model keeps what a disk would hold:

- Content is durable when fsync or fdatasync of the file has returned, as it was when the call began; through a
  descriptor opened with O_SYNC or O_DSYNC, when the write has returned. A file never synced is there, and empty.
- Names (of files and folders made, renamed, linked, removed) and truncations are durable at the program's next sync of
  anything in the folder: all that came before it, in order. So does the journal of ext4 or XFS.

Harsher than a real cut: nothing is written back in the background; sync, syncfs, msync and writev make nothing durable.
Milder: a sync that returned was true (no lying disk cache); of unsynced bytes none survives, where a real cut leaves
some, in any order; synced bytes are never damaged; names need no sync of their own folder, as POSIX would allow.
Besides, syncs run one after another. Not seen: what the program writes through memory maps; symbolic links.
Files from before the start of the program are durable. The program may have threads and must not fork.

As a program: `power_cut.py FOLDER COPY PROGRAM [ARGUMENT ...]` prints `traced`, or `refused` and why the system does
not let it. SIGTERM kills PROGRAM with -9. When PROGRAM has ended, however it did, COPY is what the disk holds of
FOLDER.
"""

import contextlib
import ctypes
import os
import platform
import signal
import stat
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from trinity.runtime.process import die_with_parent

# Numbers of the system calls, and of the architecture ("audit") as a filter sees it.
_MACHINES: dict[str, dict[str, Any]] = {
    "x86_64": {
        "audit": 0xC000003E,
        "sync": {74, 75},  # fsync, fdatasync
        "write": {1, 18},  # write, pwrite64
        "open": {257},  # openat
        # ftruncate, rename, mkdir, rmdir, link, unlink, mkdirat, unlinkat, renameat, linkat, renameat2
        "names": {77, 82, 83, 84, 86, 87, 258, 263, 264, 265, 316},
    },
    "aarch64": {
        "audit": 0xC00000B7,
        "sync": {82, 83},
        "write": {64, 68},
        "open": {56},
        "names": {46, 34, 35, 37, 38, 276},  # ftruncate, mkdirat, unlinkat, linkat, renameat, renameat2
    },
}

_WALL = 0x40000000  # waitpid: threads too
_CONT, _SYSCALL, _SEIZE, _LISTEN, _GET_SYSCALL_INFO = 7, 24, 0x4206, 0x4208, 0x420E
_OPTIONS = 1 | 1 << 3 | 1 << 7 | 1 << 20  # TRACESYSGOOD, TRACECLONE, TRACESECCOMP, EXITKILL
_EVENT_SECCOMP, _EVENT_STOP = 7, 128
_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2
_ALLOW, _TRACE = 0x7FFF0000, 0x7FF00000


class Untraceable(Exception):
    """The system does not allow it: ptrace or seccomp is forbidden here, or this is no Linux on x86-64 or ARM64."""


def start(folder: Path, copy: Path, program: Sequence[str], out: IO[bytes]) -> "subprocess.Popen[bytes]":
    """The program, traced; `copy` is there when the process returned has ended. Raises Untraceable."""
    command = [sys.executable, __file__, str(folder), str(copy), *program]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=out)
    assert process.stdout is not None
    with process.stdout:
        answer = process.stdout.readline().decode().strip()
    if answer != "traced":
        process.kill()
        process.wait()
        if answer.startswith("refused"):
            raise Untraceable(answer.removeprefix("refused "))
        raise RuntimeError(f"the tracer of {program[0]} ended at once")
    return process


class _Disk:
    """Model of a folder on disk. Files are identified by inodes, whose numbers are not reused meanwhile."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: dict[str, int | None] = {}  # now: path -> inode, None for a folder
        self._durable_names: dict[str, int | None] = {}
        self._content: dict[int, bytes] = {}  # durable
        self._truncated: dict[int, int] = {}  # since the last sync: inode -> size
        self._held: dict[int, int] = {}  # a descriptor of every inode in _content keeps its number taken
        self.look()
        for name, inode in self._names.items():
            if inode is not None:
                self._held[inode] = os.open(folder / name, os.O_RDONLY)
                self._content[inode] = (folder / name).read_bytes()
        self._durable_names = self._names

    def look(self) -> None:
        """The current names. No process changes them meanwhile."""
        self._names = {}
        for entry in _walk(self._folder):
            folder = entry.is_dir(follow_symlinks=False)
            inode = None if folder else entry.inode()
            self._names[os.path.relpath(entry.path, self._folder)] = inode
            if inode in self._content:
                size = entry.stat().st_size
                if size < len(self._content[inode]):
                    self._truncated[inode] = min(size, self._truncated.get(inode, size))

    def sync(self, descriptor: int, content: bytes | None) -> None:
        """A sync of a file with this content, or of a folder (None), has returned. Takes the descriptor over."""
        for inode, size in self._truncated.items():
            self._content[inode] = self._content[inode][:size]
        self._truncated = {}
        self._durable_names = self._names
        inode = os.fstat(descriptor).st_ino
        if content is not None:
            self._content[inode] = content
        if content is None or self._held.setdefault(inode, descriptor) != descriptor:
            os.close(descriptor)

    def write(self, copy: Path) -> None:
        """The durable content, as files."""
        copy.mkdir(parents=True, exist_ok=True)
        for name, inode in self._durable_names.items():  # a folder precedes its entries
            if inode is None:
                (copy / name).mkdir()
            else:
                (copy / name).write_bytes(self._content.get(inode, b""))


def _walk(folder: str | Path) -> Iterator["os.DirEntry[str]"]:
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path)


class _Call(ctypes.Structure):
    """struct ptrace_syscall_info at the entry; at the exit the result is where the number was."""

    _fields_ = (
        ("op", ctypes.c_uint8),
        ("arch", ctypes.c_uint32),
        ("instruction", ctypes.c_uint64),
        ("stack", ctypes.c_uint64),
        ("number", ctypes.c_int64),
        ("arguments", ctypes.c_uint64 * 6),
        ("data", ctypes.c_uint32),
    )


class _Tracer:
    """Runs a program to its end. Traced calls are serialized: none is under way when another one is inspected."""

    def __init__(self, folder: Path) -> None:
        self.disk = _Disk(folder)
        self._folder = str(folder)
        self._machine = _MACHINES[platform.machine()]
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        self._libc.ptrace.restype = ctypes.c_long
        self._waiting: deque[tuple[int, int]] = deque()
        self._killed = False

    def start(self, program: list[str]) -> None:
        """Raises Untraceable."""
        go, gone = os.pipe(), os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            self._become(program, go[0], gone[1])
        os.close(gone[1])
        try:
            self._ptrace(_SEIZE, self._pid, _OPTIONS)
        except OSError as error:
            os.kill(self._pid, signal.SIGKILL)
            raise Untraceable(f"ptrace: {error.strerror}") from None
        os.write(go[1], b"x")
        problem = os.read(gone[0], 1000).decode()  # closed by exec
        if problem:
            raise Untraceable(problem)

    def _become(self, program: list[str], go: int, gone: int) -> NoReturn:
        try:
            os.read(go, 1)
            os.dup2(2, 1)
            filtered = self._filter()
            for arguments in ((_NO_NEW_PRIVS, 1, 0, 0, 0), (_SET_SECCOMP, _FILTER, ctypes.byref(filtered), 0, 0)):
                if self._libc.prctl(*arguments):
                    os.write(gone, f"seccomp: {os.strerror(ctypes.get_errno())}".encode())
                    os._exit(1)
            os.execv(program[0], program)
        finally:
            os._exit(127)

    def _filter(self) -> ctypes.Structure:
        """Stop at the calls that matter; in classic BPF: load, compare and jump, return."""
        numbers = sorted(number for kind in ("sync", "write", "open", "names") for number in self._machine[kind])
        code = [(0x20, 0, 0, 4), (0x15, 1, 0, self._machine["audit"]), (0x06, 0, 0, _ALLOW), (0x20, 0, 0, 0)]
        code += [(0x15, len(numbers) - index, 0, number) for index, number in enumerate(numbers)]
        code += [(0x06, 0, 0, _ALLOW), (0x06, 0, 0, _TRACE)]

        class Instruction(ctypes.Structure):
            _fields_ = (("c", ctypes.c_uint16), ("t", ctypes.c_uint8), ("f", ctypes.c_uint8), ("k", ctypes.c_uint32))

        class Program(ctypes.Structure):
            _fields_ = (("length", ctypes.c_uint16), ("code", ctypes.POINTER(Instruction)))

        return Program(len(code), (Instruction * len(code))(*code))

    def kill(self) -> None:
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def run(self) -> None:
        while True:
            try:
                thread, status = self._waiting.popleft() if self._waiting else os.waitpid(-1, _WALL)
            except ChildProcessError:
                return
            try:
                if os.WIFSTOPPED(status):
                    self._stopped(thread, status >> 16, os.WSTOPSIG(status))
            except OSError as error:
                if not (self._killed or isinstance(error, ProcessLookupError)):
                    raise

    def _stopped(self, thread: int, event: int, signum: int) -> None:
        if event == _EVENT_SECCOMP:
            self._call(thread, self._look_at_call(thread))
            self._ptrace(_CONT, thread)
        elif event == _EVENT_STOP and signum != signal.SIGTRAP:  # SIGSTOP or the like, not a new thread
            self._ptrace(_LISTEN, thread)
        else:
            self._ptrace(_CONT, thread, 0 if event else signum)

    def _call(self, thread: int, call: _Call) -> None:
        number, descriptor = call.number, int(call.arguments[0])
        if number in self._machine["sync"]:
            self._sync(thread, descriptor)
        elif number in self._machine["write"]:
            self._write(thread, descriptor)
        elif number in self._machine["names"] or call.arguments[2] & (os.O_CREAT | os.O_TRUNC):
            self._finish(thread)
            self.disk.look()

    def _sync(self, thread: int, descriptor: int) -> None:
        if not self._is_inside(thread, descriptor):
            return
        ours = os.open(f"/proc/{thread}/fd/{descriptor}", os.O_RDONLY)
        content = _content(ours)
        if self._finish(thread) == 0:
            self.disk.sync(ours, content)
        else:
            os.close(ours)

    def _write(self, thread: int, descriptor: int) -> None:
        information = Path(f"/proc/{thread}/fdinfo/{descriptor}").read_text()
        flags = int(information.partition("flags:")[2].split()[0], 8)
        if not flags & os.O_DSYNC or not self._is_inside(thread, descriptor):
            return
        ours = os.open(f"/proc/{thread}/fd/{descriptor}", os.O_RDONLY)
        if self._finish(thread) > 0:
            self.disk.sync(ours, _content(ours))
        else:
            os.close(ours)

    def _is_inside(self, thread: int, descriptor: int) -> bool:
        return os.readlink(f"/proc/{thread}/fd/{descriptor}").startswith(self._folder + "/")

    def _finish(self, thread: int) -> int:
        """Let the call run, and nothing else that matters; its result. The thread stays where the call returns."""
        self._ptrace(_SYSCALL, thread)
        while True:
            other, status = os.waitpid(-1, _WALL)
            if other == thread:
                break
            self._waiting.append((other, status))
        if not os.WIFSTOPPED(status):
            raise ProcessLookupError
        return int(self._look_at_call(thread).number)

    def _look_at_call(self, thread: int) -> _Call:
        call = _Call()
        self._ptrace(_GET_SYSCALL_INFO, thread, ctypes.addressof(call), ctypes.sizeof(call))
        return call

    def _ptrace(self, request: int, thread: int, data: int = 0, address: int = 0) -> None:
        if self._libc.ptrace(request, thread, address, data) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def _content(descriptor: int) -> bytes | None:
    found = os.fstat(descriptor)
    return os.pread(descriptor, found.st_size, 0) if stat.S_ISREG(found.st_mode) else None


def _main(folder: str, copy: str, *program: str) -> None:
    die_with_parent()
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        raise Untraceable(f"{sys.platform} on {platform.machine()}")
    tracer = _Tracer(Path(folder).resolve())
    tracer.start(list(program))
    signal.signal(signal.SIGTERM, lambda *_: tracer.kill())
    print("traced", flush=True)
    tracer.run()
    tracer.disk.write(Path(copy))


if __name__ == "__main__":
    try:
        _main(*sys.argv[1:])
    except Untraceable as reason:
        print(f"refused {reason}")
        sys.exit(1)
