"""A sandbox by docker: a container of the task's image, where the operator of the service allows it."""

import hashlib
import secrets
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence

from trinity.environments.sandbox.limits import Limits
from trinity.environments.sandbox.sandbox import File, Output, Sandbox, archive_of
from trinity.runtime.errors import Conflict, InvalidInput, Unavailable
from trinity.runtime.leases import CONTAINERS_VARIABLE, Lease, containers_allowed, docker_limits

_BUILD_SECONDS = 100.0
_START_SECONDS = 100.0
_GRACE_SECONDS = 5.0
_PAUSES = (0.5, 2.0)  # between tries of a start
_slots = threading.Semaphore(8)  # of starts at a time
# Process 1 of the container: reaps processes, and ends the container after this many seconds.
_WAIT = "i=0; while [ $i -lt {} ]; do sleep 1; i=$((i+1)); done"
_KILLED = 137  # by `timeout`, or by the kernel for memory


def check_allowed() -> None:
    """Raises InvalidInput unless containers are allowed."""
    if not containers_allowed():
        what = f"the operator of the environment service allows no containers; it sets {CONTAINERS_VARIABLE}=true"
        raise InvalidInput("args.backend", f"is docker, but {what}")


def run_line(name: str, image: str, limits: Limits) -> list[str]:
    """The command that starts a container, which ends by itself after its time to live."""
    return [
        *("docker", "run", "--detach", "--rm", "--name", name, "--label", "trinity.sandbox"),
        *docker_limits(limits.memory_mib, limits.disk_mib, limits.processes, network=limits.network),
        *("--entrypoint", "sh"),
        *(image, "-c", _WAIT.format(round(limits.ttl_seconds))),
    ]


def exec_line(name: str, argv: Sequence[str], seconds: float, cwd: str, env: Mapping[str, str]) -> list[str]:
    """The command line that runs a command in a container, and kills it after `seconds`."""
    line = ["docker", "exec", "--interactive", *(["--workdir", cwd] if cwd else [])]
    for key, value in env.items():
        line += ["--env", f"{key}={value}"]
    return [*line, name, "timeout", "-s", "KILL", f"{seconds:g}", *argv]


def build(context: Mapping[str, File]) -> str:
    """The image of a task's environment/, built once. Raises Conflict with docker's last words."""
    packed = archive_of(dict(sorted(context.items())), 0)  # the same bytes whenever it is packed
    tag = f"trinity-task:{hashlib.sha256(packed).hexdigest()[:24]}"
    if _docker(["docker", "image", "inspect", tag], _START_SECONDS).returncode:
        made = _docker(["docker", "build", "--quiet", "--tag", tag, "-"], _BUILD_SECONDS, packed)
        if made.returncode:
            raise Conflict(f"docker cannot build the task's image: {_error_text(made)}")
    return tag


class DockerSandbox(Sandbox):
    """A container. Its lease names it: the reaper removes it where this process did not."""

    def __init__(self, limits: Limits, image: str) -> None:
        super().__init__(limits)
        for pause in (*_PAUSES, None):
            self.name = f"trinity-{secrets.token_hex(8)}"
            self._lease = Lease.take(limits.ttl_seconds, container=self.name)
            started = self._start(image)
            if not started.returncode:
                return
            self.close()
            if pause is None:
                raise Unavailable(f"docker starts no container of {image}: {_error_text(started)}")
            time.sleep(pause)

    def _start(self, image: str) -> "subprocess.CompletedProcess[bytes]":
        try:
            with _slots:
                return _docker(run_line(self.name, image, self.limits), _START_SECONDS)
        except Conflict:
            self._lease.release()
            raise
        except Unavailable:
            self.close()
            Lease.take(_START_SECONDS, container=self.name)  # for the reaper: the daemon may create it yet
            raise

    def _run(self, argv: list[str], seconds: float, stdin: bytes, cwd: str, env: dict[str, str], alone: bool) -> Output:
        """An empty `cwd` is the image's folder."""
        if time.monotonic() >= self._end:
            raise Unavailable(f"the sandbox ended: its time to live of {self.limits.ttl_seconds:g} s is over")
        if alone:  # all processes but the first of the container
            _docker(["docker", "exec", self.name, "sh", "-c", "kill -9 -1"], _START_SECONDS)
        line = exec_line(self.name, argv, seconds, cwd, env)
        begun = time.monotonic()
        code, kept, cut = _capture(line, stdin, self.limits.output_bytes, seconds + _GRACE_SECONDS)
        ended = "time" if code == _KILLED and time.monotonic() - begun >= seconds else ""
        return Output(code, kept.decode(errors="replace"), cut, ended)

    def close(self) -> None:
        self._lease.end()


def _capture(line: list[str], stdin: bytes, most: int, seconds: float) -> tuple[int, bytes, bool]:
    """Exit code, the first bytes of what it wrote, and whether there were more."""
    process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    watch = threading.Timer(seconds, process.kill)
    watch.start()
    feeding = threading.Thread(target=_feed, args=(process, stdin), daemon=True)
    feeding.start()
    assert process.stdout is not None
    kept, cut = b"", False
    with process.stdout as output:
        while chunk := output.read(65536):
            cut = cut or len(kept) + len(chunk) > most
            kept = (kept + chunk)[:most]
    code = process.wait()
    watch.cancel()
    feeding.join()
    return (_KILLED if code < 0 else code), kept, cut


def _feed(process: "subprocess.Popen[bytes]", data: bytes) -> None:
    assert process.stdin is not None
    try:
        with process.stdin as end:
            end.write(data)
    except OSError:  # it ended without reading all
        return


def _docker(line: list[str], seconds: float, stdin: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    try:
        return subprocess.run(line, input=stdin, capture_output=True, timeout=seconds)
    except FileNotFoundError:
        raise Conflict("docker is not on PATH; install it, or take backend: bubblewrap") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{' '.join(line[:2])} took longer than {seconds:g} s") from None


def _error_text(done: "subprocess.CompletedProcess[bytes]") -> str:
    return " ".join(done.stderr.decode(errors="replace").split())[-500:] or f"exit code {done.returncode}"
