"""Containers without Docker: a command in separate network, mount, process, host name and IPC namespaces.

    with Network("198.18.7") as network:
        container = Container(network, Spec("buffer", ["/venv/bin/trinity-buffer", "serve"], {...}, volumes), folder)
        container.start()

The command sees system folders, its volumes and its environment. It resolves the names of the network: the file
/etc/hosts has every container. It needs root, and unshare, nsenter, mount and ip.
"""

import ipaddress
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from support.checks.port_scan import Port
from trinity.reading import nats
from trinity.runtime.process import tied

_SECONDS = 60.0
_LISTENS = "0A"  # in /proc/net/tcp
_NAMESPACES = ["--mount", "--uts", "--pid", "--ipc", "--fork", "--kill-child"]


def missing() -> str:
    """The missing requirement for containers. Empty if this machine can run them."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    absent = [name for name in ("unshare", "nsenter", "mount", "ip") if shutil.which(name) is None]
    if absent:
        return f"needs {' and '.join(absent)} (util-linux, iproute2)"
    probe = subprocess.run(
        [
            "unshare",
            "--net",
            "--mount",
            "sh",
            "-c",
            "ip link add near type veth peer name far && mount -t tmpfs t /mnt",
        ],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    return f"this machine has no network namespaces: {probe.stderr.strip()[-200:]}" if probe.returncode else ""


class Network:
    """A bridge of this machine, with an address, and the connected hosts."""

    def __init__(self) -> None:
        number = random.randrange(2**15)
        self._prefix = f"198.{18 + number // 2**14}.{number % 2**14 // 64}"  # for tests of networks (RFC 2544)
        self._bridge, self._number = f"trinity{number}", number
        self._cables = itertools.count()
        self._addresses = itertools.count(2)
        self._lock = threading.Lock()
        self.hosts: list[tuple[str, str]] = []
        """Address and name; a name may have several addresses."""

    @property
    def address(self) -> str:
        """This machine's own, which is also that of published ports."""
        return f"{self._prefix}.1"

    def __enter__(self) -> "Network":
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.address}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        return self

    def __exit__(self, *_: object) -> None:
        _ip("link", "del", self._bridge)

    def add(self, *names: str) -> str:
        """An address for a host of these names."""
        with self._lock:
            address = f"{self._prefix}.{next(self._addresses)}"
            self.hosts += [(address, name) for name in names]
            return address

    def connect(self, pid: int, address: str) -> None:
        """A cable from the bridge to the network of a process, where it is called eth0.

        Its hardware address follows from the network's: others know it still when a container starts again.
        """
        with self._lock:
            cable = f"tr{self._number}c{next(self._cables)}"
        mac = "02:42:" + ":".join(f"{int(part):02x}" for part in address.split("."))
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "address", mac, "netns", str(pid))
        _ip("link", "set", cable, "master", self._bridge, "up")


