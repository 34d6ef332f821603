"""Sandboxes: an environment sends commands, and gets their ends."""

import base64
import contextlib
import functools
import io
import json
import selectors
import subprocess
import tarfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from trinity.environments.sandbox import bubblewrap
from trinity.environments.sandbox.limits import Limits
from trinity.runtime.errors import Conflict, Unavailable
from trinity.runtime.leases import Lease

_GRACE_SECONDS = 10.0  # of an answer over its command's time
_PIPE = subprocess.PIPE
_MAX_LINE = 8 * 1024**2
# Arguments: folders. Process 1 and this shell may run.
_PACK = """
set -o pipefail
running=(/proc/[0-9]*)
[ ${#running[@]} -le 2 ] && find "$@" -mindepth 1 -print0 | tar -cz --null --no-recursion -T - -f - | base64 -w0
"""
_UNPACK = """
set -o pipefail
find "$@" -mindepth 1 -delete && base64 -d | tar -xzp --no-same-owner -f - -C /
"""


@dataclass(frozen=True)
class Output:
    """The end of a command. `code`: negative for a signal; `ended`: the limit it broke: time, memory or processes;
    `cpu`: seconds of processors that it used, which only bubblewrap's sandboxes tell.
    """

    code: int
    text: str
    cut: bool = False
    ended: str = ""
    cpu: float = 0.0


@dataclass(frozen=True)
class File:
    """For a path inside a sandbox."""

    data: bytes
    executable: bool = False


