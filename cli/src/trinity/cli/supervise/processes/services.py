"""The processes of one stage on this machine: commands, settings, ports."""

import atexit
import os
import secrets
import shutil
import socket
from dataclasses import asdict
from pathlib import Path

from trinity.cli.supervise.processes.devices import Placement
from trinity.config import Plan, Problem
from trinity.config.run_record import Addresses
from trinity.reading import nats
from trinity.reading.accounts import device_log
from trinity.reading.children import Child
from trinity.reading.errors import RunError
from trinity.reading.nats import NatsAccess
from trinity.reading.processes import HOST, plugin_settings, service_child
from trinity.runtime import leases, names
from trinity.runtime.process import tied
from trinity.runtime.settings import NO_RUN
from trinity.runtime.trust import attach_tokens
from trinity.runtime.trust.roles import Role

# The experience log may fill this part of the free disk space, up to the limit.
_LOG_PART, _LOG_LIMIT_GIB = 0.1, 16.0
_PROCESSES = 4096  # of a container
NODE_DRAIN_SECONDS = 600.0  # a node that leaves waits for the trainer's checkpoint


def infrastructure(
    plan: Plan, config_file: Path, broker: NatsAccess, log_dir: Path, job_folder: Path
) -> tuple[list[Child], Addresses]:
    """Returns the buffer, and the services of explorers: environment and sync."""
    plan.job_dir.mkdir(parents=True, exist_ok=True)
    run = run_id_of(plan)
    settings = {
        "CONFIG_FILE": str(config_file),
        "LOG_GIB": log_limit_gib(plan),
        **broker.settings(Role.BUFFER, run),
    }
    children = [service_child("buffer", log_dir, settings | plugin_settings())]
    if not plan.offline:
        lines = {**broker.settings(Role.ENVIRONMENT, run), "LOG_RUN": run}
        children.append(environment(log_dir, job_folder, lines))
        settings = {**broker.settings(Role.SYNC, run), "LOG_RUN": run, "JOB_FOLDER": str(plan.job_dir)}
        children.append(service_child("sync", log_dir, settings))
    by_name = {child.name: child.address for child in children}
    return [*children, *([] if plan.offline else containers(plan, log_dir))], Addresses(**by_name)


def log_limit_gib(plan: Plan) -> str:
    """Returns the limit of the experience log, as given or as fits the disk."""
    if given := os.environ.get("TRINITY_BUFFER_LOG_GIB"):
        return given
    place = next(folder for folder in (plan.job_dir, *plan.job_dir.parents) if folder.exists())
    return f"{max(0.25, min(_LOG_LIMIT_GIB, nats.free_gib(place) * _LOG_PART)):.2f}"


def container_problems(plan: Plan) -> list[Problem]:
    """Returns why environments with an image cannot start on this machine."""
    allowed = leases.containers_allowed()
    if allowed and shutil.which("docker"):
        return []
    fix = f"set {leases.CONTAINERS_VARIABLE}=true for images that you trust"
    why = "docker is not on PATH; install it" if allowed else f"this machine allows no containers; {fix}"
    with_image = [index for index, one in enumerate(plan.config.explorer.environments) if one.image]
    return [Problem(f"explorer.environments.{index}.image", why) for index in with_image]


def containers(plan: Plan, log_dir: Path) -> list[Child]:
    """Returns the environments with an image. Each is a lease of this process and ends with it, however that ends."""
    if problems := container_problems(plan):
        raise RunError(str(problems[0]), 2)
    made = []
    for index, one in enumerate(plan.config.explorer.environments):
        if not one.image:
            continue
        name = f"trinity-{secrets.token_hex(8)}"
        atexit.register(leases.Lease.take(float("inf"), container=name).end)
        made.append(
            Child(
                name=f"environment-{index}",
                service="container",
                command=tied(_container_line(name, one.image, one.address)),
                environment={},
                address=one.address,
                log_file=log_dir / f"environment-{index}.log",
            )
        )
    return made


def _container_line(name: str, image: str, address: str) -> list[str]:
    """The command that serves environments from an image until it ends. It removes a container of the same name first,
    and publishes the port of the address."""
    port = address.rpartition(":")[2]
    return [
        *("/bin/sh", "-c", 'docker rm --force --volumes "$0" > /dev/null 2>&1; exec docker "$@"', name),
        *("run", "--rm", "--name", name, "--label", "trinity.environment", "--publish", f"{address}:{port}"),
        *leases.docker_limits(leases.most_mib(), leases.most_mib(), _PROCESSES, network=True),
        image,
    ]


