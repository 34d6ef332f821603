"""Processes that commands start for a run: the embedded nats-server, and services on this machine."""

import asyncio
import os
import sys
import time
from pathlib import Path

from trinity.reading import job as jobs
from trinity.reading.children import Child, stop_all
from trinity.reading.errors import RunError
from trinity.reading.nats import NatsAccess, find_binary, open_accounts, write_config
from trinity.runtime.errors import Unavailable
from trinity.runtime.process import free_port, tied
from trinity.runtime.trust import identity
from trinity.runtime.trust.roles import Role

# Where services listen and are announced: explorers on other machines need an address of this one.
_LOCAL = "127.0.0.1"
HOST = os.environ.get("TRINITY_HOST") or _LOCAL
_NATS_SECONDS = 20.0
_NATS_STARTS = 5
_NATS_READY, _PORT_TAKEN = "Server is ready", "address already in use"  # as nats-server prints it
_STOP_SECONDS = 2.0


def nats_child(folder: Path, users: Path, log_dir: Path) -> tuple[Child, NatsAccess]:
    """Returns the embedded nats-server with the accounts of the folder `users`, and the access to it.

    With a certificate (`TRINITY_NATS_IDENTITY`) it listens with TLS where other machines reach it.
    """
    binary = find_binary()
    given = os.environ.get("TRINITY_NATS_IDENTITY")
    host, certificate = (HOST, Path(given)) if given else (_LOCAL, None)
    port, monitor = _port_of(host), free_port()
    open_accounts(folder, users)
    config = write_config(folder, port, monitor, users, host, certificate)
    child = Child(
        name="nats",
        service="nats",
        command=tied([str(binary), "-c", str(config)]),
        environment={},
        address=f"{host}:{port}",
        log_file=log_dir / "nats.log",
        metrics=f"{_LOCAL}:{monitor}",
        prints_ready=_NATS_READY,
    )
    return child, NatsAccess(f"nats://{host}:{port}", users)


def _port_of(host: str) -> int:
    """Returns a free port of TRINITY_HOST. Raises RunError if services cannot listen there."""
    try:
        return free_port(host)
    except OSError as error:
        fix = "give an IPv4 address of this machine, or a name of one; 127.0.0.1 is the default"
        raise RunError(f"TRINITY_HOST: no service can listen on {host!r} ({error.strerror}); {fix}", 2) from None


def service_child(
    name: str, log_dir: Path, settings: dict[str, str], *, instance: str = "", once: bool = False, address: str = ""
) -> Child:
    instance = instance or name
    address, metrics = address or f"{HOST}:{_port_of(HOST)}", f"{_LOCAL}:{free_port()}"
    log_file = log_dir / f"{instance}.log"
    prefix = f"TRINITY_{name.upper()}_"
    own = identity.own()
    if own is not None and own.tls is not None and f"{prefix}TLS_CERT" not in os.environ:
        fix = f"name the files of `trinity certs issue {name}`, or unset TRINITY_TLS_* for a run on one machine"
        raise RunError(f"{prefix}TLS_CERT is not set, but TRINITY_TLS_CERT is: {fix}", 2)
    if own is not None:
        own.check_address(address, f"address of {instance}")
    common = {
        "LISTEN": address,
        "METRICS_LISTEN": metrics,
        "LOG_FILE": str(log_file),
        "STOP_WITH_PARENT": "1",
        "LOG_LEVEL": os.environ.get("TRINITY_LOG_LEVEL", "INFO"),
        **({"IDENTITY_FOLDER": str(own.folder)} if own is not None and own.folder is not None else {}),
        **({"INSECURE": "1"} if own is not None and own.insecure else {}),
    }
    environment = {f"{prefix}{key}": value for key, value in {**common, **settings}.items()}
    child = Child(
        name=instance,
        service=name,
        command=[sys.executable, "-m", f"trinity.{name}.main", "serve"],
        environment={**environment, "PYTHONUNBUFFERED": "1"},
        address=address,
        log_file=log_file,
        metrics=metrics,
        once=once,
        logs_ready=True,
    )
    if once:
        child.environment = {**child.environment, f"{prefix}ANNOUNCE_FILE": str(child.announce_file)}
    return child


def reader_child(config_file: Path, broker: NatsAccess, run: str, log_dir: Path) -> Child:
    """Returns a read-only buffer of a run."""
    settings = {
        "CONFIG_FILE": str(config_file),
        "READ_ONLY": "1",
        **broker.settings(Role.OPERATOR, run, "reader"),
        **plugin_settings(),
    }
    return service_child("buffer", log_dir, settings)


def plugin_settings() -> dict[str, str]:
    folders = os.environ.get("TRINITY_PLUGIN_DIRS", "").replace(",", os.pathsep)
    return {"PLUGIN_DIRS": folders} if folders else {}


async def open_nats(job: jobs.Job, others: list[Child], stop: asyncio.Event) -> NatsAccess:
    """Returns the NATS to use. Starts the embedded one unless TRINITY_NATS_URL names another."""
    given = os.environ.get("TRINITY_NATS_URL")
    if given:
        nats = NatsAccess(given)
    else:
        nats = await _start_nats(job, others)
    connecting = asyncio.create_task(nats.connect("trinity-run", job.token, wait_seconds=_NATS_SECONDS))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([connecting, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not connecting.done():
        connecting.cancel()
        return nats
    try:
        await (await connecting).close()
    except Unavailable as error:
        named = "TRINITY_NATS_URL: " if given else ""
        raise RunError(f"{named}{error}") from None
    return nats


async def _start_nats(job: jobs.Job, others: list[Child]) -> NatsAccess:
    """Starts the server again with other ports if another process takes them before it listens."""
    for starts in range(1, _NATS_STARTS + 1):
        child, nats = nats_child(job.folder / "nats", job.folder / "identity" / "nats", job.folder / "log")
        child.start()
        others.append(child)
        deadline = time.monotonic() + _NATS_SECONDS
        while child.is_running() and not child.has_printed(_NATS_READY) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if child.is_running() and child.has_printed(_NATS_READY):
            break
        await stop_all([others.pop()], _STOP_SECONDS)
        if not child.has_printed(_PORT_TAKEN) or starts == _NATS_STARTS:
            raise RunError(f"the embedded nats-server did not start: {child.last_error()} (see {child.output})")
    return nats
