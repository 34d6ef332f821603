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

from trinity.api.sync.v1 import sync_pb2, sync_pb2_grpc
from trinity.cli.errors import RunError
from trinity.cli.supervise import job as jobs
from trinity.cli.supervise.nats import wait_until_open
from trinity.cli.supervise.services import Addresses
from trinity.cli.supervise.watch import Watcher, failing
from trinity.cli.tail import visible
from trinity.cli.weight_text import brief, error_text, member_facts
from trinity.config import Config
from trinity.runtime import files, rpc
from trinity.runtime.process import is_alive
from trinity.weights.checkpoints import complete_steps

_CALL_SECONDS = 2.0
_NEWEST_VERSIONS = 5


def find_job(config: Config | None, folder: Path | None) -> Path:
    """The requested job folder, else the newest live one, else the newest. RunError if there is none."""
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
    """The state of a run that is not live: its summary, or its checkpoints."""
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
        lines.append("  `trinity run` with the same YAML resumes it")
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
        weights = await _weights(addresses.get("sync", ""), main.run)
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
            "failed_attempts": stats.failed_attempts,
            "failing": failing(stats),
        }
        if stats
        else None,
        "tokens_per_second": view.tokens_per_second,
        "weights": weights,
        "explorers": [member_facts(member) for member in view.members],
        "processes": shown,
    }


async def _weights(address: str, run: str) -> dict[str, Any] | None:
    """The LIVE version, and the newest ones above it; None where no sync service answers."""
    if not address:
        return None
    async with rpc.channel(address) as channel:
        request = sync_pb2.ListVersionsRequest(run=run, limit=_NEWEST_VERSIONS)
        try:
            stub = sync_pb2_grpc.SyncServiceStub(channel)
            versions = [brief(v) for v in (await stub.ListVersions(request, timeout=_CALL_SECONDS)).versions]
        except grpc.aio.AioRpcError:
            return None
    live = next((v["version"] for v in versions if v["state"] == "LIVE"), None)
    kept = ("version", "state", "reason")
    newer = [{key: v[key] for key in kept} for v in versions if live is None or v["version"] > live]
    return {"live": live, "newer": newer}


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
    return "\n".join([capture.get().rstrip(), *_about_failures(found), *_about_weights(found)])


def _about_failures(found: dict[str, Any]) -> list[str]:
    """A line if attempts fail or tasks died."""
    groups = found["groups"] or {}
    lines = [groups["failing"]] if groups.get("failing") else []
    if groups.get("dead_letters"):
        lines.append(f"{groups['dead_letters']} dead letters: `trinity deadletters list` shows them")
    return [visible(line) for line in lines]


def _about_weights(found: dict[str, Any]) -> list[str]:
    """A line for the versions, one for each explorer."""
    lines = []
    if found["weights"] is not None:
        live = found["weights"]["live"]
        lines.append("weights: nothing LIVE yet" if live is None else f"weights: version {live} LIVE")
        for one in found["weights"]["newer"]:
            lines[0] += f"; {one['version']} {one['state']}" + (f" ({one['reason']})" if one["reason"] else "")
    for one in found["explorers"]:
        behind = f", {one['lag']} behind" if one["lag"] else ""
        by = f" by {one['transport']}" if one["transport"] else ""
        canary = f", canary {error_text(one['canary_max_error'])}" if one["canary_max_error"] != 0 else ""
        failure = f"; {one['failure']}" if one["failure"] else ""
        serves = f"version {one['version']}{by}{behind}{canary}" if one["version"] >= 0 else "nothing served yet"
        lines.append(f"{one['name']}: {one['state']}, {serves}, {one['tokens_per_second']:.0f} tokens/s{failure}")
    return [visible(line) for line in lines]