class Sandbox(ABC):
    """Interface of all kinds of sandboxes. Errors of the sandbox itself are Unavailable."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._end = time.monotonic() + limits.ttl_seconds

    def run(
        self,
        argv: Sequence[str],
        *,
        seconds: float | None = None,
        stdin: bytes = b"",
        cwd: str = "/app",
        env: Mapping[str, str] | None = None,
        alone: bool = False,
    ) -> Output:
        """Runs a command to its end, or to its limit of time. `alone`: ends processes of earlier commands first."""
        return self._run(list(argv), seconds or self.limits.command_seconds, stdin, cwd, dict(env or {}), alone)

    @abstractmethod
    def _run(self, argv: list[str], seconds: float, stdin: bytes, cwd: str, env: dict[str, str], alone: bool) -> Output:
        """Does the work of `run`."""

    def pack(self, most_bytes: int) -> str:
        """Returns all files that can be written, for `unpack`. Empty if they take more bytes, compressed, or if a
        process of an earlier command runs on: no state has processes. Only bubblewrap's sandboxes have states.
        """
        return ""

    @abstractmethod
    def close(self) -> None:
        """End everything in it."""


class BubblewrapSandbox(Sandbox):
    """A sandbox by bubblewrap. Ends with this process, with `close`, or when its time is over."""

    def __init__(self, limits: Limits, folders: Collection[str] = ()) -> None:
        super().__init__(limits)
        self._process = _starter().submit(_start, bubblewrap.command(limits, folders)).result()
        self._lease = Lease.take(limits.ttl_seconds, self._process.pid)
        self._waiting = b""
        self._folders = sorted({place.lstrip("/") for place in (*bubblewrap.WRITABLE, *folders, "/dev/shm")})

    def _run(self, argv: list[str], seconds: float, stdin: bytes, cwd: str, env: dict[str, str], alone: bool) -> Output:
        asked = {"argv": argv, "cwd": cwd, "env": env, "seconds": seconds, "alone": alone}
        return self._ask(
            {**asked, "output": self.limits.output_bytes, "stdin": base64.b64encode(stdin).decode()}, seconds
        )

    def pack(self, most_bytes: int) -> str:
        argv = ["bash", "-c", _PACK, "bash", *self._folders]
        seconds = self.limits.command_seconds
        asked = {"argv": argv, "cwd": "/", "env": {}, "seconds": seconds, "output": most_bytes * 4 // 3}
        packed = self._ask(asked, seconds)
        return "" if packed.code or packed.cut or packed.ended else packed.text

    def unpack(self, packed: str) -> None:
        """Replaces all files that can be written by those of `pack`. Raises Conflict if they cannot be written."""
        done = self.run(["bash", "-c", _UNPACK, "bash", *self._folders], stdin=packed.encode(), cwd="/", alone=True)
        if done.code:
            raise Conflict(f"the files of a state cannot be written in the sandbox: {done.text.strip()[:500]}")

    def _ask(self, asked: dict[str, object], seconds: float) -> Output:
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
            answer = json.loads(self._line(seconds + _GRACE_SECONDS))
        except (OSError, ValueError, EOFError) as error:
            raise Unavailable(f"the sandbox ended: {self._reason(error)}") from None
        text = base64.b64decode(answer["output"]).decode(errors="replace")
        return Output(answer["code"], text, answer["cut"], answer["ended"], answer["cpu"])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):  # what it did not read
                    stream.close()
        self._lease.release()

    def _line(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._waiting:
                if not selector.select(max(end - time.monotonic(), 0)):
                    raise TimeoutError(f"no answer in {seconds:g} s")
                chunk = self._process.stdout.read1(1 << 20)  # type: ignore[attr-defined]
                if not chunk or len(self._waiting) > _MAX_LINE:
                    raise EOFError("its output ended")
                self._waiting += chunk
        line, _, self._waiting = self._waiting.partition(b"\n")
        return line

    def _reason(self, error: Exception) -> str:
        if time.monotonic() >= self._end:
            return f"its time to live of {self.limits.ttl_seconds:g} s is over"
        self._process.kill()
        self._process.wait()
        assert self._process.stderr is not None
        said = " ".join(self._process.stderr.read(2000).decode(errors="replace").split())
        return said or str(error)


def _start(line: list[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(line, stdin=_PIPE, stdout=_PIPE, stderr=_PIPE)


@functools.cache
def _starter() -> ThreadPoolExecutor:
    """The thread that starts all sandboxes of this process, and lives as long as it: the kernel ends a sandbox with
    the thread that started it.
    """
    return ThreadPoolExecutor(1, "sandbox-start")


def put(sandbox: Sandbox, files: Mapping[str, File]) -> None:
    """Write files at absolute paths. Raises Conflict if one cannot be written, with the reason."""
    if not files:
        return
    packed = archive_of(files, int(time.time()))
    done = sandbox.run(["tar", "-x", "--no-same-owner", "-f", "-", "-C", "/"], stdin=packed, cwd="/")
    if done.code:
        raise Conflict(f"the files of the task cannot be written in the sandbox: {done.text.strip()[:500]}")


def archive_of(files: Mapping[str, File], modified: int) -> bytes:
    """Packs files as tar does, with this Unix time as their modification time."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, file in files.items():
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size, entry.mode, entry.mtime = len(file.data), 0o755 if file.executable else 0o644, modified
            archive.addfile(entry, io.BytesIO(file.data))
    return packed.getvalue()


_usable = threading.Event()


def require() -> None:
    """Raises Conflict with `problem` unless sandboxes can be made here; looks until they once can."""
    if not _usable.is_set():
        if found := problem():
            raise Conflict(found)
        _usable.set()


def problem() -> str:
    """Why no sandbox by bubblewrap can be made here, in one sentence; empty if one can."""
    try:
        sandbox = BubblewrapSandbox(Limits(ttl_seconds=30))
    except (OSError, Unavailable, Conflict) as error:
        return str(error)
    with contextlib.closing(sandbox):
        try:
            done = sandbox.run(["true"])
        except Unavailable as error:
            return f"bubblewrap makes no namespaces here ({error}); the kernel or the container's profile forbids them"
    return "" if not done.code else f"a command cannot be started in the sandbox: {done.text.strip()}"
