"""Machines of a test: network namespaces of one host, joined by a bridge. They share its file system.

    with Machines(2) as machines:
        machines.start(0, ["run", "--config", ...], environment, output)     # `trinity` at machines.hosts[0]

It needs root, and unshare, nsenter and ip (util-linux, iproute2).
"""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

_count = itertools.count()
_END_SECONDS = 20.0


class Machines:
    """`hosts[n]`: the address of machine n; `own`: that of this process, on the same network."""

    def __init__(self, number: int) -> None:
        self._id = f"{os.getpid() % 10_000}x{next(_count)}"
        second, third = divmod(os.getpid() * 16 + next(_count), 250)
        net = f"10.{100 + second % 100}.{third}"
        self.own, self.hosts = f"{net}.254", [f"{net}.{index + 1}" for index in range(number)]
        self._bridge = f"tb{self._id}"
        self._holders: list[subprocess.Popen[bytes]] = []
        self._started: list[Command] = []

    def __enter__(self) -> "Machines":
        self._ip("link", "add", self._bridge, "type", "bridge")
        self._ip("addr", "add", f"{self.own}/24", "dev", self._bridge)
        self._ip("link", "set", self._bridge, "up")
        for index, host in enumerate(self.hosts):
            holder = subprocess.Popen(["unshare", "--net", "sleep", "100000"])
            self._holders.append(holder)
            self._until_apart(holder.pid)
            near, far = self.link(index), "eth0"
            self._ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", str(holder.pid))
            self._ip("link", "set", near, "master", self._bridge, "up")
            for command in (
                ["addr", "add", f"{host}/24", "dev", far],
                ["link", "set", far, "up"],
                ["link", "set", "lo", "up"],
            ):
                subprocess.run([*self._enter(index), "ip", *command], check=True)
        return self

    def __exit__(self, *_: object) -> None:
        for started in self._started:
            started.end()
        for holder in self._holders:
            holder.kill()
            holder.wait()
        for index in range(len(self._holders)):
            subprocess.run(["ip", "link", "del", self.link(index)], capture_output=True)
        self._ip("link", "del", self._bridge)

    def link(self, index: int) -> str:
        """The host's end of a machine's cable."""
        return f"tv{self._id}-{index}"

    def cut(self, index: int) -> None:
        """Pulls the cable of a machine: packets are lost, and no connection is told."""
        self._ip("link", "set", self.link(index), "down")

    def mend(self, index: int) -> None:
        self._ip("link", "set", self.link(index), "up")

    def start(
        self, index: int, arguments: Sequence[str], environment: Mapping[str, str], output: Path, *, program: str = ""
    ) -> "Command":
        """Starts `trinity` with these arguments on a machine, or another program."""
        trinity = [program] if program else [sys.executable, "-m", "trinity.cli.main"]
        command = Command([*self._enter(index), *trinity, *arguments], environment, output)
        self._started.append(command)
        return command

    def _enter(self, index: int) -> list[str]:
        return ["nsenter", f"--net=/proc/{self._holders[index].pid}/ns/net"]

    def _until_apart(self, pid: int) -> None:
        own = os.readlink("/proc/self/ns/net")
        deadline = time.monotonic() + _END_SECONDS
        while os.readlink(f"/proc/{pid}/ns/net") == own:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Command:
    """A started process. `text`: what it and its services have printed."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
        self.output = output
        with output.open("ab") as out:
            self.process = subprocess.Popen(
                command, env=dict(environment), stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True
            )

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def until(self, expected: str, seconds: float, count: int = 1) -> None:
        """Waits until the text has been printed so often. Fails when the time is over or the process has ended."""
        deadline = time.monotonic() + seconds
        while self.text.count(expected) < count:
            assert self.process.poll() is None, f"ended before {expected!r}: {self.text[-3000:]}"
            assert time.monotonic() < deadline, f"no {expected!r} within {seconds:g} s: {self.text[-3000:]}"
            time.sleep(0.1)

    def finish(self, seconds: float) -> int:
        """Returns the exit code once it has ended by itself."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {seconds:g} s: {self.text[-3000:]}") from None

    def descendants(self, text: str) -> list[psutil.Process]:
        """Returns the processes that it has started, with this text in their command line."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in found if text in " ".join(process.cmdline())]

    def kill(self) -> None:
        """kill -9 of this process; its services end with it."""
        self.process.kill()
        self.process.wait(_END_SECONDS)

    def end(self) -> None:
        """Ends it and all its processes."""
        if self.process.poll() is not None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*psutil.Process(self.process.pid).children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)
                    process.kill()
        self.kill()
