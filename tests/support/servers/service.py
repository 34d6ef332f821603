"""A real service process: its own port, its own log, killed by its own pid."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from trinity.runtime import rpc
from trinity.runtime.process import free_port
from trinity.runtime.trust.identity import Identity, of_certificate
from trinity.runtime.trust.roles import Role
from trinity.runtime.trust.tls import TlsFiles, TlsIdentity


class ServiceProcess:
    """`python -m trinity.<name>.main serve`. start -> kill -> start again, on the same address."""

    def __init__(self, name: str, folder: Path, **settings: str) -> None:
        self.name = name
        self.address = f"127.0.0.1:{free_port()}"
        self.log_file = folder / f"{name}.log"
        prefix = f"TRINITY_{name.upper()}_"
        given = {"LISTEN": self.address, "LOG_FILE": str(self.log_file), "STOP_WITH_PARENT": "1", **settings}
        self._settings = settings
        self._environment = {**os.environ, **{f"{prefix}{key}": value for key, value in given.items()}}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, wait_seconds: float = 60.0) -> "ServiceProcess":
        """Returns once it is SERVING; pass 0 not to wait."""
        with self.log_file.with_suffix(".out").open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"trinity.{self.name}.main", "serve"],
                env=self._environment,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
            )
        if wait_seconds:
            self.wait_serving(wait_seconds)
        return self

    @property
    def _identity(self) -> Identity | None:
        """For health checks: its own certificate, or the token of a reader."""
        if "TLS_CERT" in self._settings:
            tls = TlsFiles(*(Path(self._settings[file]) for file in ("TLS_CERT", "TLS_KEY", "TLS_CA")))
            return of_certificate(TlsIdentity(tls))
        tokens = self._settings.get("IDENTITY_FOLDER")
        return Identity(Role.READER, Path(tokens)) if tokens else None

    def wait_serving(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with rpc.blocking_channel(self.address, identity=self._identity) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() < deadline:
                assert self._process is not None
                assert self._process.poll() is None, f"{self.name} ended: {self.tail()}"
                try:
                    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=2, wait_for_ready=True)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                except grpc.RpcError:
                    pass
                time.sleep(0.05)
        raise AssertionError(f"{self.name} is not SERVING after {seconds:g} s: {self.tail()}")

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        return self._end(signal.SIGTERM)

    def wait(self, seconds: float) -> int:
        """Exit code of a process that ends by itself."""
        assert self._process is not None
        return self._process.wait(timeout=seconds)

    def _end(self, signum: signal.Signals) -> int:
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.send_signal(signum)
        code = self._process.wait(timeout=20)
        self._process = None
        return code

    def events(self) -> list[dict[str, object]]:
        """Its log lines."""
        text = self.log_file.read_text() if self.log_file.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def tail(self) -> str:
        out = self.log_file.with_suffix(".out")
        return "\n".join(out.read_text(errors="replace").splitlines()[-15:]) if out.exists() else ""
