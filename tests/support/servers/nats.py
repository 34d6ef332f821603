"""A real nats-server for a test: JetStream on, free ports, a separate store, killed by its pid."""

import signal
import subprocess
import sys
from pathlib import Path

from trinity.reading import nats
from trinity.runtime.process import free_port
from trinity.runtime.trust import nats_users
from trinity.runtime.trust.roles import Role
from trinity.runtime.trust.subjects import Grants

_START_SECONDS = 20.0


class NatsServer:
    """start -> kill (as a crash would) -> start again on the same port and store -> stop."""

    def __init__(
        self, folder: Path, more_config: str = "", users: Path | None = None, certificate: Path | None = None
    ) -> None:
        """`certificate`: folder of its tls.crt and tls.key; with it the server only speaks TLS."""
        self.folder = folder
        self.port, self.monitor = free_port(), free_port()
        self.users = users
        if users is not None:
            nats_users.init_accounts(users)
        self._config = nats.write_config(folder, self.port, self.monitor, users, certificate=certificate)
        self.configure(more_config)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def configure(self, more: str) -> None:
        """Lines that come after those of the embedded server's configuration."""
        self._config.write_text(self._config.read_text() + more)

    def admin(self) -> Path:
        """Credentials of a user that may do everything."""
        assert self.users is not None
        path = self.users / "admin.creds"
        path.write_text(nats_users.issue(self.users, "admin", Grants((">",), (">",))))
        return path

    def settings(self, role: Role, run: str, name: str = "") -> dict[str, str]:
        """Settings of a service that uses this server in a role."""
        return nats.NatsAccess(self.url, self.users).settings(role, run, name)

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


class ComposedNats(NatsServer):
    """nats-server with deploy/nats/nats.conf, and the other files that compose.yaml mounts."""

    def __init__(self, repository: Path, folder: Path, identity: Path) -> None:
        super().__init__(folder)
        self.monitor = free_port()
        (folder / "identity").symlink_to(identity / "nats")
        text = (repository / "deploy/nats/nats.conf").read_text()
        places = {
            "0.0.0.0:4222": f"127.0.0.1:{self.port}",
            "127.0.0.1:8222": f"127.0.0.1:{self.monitor}",
            "/data/nats": str(folder / "store"),
            "/etc/nats/identity": str(identity / "nats"),
        }
        for there, here in places.items():
            assert there in text, there
            text = text.replace(there, here)
        self._config.write_text(text)

    def read_files_again(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGHUP)


class NatsCluster:
    """Three servers as one cluster, on free ports, with separate stores. A context manager."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.nodes = [NatsServer(folder / f"node{index}") for index in range(3)]
        routes = [free_port() for _ in self.nodes]
        others = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
        for node, port in zip(self.nodes, routes, strict=True):
            node.configure(
                f"server_name: {node.folder.name}\n"
                f'cluster {{\n  name: tests\n  listen: "127.0.0.1:{port}"\n  routes: [{others}]\n}}\n'
            )

    @property
    def url(self) -> str:
        return ",".join(node.url for node in self.nodes)

    @property
    def monitors(self) -> list[str]:
        """host:port each."""
        return [f"127.0.0.1:{node.monitor}" for node in self.nodes]

    def start(self) -> None:
        for node in self.nodes:
            node.start()

    def stop(self) -> None:
        for node in self.nodes:
            node.kill()

    def __enter__(self) -> "NatsCluster":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
