"""`trinity status`: every process of a live run, with its health and the weights it serves."""

import asyncio
import os
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console
from rich.table import Table

from trinity.cli import job as jobs
from trinity.cli.errors import RunError
from trinity.cli.nats import wait_until_open
from trinity.cli.services import Addresses
from trinity.cli.watch import Watcher
from trinity.config import Config
from trinity.runtime import files, rpc
from trinity.runtime.checkpoints import complete_steps
from trinity.runtime.process import is_alive

_CALL_SECONDS = 2.0


def find_job(config: Config | None, folder: Path | None) -> Path:
    """The job folder asked for; else the newest live one, else the newest. RunError if there is none."""
    if config is not None:
        folder = jobs.Job(config).folder
    if folder is None:
        root = Path(os.environ.get("TRINITY_CHECKPOINT_ROOT_DIR", "./checkpoints"))
        found = [*jobs.live_jobs(root), *jobs.known_jobs(root)]
        if not found:
            raise RunError(f"no run below {root.absolute()}; name one by --config or --job")
        return found[0]
    if not jobs.is_job(folder):
        raise RunError(f"no run has begun in {folder}")
    return folder


def finished(folder: Path) -> dict[str, Any]:
    """What is known of a run that does not live: its summary, or how far its stages came."""
    summary = files.read_json(folder / "summary.json")
    stages = {str(path.parent.relative_to(folder)): complete_steps(path.parent) for path in jobs.stage_configs(folder)}
    return {
        "job": str(folder),
        "state": "finished" if isinstance(summary, dict) else "stopped",
        "checkpoints": {name: steps for name, steps in stages.items() if steps},
        "summary": summary,
    }


def render_finished(folder: Path, found: dict[str, Any]) -> str:
    """The same for people."""
    lines = [f"{folder}: {found['state']}, no process lives"]
    for name, steps in found["checkpoints"].items():
        lines.append(f"  {name if name != '.' else 'checkpoints'}: global_step_{', '.join(map(str, steps))}")
    summary = found["summary"] or {}
    for key in ("steps", "reward_first", "reward_last", "eval_before", "eval_after", "wall_seconds"):
        if summary.get(key) is not None:
            value = summary[key]
            lines.append(f"  {key}: {value:.3f}" if isinstance(value, float) else f"  {key}: {value}")
    if found["state"] == "stopped":
        lines.append("  `trinity run` with the same YAML goes on")
    return "\n".join(lines)


async def collect(folder: Path) -> dict[str, Any]:
    """Everything `trinity status --json` prints."""
    records = jobs.read_records(folder)
    processes = [process for record in records.values() for process in record.processes]
    main = records.get("main") or next(iter(records.values()))
    addresses = {process.service: process.address for process in processes}
    watcher = Watcher(
        main.run,
        Addresses(addresses.get("buffer", ""), "", addresses.get("sync", ""), addresses.get("trainer", "")),
    )
    try:
        view = await watcher.refresh()
        health = await asyncio.gather(*(_health(process) for process in processes))
    finally:
        await watcher.close()
    members = {member.pid: member for member in view.members}
    versions = {
        "trainer": view.trainer.version if view.trainer else None,
        "sync": view.buffer.live_step if view.buffer else None,
        "buffer": view.buffer.live_step if view.buffer else None,
    }
    shown = [
        {
            "name": process.name,
            "service": process.service,
            "pid": process.pid,
            "address": process.address,
            "metrics": process.metrics,
            "health": state,
            "weight_version": _version(process, members.get(process.pid), versions),
            "restarts": process.restarts,
            "log": process.log,
        }
        for process, state in zip(processes, health, strict=True)
    ]
    stats = view.buffer
    return {
        "job": str(folder),
        "run": main.run,
        "stage": main.stage,
        "mode": main.mode,
        "supervisor_pid": main.pid,
        "nats_url": main.nats_url,
        "step": view.trainer.step if view.trainer else None,
        "last_step": view.trainer.last_step if view.trainer else None,
        "trainer_state": view.trainer.state if view.trainer else None,
        "waiting_for": (view.trainer.waiting_for if view.trainer else "") or (stats.waiting_for if stats else ""),
        "groups": {
            "fed": stats.fed,
            "stored": stats.stored,
            "dead_letters": stats.dead_letters,
            "outstanding": stats.outstanding,
            "duplicates_dropped": stats.duplicates_dropped,
        }
        if stats
        else None,
        "tokens_per_second": view.tokens_per_second,
        "explorers": [
            {"name": m.explorer_id, "pid": m.pid, "host": m.host, "version": m.version, "lag": m.lag, "state": m.state}
            for m in view.members
        ],
        "processes": shown,
    }


def _version(process: jobs.ProcessRecord, member: Any, versions: dict[str, int | None]) -> int | None:
    if process.service == "explorer":
        return member.version if member is not None else None
    return versions.get(process.service)


async def _health(process: jobs.ProcessRecord) -> str:
    if not is_alive(process.pid):
        return "DEAD"
    host, _, port = process.address.rpartition(":")
    if process.service == "nats":
        return "SERVING" if await asyncio.to_thread(wait_until_open, host, int(port), 1.0) else "NOT_SERVING"
    async with rpc.channel(process.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            return "STARTING" if error.code() is grpc.StatusCode.UNAVAILABLE else error.code().name
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def render(found: dict[str, Any]) -> str:
    """The same for people."""
    table = Table(title=f"{found['job']} ({found['stage']})", title_justify="left")
    for column in ("name", "pid", "address", "health", "weights", "restarts"):
        table.add_column(column)
    for process in found["processes"]:
        version = process["weight_version"]
        table.add_row(
            process["name"],
            str(process["pid"]),
            process["address"],
            process["health"],
            "-" if version is None else str(version),
            str(process["restarts"]),
        )
    console = Console(width=110)
    with console.capture() as capture:
        console.print(table)
        console.print(f"step {found['step']}/{found['last_step']} ({found['trainer_state']}) {found['waiting_for']}")
    return capture.get().rstrip()