@dataclass(frozen=True)
class Spec:
    """`command[0]` is a path. `volumes`: source here, path there, whether it is read-only. `read_only`: nothing is
    written outside of volumes. `on_host`: it is in this machine's network."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    volumes: Sequence[tuple[Path, str, bool]]
    aliases: Sequence[str] = ()
    user: tuple[int, int] = (0, 0)
    read_only: bool = False
    on_host: bool = False


@dataclass
class Container:
    """start -> (kill | stop | wait) -> start again, with the files that it wrote outside volumes."""

    network: Network
    spec: Spec
    folder: Path
    address: str = field(init=False)
    _process: "subprocess.Popen[str] | None" = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.root = self.folder / "root"
        self.root.mkdir(parents=True, exist_ok=True)
        self.address = self.network.add(self.spec.name, *self.spec.aliases)

    def start(self) -> None:
        hosts = self.folder / "hosts"
        lines = ["127.0.0.1 localhost", *map(" ".join, self.network.hosts)]
        hosts.write_text("\n".join(lines) + "\n")
        volumes = [(str(hosts), "/etc/hosts", True), *self.spec.volumes]
        given = {
            "hostname": self.spec.name,
            "root": str(self.root),
            "address": "" if self.spec.on_host else f"{self.address}/24",
            "gateway": self.network.address,
            "command": list(self.spec.command),
            "environment": dict(self.spec.environment),
            "user": self.spec.user,
            "read_only": self.spec.read_only,
            "volumes": [(str(source), path, read_only) for source, path, read_only in volumes],
        }
        spec_file = self.folder / "spec.json"
        spec_file.write_text(json.dumps(given))
        init = str(Path(__file__).with_name("container_init.py"))
        apart = [*_NAMESPACES, *([] if self.spec.on_host else ["--net"])]
        with (self.folder / "err").open("ab") as err:
            self._process = subprocess.Popen(
                tied([str(shutil.which("unshare")), *apart, sys.executable, init, str(spec_file)]),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, text=True,
                env={key: os.environ[key] for key in ("PATH", "PYTHONPATH") if key in os.environ},
            )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", self.tail()
        threading.Thread(target=self._copy_output, args=(self._process,), daemon=True).start()
        if not self.spec.on_host:
            self.network.connect(self._process.pid, self.address)
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        deadline = time.monotonic() + _SECONDS
        while self.pid == 0 and self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)

    def _copy_output(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with (self.folder / "out").open("a") as out:
            for line in process.stdout:
                out.write(line)

    @property
    def pid(self) -> int:
        """Process id of the command on this machine. 0 if it does not run."""
        if self._process is None or self._process.poll() is not None:
            return 0
        try:
            init = psutil.Process(self._process.pid).children()
            command = init[0].children() if init else []
        except psutil.NoSuchProcess:
            return 0
        return int(command[0].pid) if command else 0

    def listening(self) -> list[Port]:
        """All listening TCP sockets of its network. psutil only reads this machine's network."""
        rows = [
            line.split()
            for table in ("tcp", "tcp6")
            for line in Path(f"/proc/{self.pid}/net/{table}").read_text().splitlines()[1:]
        ]
        places = [row[1].split(":") for row in rows if row[3] == _LISTENS]
        return sorted({Port(self.spec.name, _host(host), int(port, 16)) for host, port in places})

    def kill(self) -> None:
        """kill -9 of only the command. Its init then ends, and with it the container."""
        os.kill(self.pid, signal.SIGKILL)

    def stop(self, grace_seconds: float) -> int:
        """SIGTERM, and SIGKILL after the grace; the exit code, or 137."""
        if (pid := self.pid) != 0:
            os.kill(pid, signal.SIGTERM)
        assert self._process is not None
        try:
            return self._process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            return self.destroy()

    def wait(self, seconds: float | None = None) -> int:
        assert self._process is not None
        return self._process.wait(seconds)

    def destroy(self) -> int:
        if self._process is not None:
            self._process.kill()  # and with it, by --kill-child, every process of the container
            self._process.wait()
        return 137

    def execute(self, command: Sequence[str], seconds: float = _SECONDS) -> "subprocess.CompletedProcess[str]":
        """Run a command in the container, with its environment, as its user."""
        return subprocess.run(
            self.beside(command), env=dict(self.spec.environment), capture_output=True, text=True, timeout=seconds
        )

    def beside(self, command: Sequence[str]) -> list[str]:
        """The command line that runs a command in the container's namespaces, as its user."""
        user, group = self.spec.user
        where = ["-t", str(self.pid), "-n", "-m", "-u", "-p", "-i", "--root", "--wd"]
        return ["nsenter", *where, f"--setgid={group}", f"--setuid={user}", *command]

    def output(self) -> str:
        return "".join(
            (self.folder / name).read_text(errors="replace") for name in ("out", "err") if (self.folder / name).exists()
        )

    def tail(self) -> str:
        return "\n".join(self.output().splitlines()[-15:])


def image_volumes() -> list[tuple[Path, str, bool]]:
    """In place of an image: this test's Python, its packages and the sources, read-only, where they are here."""
    roots = {Path(sys.prefix), Path(sys.base_prefix), *map(Path, os.environ.get("PYTHONPATH", "").split(":"))}
    roots |= {Path(__file__).parents[3], nats.find_binary().parent}
    roots = {one for one in roots if one.is_dir() and not one.is_relative_to("/usr")}
    own = {one for one in roots if not any(one != other and one.is_relative_to(other) for other in roots)}
    return [(one, str(one), True) for one in sorted(own)]


def image_environment() -> dict[str, str]:
    """Variables of an image, and settings for tests on few cores."""
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": "/tmp",
        "HF_HUB_OFFLINE": "1",
        # The cores are those of all services, as in every test (conftest.py).
        "OMP_NUM_THREADS": "1",
        **({"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}),
    }


def program(name: str) -> str:
    """The path of a command of an image: nats-server, one of Trinity's, or the system's."""
    if name == "nats-server":
        return str(nats.find_binary())
    own = Path(sys.executable).with_name(name)
    return str(own if own.exists() else shutil.which(name) or name)


def forward(listener: socket.socket, inner: tuple[str, int]) -> None:
    """Copy every connection of a listener to another address, both ways; for a thread. Ends with the listener."""
    while True:
        try:
            outer, _ = listener.accept()
        except OSError:
            return
        try:
            connected = socket.create_connection(inner, 10)
        except OSError:
            outer.close()
            continue
        connected.settimeout(None)
        for one, other in ((outer, connected), (connected, outer)):
            threading.Thread(target=_copy, args=(one, other), daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass
    for one in (source, target):
        try:
            one.shutdown(socket.SHUT_RDWR)
        except OSError:
            one.close()


def _host(digits: str) -> str:
    """An address of /proc/net/tcp or tcp6: words of four bytes, each with the last byte first (proc_net_tcp(5))."""
    raw = bytes.fromhex(digits)
    return str(ipaddress.ip_address(b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))))


def _ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True, timeout=_SECONDS)
