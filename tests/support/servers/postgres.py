"""A real PostgreSQL server for a test: a free port, a password, a separate data folder, ended with the tests.

The programs are those of the PyPI wheel `pgserver`, or this machine's. PostgreSQL refuses to run as root: then it runs
as `nobody`, from a copy of the programs if that user cannot reach them.
"""

import grp
import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg

from trinity.runtime.process import free_port

_SETUP_SECONDS = 60
_START_SECONDS = 30.0
_STOP_SECONDS = 20
_USER = "nobody"
_PASSWORD = "sums"
# The server ends when the shell's input does: when `end` closes it, and when the tests die.
_TIED = '"$@" & pid=$!; read -r _; kill -QUIT $pid; wait $pid'


def find_programs() -> Path | None:
    """The folder with `initdb` and `postgres`; None if there is none."""
    wheel = importlib.util.find_spec("pgserver")
    places = [Path(wheel.origin).parent / "pginstall" / "bin"] if wheel is not None and wheel.origin else []
    places += [Path(found).resolve().parent for found in [shutil.which("postgres")] if found]
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((place for place in places if (place / "initdb").exists() and (place / "postgres").exists()), None)


class PostgresServer:
    """start -> end -> start again on the same port and data -> remove. `url` names its empty database `postgres`."""

    def __init__(self, programs: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="trinity-postgres-"))
        self._data = self._folder / "data"
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._as: dict[str, Any] = {"cwd": self._folder}
        if os.getuid() == 0:
            group = grp.getgrgid(65534).gr_name  # nogroup or nobody
            self._as |= {"user": _USER, "group": group, "extra_groups": []}
            shutil.chown(self._folder, _USER)
        self._programs = self._reachable(programs)

    @property
    def url(self) -> str:
        return f"postgresql://trinity:{_PASSWORD}@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        if not self._data.exists():
            self._set_up()
        options = {"listen_addresses": "127.0.0.1", "port": self._port, "unix_socket_directories": "", "fsync": "off"}
        command = [str(self._programs / "postgres"), "-D", str(self._data)]
        command += [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        with self._output.open("ab") as out:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _TIED, "sh", *command], stdin=subprocess.PIPE, stdout=out, stderr=out, **self._as
            )
        assert self._wait_until_open(), self._output.read_text()

    def end(self) -> None:
        """Stops like a crash: connections break, and committed data is there after the next start."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(_STOP_SECONDS)
            self._process = None

    def remove(self) -> None:
        self.end()
        shutil.rmtree(self._folder)

    @property
    def _output(self) -> Path:
        return self._folder / "postgres.out"

    def _set_up(self) -> None:
        password = self._folder / "password"
        password.write_text(_PASSWORD)
        options = ["--auth=scram-sha-256", "--username=trinity", f"--pwfile={password}", "--encoding=UTF8"]
        command = [str(self._programs / "initdb"), "-D", str(self._data), "--locale=C", "--no-sync", *options]
        made = subprocess.run(command, capture_output=True, timeout=_SETUP_SECONDS, **self._as)
        assert made.returncode == 0, made.stderr.decode()

    def _reachable(self, programs: Path) -> Path:
        """The programs at a place where the server's user can run them, with the libraries of the wheel."""
        if subprocess.run(["test", "-x", str(programs / "postgres")], **self._as).returncode == 0:
            return programs
        wheel = programs.parents[2]
        for part in ("pgserver/pginstall", "pgserver.libs"):
            shutil.copytree(wheel / part, self._folder / part)
        return self._folder / "pgserver" / "pginstall" / "bin"

    def _wait_until_open(self) -> bool:
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end and self._process is not None:
            try:
                psycopg.connect(self.url, connect_timeout=2).close()
                return True
            except psycopg.OperationalError:
                time.sleep(0.05)
        return False
