"""The processes of one stage on this machine: commands, settings, ports."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from trinity.cli.supervise import nats
from trinity.cli.supervise.children import Child
from trinity.cli.supervise.devices import Placement
from trinity.config import Plan
from trinity.runtime.process import free_port, tied

# Where services listen and are announced: explorers on other machines need an address of this one.
_LOCAL = "127.0.0.1"
_HOST = os.environ.get("TRINITY_HOST", _LOCAL)
# The experience log may fill this part of what is free on the disk, and no more than the limit.
# Settings of the buffer that may be set in the environment of `trinity run`.
_BUFFER_LIMITS = ("LOG_GIB", "LOG_KEEP_GIB", "CACHE_MIB", "NATS_REPLICAS")
_LOG_PART, _LOG_LIMIT_GIB = 0.1, 16.0


@dataclass(frozen=True)
class Addresses:
    """Where the services of a stage listen."""

    buffer: str = ""
    environment: str = ""
    sync: str = ""
    trainer: str = ""


def nats_child(folder: Path, log_dir: Path) -> tuple[Child, str]:
    """The embedded nats-server and its URL."""
    binary = nats.find_binary()
    port, monitor = free_port(), free_port()
    config = nats.write_config(folder, port, monitor)
    child = Child(
        name="nats",
        service="nats",
        command=tied([str(binary), "-c", str(config)]),
        environment={},
        address=f"{_LOCAL}:{port}",
        log_file=log_dir / "nats.log",
        metrics=f"{_LOCAL}:{monitor}",
    )
    return child, f"nats://{_LOCAL}:{port}"


def _service(
    name: str, log_dir: Path, settings: dict[str, str], *, instance: str = "", once: bool = False, address: str = ""
) -> Child:
    instance = instance or name
    address, metrics = address or f"{_HOST}:{free_port()}", f"{_LOCAL}:{free_port()}"
    log_file = log_dir / f"{instance}.log"
    prefix = f"TRINITY_{name.upper()}_"
    common = {
        "LISTEN": address,
        "METRICS_LISTEN": metrics,
        "LOG_FILE": str(log_file),
        "STOP_WITH_PARENT": "1",
        "LOG_LEVEL": os.environ.get("TRINITY_LOG_LEVEL", "INFO"),
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
    )
    if once:
        child.environment = {**child.environment, f"{prefix}ANNOUNCE_FILE": str(child.announce_file)}
    return child


def infrastructure(plan: Plan, config_file: Path, nats_url: str, log_dir: Path) -> tuple[list[Child], Addresses]:
    """buffer, and what explorers need: environment and sync."""
    plan.job_dir.mkdir(parents=True, exist_ok=True)
    log_gib = max(0.25, min(_LOG_LIMIT_GIB, nats.free_gib(plan.job_dir) * _LOG_PART))
    settings = {"CONFIG_FILE": str(config_file), "NATS_URL": nats_url, "LOG_GIB": f"{log_gib:.2f}"}
    settings |= {key: value for key in _BUFFER_LIMITS if (value := os.environ.get(f"TRINITY_BUFFER_{key}"))}
    children = [_service("buffer", log_dir, settings | _plugin_settings())]
    if not plan.offline:
        # Providers that attach need an address that stays.
        listen = os.environ.get("TRINITY_ENVIRONMENT_LISTEN", "")
        children.append(_service("environment", log_dir, _plugin_settings(), address=listen))
        children.append(_service("sync", log_dir, {"NATS_URL": nats_url}))
    by_name = {child.name: child.address for child in children}
    return children, Addresses(**by_name)


def reader(config_file: Path, nats_url: str, log_dir: Path) -> Child:
    """A buffer that only reads what a run has stored."""
    return _service("buffer", log_dir, {"CONFIG_FILE": str(config_file), "NATS_URL": nats_url, "READ_ONLY": "1"})


def explorer(
    plan: Plan,
    config_file: Path,
    nats_url: str,
    addresses: Addresses,
    log_dir: Path,
    placement: Placement,
    serving: dict[str, str] | None = None,
) -> Child:
    """An explorer; with `serving` one that answers at an OpenAI-compatible endpoint instead of working on tasks."""
    settings = {
        "CONFIG_FILE": str(config_file),
        "NATS_URL": nats_url,
        "SYNC_ADDRESS": addresses.sync or f"{_HOST}:1",
        "ENVIRONMENT_ADDRESS": addresses.environment or f"{_HOST}:1",
        "DEVICE": placement.device,
        "DEVICES": ",".join(placement.explorer),
        **_plugin_settings(),
        **(serving or {}),
    }
    child = _service("explorer", log_dir, settings, instance=plan.config.explorer.name)
    child.environment = {**child.environment, **plan.config.explorer.env_vars}
    child.gpus = placement.explorer
    return child


def _plugin_settings() -> dict[str, str]:
    folders = os.environ.get("TRINITY_PLUGIN_DIRS", "").replace(",", os.pathsep)
    return {"PLUGIN_DIRS": folders} if folders else {}


def trainer(
    config_file: Path,
    addresses: Addresses,
    log_dir: Path,
    placement: Placement,
    replaying: dict[str, str] | None = None,
    nats_url: str = "",
) -> Child:
    """The trainer; with `replaying` one that trains steps again for comparison alone, and publishes nothing."""
    settings = {
        "CONFIG_FILE": str(config_file),
        "BUFFER_ADDRESS": addresses.buffer,
        "SYNC_ADDRESS": addresses.sync or f"{_HOST}:1",
        "DEVICE": placement.device,
        "NUM_RANKS": str(placement.trainer_ranks),
        **({"NATS_URL": nats_url} if nats_url else {}),
        **(replaying or {}),
    }
    child = _service("trainer", log_dir, settings, once=True)
    child.gpus = placement.trainer
    if placement.trainer:
        child.environment = {**child.environment, "CUDA_VISIBLE_DEVICES": ",".join(placement.trainer)}
    return child
