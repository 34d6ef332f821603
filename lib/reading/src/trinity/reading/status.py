"""The state of a live run: its processes, with health and weights, its groups, weights, providers and alarms."""

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from trinity.config.run_record import Addresses
from trinity.reading import alarms, series, wire
from trinity.reading import job as jobs
from trinity.reading.accounts import fates, lives
from trinity.reading.client import Sync, Watcher, provider_facts
from trinity.reading.errors import RunError
from trinity.reading.find import AnnouncedRun
from trinity.reading.nats import wait_until_open
from trinity.runtime import rpc
from trinity.runtime.logs import without_credentials
from trinity.runtime.process import is_alive
from trinity.runtime.trust.roles import Role

_CALL_SECONDS = 2.0
_NEWEST_VERSIONS = 5
_ALARM_STEPS = 20  # of monitors
_GROUPS = (
    "fed", "stored", "dead_letters", "outstanding", "cut_tasks", "late_groups", "duplicates_dropped",
    "failed_attempts", "failing", "prompts_cut", "moved_episodes",
)  # fmt: skip


async def collect(folder: Path) -> dict[str, Any]:
    """Returns all that `trinity status --json` prints. Raises RunError if the services reject this command."""
    jobs.identify(folder, Role.READER)
    return await _collect(str(folder), jobs.read_records(folder))


async def collect_announced(run: AnnouncedRun) -> dict[str, Any]:
    """Returns the same for a run that only its NATS knows: without `job`, process ids and restarts."""
    jobs.identify(None, Role.READER)
    about = run.about
    processes = [
        jobs.ProcessRecord(name, name, 0, address) for name, address in asdict(about.addresses).items() if address
    ]
    main = jobs.SupervisorRecord(0, about.config.mode, about.run, about.stage, run.nats_url, processes)
    return await _collect(None, {"main": main})


async def _collect(job: str | None, records: dict[str, jobs.SupervisorRecord]) -> dict[str, Any]:
    processes = [process for record in records.values() for process in record.processes]
    main = records.get("main") or next(iter(records.values()))
    # Further machines of the trainer may be in the same folder; their processes have its service, and only health.
    addresses = {process.service: process.address for process in [*processes, *main.processes]}
    watcher = Watcher(
        main.run,
        Addresses(addresses.get("buffer", ""), "", addresses.get("sync", ""), addresses.get("trainer", "")),
    )
    try:
        view = await watcher.refresh()
        watcher.raise_if_refused()
        health = await asyncio.gather(*(_health(process) for process in processes))
        weights = await _weights(addresses.get("sync", ""), main.run)
        providers = await provider_facts(address, []) if (address := addresses.get("environment", "")) else []
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
            "pid": process.pid or None,
            "address": process.address,
            "metrics": process.metrics,
            "health": state,
            "weight_version": _version(process, members.get(process.pid), versions),
            "restarts": process.restarts if process.pid else None,
            "log": process.log,
        }
        for process, state in zip(processes, health, strict=True)
    ]
    stats = view.buffer
    counts = wire.counts(stats) if stats else None
    found = {
        "job": job,
        "run": main.run,
        "stage": main.stage,
        "mode": main.mode,
        "supervisor_pid": main.pid or None,
        "nats_url": without_credentials(main.nats_url),
        "step": view.trainer.step if view.trainer else None,
        "last_step": view.trainer.last_step if view.trainer else None,
        "trainer_state": view.trainer.state if view.trainer else None,
        "nodes": [{"name": one.name, "ranks": one.ranks} for one in view.trainer.nodes] if view.trainer else [],
        "losses": _losses(Path(job) / main.stage) if job else [],
        "waiting_for": view.waiting_for or (stats.waiting_for if stats else ""),
        "groups": {name: counts[name] for name in _GROUPS} if counts else None,
        "tokens_per_second": view.tokens_per_second,
        "weights": weights,
        "providers": providers,
        "explorers": [asdict(wire.member(member)) for member in view.members],
        "processes": shown,
    }
    return found | {"alarms": [asdict(one) for one in _alarms(found, counts)]}


def _losses(stage: Path) -> list[dict[str, Any]]:
    """Returns what the ends of the trainer's processes cost, by cause; reads steps only after such an end."""
    watches = [watch for watch in lives.read(stage) if watch.service == "trainer"]
    return fates.losses(watches, fates.read_steps(stage)) if any(watch.kills for watch in watches) else []


def _alarms(found: dict[str, Any], counts: dict[str, Any] | None) -> list[alarms.Alarm]:
    """Returns the alarms of the live stage. Measurements of its monitor count if its folder is here."""
    job = Path(found["job"]) if found["job"] else None
    stage = job / found["stage"] if job is not None and (job / found["stage"] / "config.json").exists() else job
    trainer, explorer = (series.read(stage, role, _ALARM_STEPS) for role in ("trainer", "explorer"))
    return alarms.alarms(alarms.Known(counts, found, trainer, explorer, alarms.disk_of(job)))


async def _weights(address: str, run: str) -> dict[str, Any] | None:
    """Returns the LIVE version and the newest ones above it; None if no sync service answers."""
    if not address:
        return None
    async with rpc.channel(address) as channel:
        try:
            versions = await Sync(channel, run).versions(_NEWEST_VERSIONS, _CALL_SECONDS)
        except RunError:
            return None
    live = next((one.version for one in versions if one.state == "LIVE"), None)
    newer = [one for one in versions if live is None or one.version > live]
    return {"live": live, "newer": [{"version": v.version, "state": v.state, "reason": v.reason} for v in newer]}


def _version(process: jobs.ProcessRecord, member: Any, versions: dict[str, int | None]) -> int | None:
    if process.service == "explorer":
        return member.version if member is not None else None
    return versions.get(process.service)


async def _health(process: jobs.ProcessRecord) -> str:
    is_local = process.pid > 0
    if is_local and not is_alive(process.pid):
        return "DEAD"
    host, _, port = process.address.rpartition(":")
    if process.service in ("nats", "container"):
        return "SERVING" if await asyncio.to_thread(wait_until_open, host, int(port), 1.0) else "NOT_SERVING"
    async with rpc.channel(process.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            starts = is_local and error.code() is grpc.StatusCode.UNAVAILABLE
            return "STARTING" if starts else error.code().name
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
