"""Process 1 of a sandbox: runs commands for the service outside, one at a time, and watches what they use.

Uses only the standard library: bubblewrap starts this text with `python -I -S -c`. Its argument has the limits as JSON.
One JSON line in is one command, one JSON line out its end. The program ends with its input, and with its time to live;
the kernel then ends every process of its namespace. No process inside may signal or trace it: it is process 1, and
cannot be dumped.
"""

import base64
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from typing import Any, NoReturn

PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 4, 38, 22
WATCH_SECONDS = 0.05
CHUNK = 65536


class Guest:
    def __init__(self, limits: dict[str, Any]) -> None:
        self.limits = limits
        self.end = time.monotonic() + limits["ttl_seconds"]
        self.ended = ""
        self.cpu = 0.0

    def serve(self) -> None:
        """Until the input ends or the time is over."""
        waiting = b""
        while time.monotonic() < self.end:
            self.reap()
            if not select.select([0], [], [], WATCH_SECONDS)[0]:
                self.watch()
                continue
            chunk = os.read(0, CHUNK)
            if not chunk:
                return
            waiting += chunk
            while b"\n" in waiting:
                line, _, waiting = waiting.partition(b"\n")
                answer = json.dumps(self.run(json.loads(line))).encode() + b"\n"
                while answer:
                    answer = answer[os.write(1, answer) :]

    def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        """`{argv, cwd, env, seconds, output, stdin, alone}` -> `{code, output, cut, ended, cpu}`.

        stdin, output: base64; `output` of the request: bytes kept at most; `alone`: end all other processes first.
        """
        if asked.get("alone"):
            self.end_all()
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.waitpid(-1, 0)  # a killed process is still seen until it has ended
        self.ended = ""
        given = base64.b64decode(asked.get("stdin", ""))
        in_read, in_write = os.pipe()
        out_read, out_write = os.pipe()
        child = os.fork()
        if child == 0:
            self.start(asked, in_read, out_write)
        os.close(in_read)
        os.close(out_write)
        for end in (in_write, out_read):
            os.set_blocking(end, False)
        until = min(time.monotonic() + asked["seconds"], self.end)
        kept, cut = b"", False
        status: int | None = None
        while status is None:
            if not self.ended and time.monotonic() >= until:
                self.stop("time")
            self.watch()
            readable, writable, _ = select.select([out_read], [in_write] if in_write >= 0 else [], [], 0.01)
            if writable:
                given, in_write = self.feed(in_write, given)
            if readable:
                kept, cut, more = self.take(out_read, kept, cut, asked["output"])
                if not more:
                    time.sleep(0.005)  # it closed its output and runs on
            status = self.reap(child)
        kept, cut, _ = self.take(out_read, kept, cut, asked["output"])
        for end in (in_write, out_read):
            if end >= 0:
                os.close(end)
        return {
            "code": os.waitstatus_to_exitcode(status),
            "output": base64.b64encode(kept).decode(),
            "cut": cut,
            "ended": self.ended,
            "cpu": self.cpu,
        }

    def feed(self, end: int, given: bytes) -> tuple[bytes, int]:
        """Write what the pipe takes. The rest, and the end of the pipe: -1 once it is closed."""
        with contextlib.suppress(BlockingIOError):
            try:
                given = given[os.write(end, given[:CHUNK]) :] if given else b""
            except BrokenPipeError:
                given = b""
            if not given:
                os.close(end)
                return b"", -1
        return given, end

    def take(self, end: int, kept: bytes, cut: bool, most: int) -> tuple[bytes, bool, bool]:
        """Reads at most a megabyte of output, and tells if there may be more: a command may write for ever."""
        for _ in range(16):
            try:
                chunk = os.read(end, CHUNK)
            except BlockingIOError:
                return kept, cut, True
            if not chunk:
                return kept, cut, False
            cut = cut or len(kept) + len(chunk) > most
            kept = (kept + chunk)[:most]
        return kept, cut, True

    def reap(self, child: int = -2) -> int | None:
        """Collect every process that ended; the status of `child` if it was among them."""
        found = None
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status, used = os.wait4(-1, os.WNOHANG)
                if not pid:
                    return found
                if pid == child:
                    found, self.cpu = status, used.ru_utime + used.ru_stime
        return found

    def watch(self) -> None:
        """End everything where the processes together are over a limit."""
        count = used = 0
        for name in os.listdir("/proc"):
            if name.isdigit() and name != "1":
                count += 1
                used += memory(name)
        if used > self.limits["memory_bytes"]:
            self.stop("memory")
        elif count > 2 * self.limits["processes"]:  # the kernel counts too, except for root
            self.stop("processes")

    def stop(self, why: str) -> None:
        self.ended = self.ended or why
        self.end_all()

    def end_all(self) -> None:
        """Process 1 itself is not among them."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)

    def start(self, asked: dict[str, Any], given: int, output: int) -> NoReturn:
        """Turns the child process into the command."""
        try:
            os.setsid()
            os.dup2(given, 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.closerange(3, 256)
            self.restrict(asked["seconds"])
            os.chdir(asked["cwd"])
            os.execvpe(asked["argv"][0], asked["argv"], {**os.environ, **asked["env"]})
        except BaseException as error:
            os.write(1, f"sandbox: {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(126)

    def restrict(self, seconds: float) -> None:
        limits = self.limits
        if limits["uid"]:
            os.setgroups([])
            os.setgid(limits["uid"])
            os.setuid(limits["uid"])
        for kind, most in (
            (resource.RLIMIT_AS, limits["memory_bytes"]),
            (resource.RLIMIT_FSIZE, limits["disk_bytes"]),
            (resource.RLIMIT_NPROC, limits["processes"]),
            (resource.RLIMIT_CPU, int(seconds) + 1),
            (resource.RLIMIT_NOFILE, 256),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(kind, (most, most))
        filter_calls(base64.b64decode(limits["seccomp"]))


def memory(pid: str) -> int:
    """Bytes of a process that no file backs: its own, and shared ones."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/status", "rb") as file:
        lines = dict(line.split(b":", 1) for line in file if b":" in line)
        return sum(int(lines.get(name, b"0 kB").split()[0]) for name in (b"RssAnon", b"RssShmem")) * 1024
    return 0


def filter_calls(program: bytes) -> None:
    """Load a filter of system calls. Raises OSError where the kernel does not take it."""
    libc = ctypes.CDLL(None, use_errno=True)

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))

    loaded = Program(len(program) // 8, program)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(loaded), 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls")


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    Guest(json.loads(sys.argv[1])).serve()
