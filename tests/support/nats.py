"""A real nats-server for a test: JetStream on, free ports, a store of its own, killed by its own pid."""

import signal
import subprocess
import sys
from pathlib import Path

from trinity.cli.supervise import nats
from trinity.runtime.process import free_port

_START_SECONDS = 20.0


class NatsServer:
    """start -> kill (as a crash would) -> start again on the same port and store -> stop."""

    def __init__(self, folder: Path, more_config: str = "") -> None:
        self.folder = folder
        self.port = free_port()
        self._config = nats.write_config(folder, self.port, free_port())
        self._config.write_text(self._config.read_text() + more_config)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        with (self.folder / "nats.out").open("ab") as out:
            self._process = subprocess.Popen([str(nats.find_binary()), "-c", str(self._config)], stdout=out, stderr=out)
        assert nats.wait_until_open("127.0.0.1", self.port, _START_SECONDS), (self.folder / "nats.out").read_text()

    def kill(self) -> None:
        """kill -9: what was not on disk is gone."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM if sys.platform != "win32" else signal.SIGINT)

    def _end(self, signum: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(signum)
            self._process.wait(timeout=20)
            self._process = None


class NatsCluster:
    """Three servers as one cluster, on free ports, each with a store of its own. A context manager."""

    def __init__(self, folder: Path) -> None:
        self._folders = [folder / f"node{index}" for index in range(3)]
        self._ports = [free_port() for _ in self._folders]
        routes = [free_port() for _ in self._folders]
        for index, node in enumerate(self._folders):
            config = nats.write_config(node, self._ports[index], free_port())
            others = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
            cluster = f'cluster {{\n  name: tests\n  listen: "127.0.0.1:{routes[index]}"\n  routes: [{others}]\n}}\n'
            config.write_text(f"server_name: node{index}\n{config.read_text()}{cluster}")
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._ports[0]}"

    def __enter__(self) -> "NatsCluster":
        for node, port in zip(self._folders, self._ports, strict=True):
            with (node / "nats.out").open("ab") as out:
                command = [str(nats.find_binary()), "-c", str(node / "nats.conf")]
                self._processes.append(subprocess.Popen(command, stdout=out, stderr=out))
            assert nats.wait_until_open("127.0.0.1", port, _START_SECONDS), (node / "nats.out").read_text()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait(timeout=20)