def environment(log_dir: Path, job_folder: Path, lines: dict[str, str]) -> Child:
    """Returns the environment service. `lines`: settings for the destination of its log lines."""
    # Providers that attach need an address that stays.
    listen = os.environ.get("TRINITY_ENVIRONMENT_LISTEN", "")
    tokens = os.environ.get("TRINITY_ENVIRONMENT_ATTACH_TOKENS_FILE") or str(job_folder / attach_tokens.FILE_NAME)
    settings = {"ATTACH_TOKENS_FILE": tokens, **lines, **plugin_settings()}
    return service_child("environment", log_dir, settings, address=listen)


def announce(buffer: Child, addresses: Addresses) -> None:
    """Gives the buffer the addresses that it announces with its own."""
    others = {name: address for name, address in asdict(addresses).items() if name != "buffer"}
    told = {f"TRINITY_BUFFER_{name.upper()}_ADDRESS": address for name, address in others.items()}
    buffer.environment = {**buffer.environment, **told}


def run_id_of(plan: Plan) -> str:
    return names.run_id(plan.config.project, plan.config.name, plan.config.group)


def explorer(
    plan: Plan,
    config_file: Path,
    broker: NatsAccess,
    addresses: Addresses,
    log_dir: Path,
    placement: Placement,
    serving: dict[str, str] | None = None,
) -> Child:
    """Returns an explorer. With `serving` it answers at an OpenAI-compatible endpoint instead of working on tasks."""
    given = os.environ.get("TRINITY_EXPLORER_NAME", "").replace("{host}", socket.gethostname())
    settings = {
        "CONFIG_FILE": str(config_file),
        **broker.settings(Role.EXPLORER, run_id_of(plan), given or plan.config.explorer.name),
        "SYNC_ADDRESS": addresses.sync or f"{HOST}:1",
        "ENVIRONMENT_ADDRESS": addresses.environment or f"{HOST}:1",
        "DEVICE": placement.device,
        "DEVICES": ",".join(placement.explorer),
        "ACCOUNT_DIR": str(device_log.folder_of(plan.job_dir)),
        **_shared_gpu(placement),
        **plugin_settings(),
        **({} if addresses.sync else {"LOG_RUN": NO_RUN}),
        **(serving or {}),
    }
    child = service_child("explorer", log_dir, settings, instance=plan.config.explorer.name)
    child.environment = {**child.environment, **plan.config.explorer.env_vars}
    child.gpus = placement.explorer
    return child


def _shared_gpu(placement: Placement) -> dict[str, str]:
    """NCCL does not connect two processes on one GPU, so weights come by storage."""
    if placement.split is None:
        return {}
    return {"GPU_MEMORY_GIB": f"{placement.split.engine:.2f}", "TRANSPORTS": "folder,s3,jetstream"}


def trainer(
    config_file: Path,
    addresses: Addresses,
    log_dir: Path,
    placement: Placement,
    replaying: dict[str, str] | None = None,
    broker: dict[str, str] | None = None,
    instance: str = "",
) -> Child:
    """Returns the trainer. With `replaying` it trains steps again for comparison and publishes nothing.

    `broker`: settings of its NATS. `instance`: name of a further node, which joins the trainer in `addresses`.
    """
    settings = {
        "CONFIG_FILE": str(config_file),
        "BUFFER_ADDRESS": addresses.buffer,
        "SYNC_ADDRESS": addresses.sync or f"{HOST}:1",
        "DEVICE": placement.device,
        "NUM_RANKS": str(placement.trainer_ranks),
        **({"GPU_MEMORY_GIB": f"{placement.split.trainer:.2f}"} if placement.split else {}),
        **(broker or {"LOG_RUN": NO_RUN}),
        **plugin_settings(),
        **(replaying or {}),
        **({"FIRST_ADDRESS": addresses.trainer, "DRAIN_SECONDS": f"{NODE_DRAIN_SECONDS:g}"} if instance else {}),
    }
    child = service_child("trainer", log_dir, settings, once=True, instance=instance)
    child.gpus = placement.trainer
    if placement.trainer:
        child.environment = {**child.environment, "CUDA_VISIBLE_DEVICES": ",".join(placement.trainer)}
    return child
