"""Wiring of the buffer, and the announcement by which commands find its run in NATS."""

import asyncio
import logging

import grpc.aio
import structlog

from trinity.buffer.ledger.retention import limits_of
from trinity.buffer.metrics import watch
from trinity.buffer.readonly import ReadOnlyRun
from trinity.buffer.run import Run
from trinity.buffer.servicer import BufferServicer, ReadOnlyServicer
from trinity.buffer.settings import BufferSettings
from trinity.buffer.state.context import RunContext
from trinity.buffer.state.streams import stream_specs, traffic_spec
from trinity.config import Plan
from trinity.config.run_record import Addresses, RunRecord, announcement
from trinity.config.service import load_plan
from trinity.runtime import names
from trinity.runtime.broker import Broker, Bucket, connect, ensure_consumer, ensure_streams, is_cancelled
from trinity.runtime.log_stream import stream_spec
from trinity.runtime.version import installed_version
from trinity.weights.stores.jetstream import JetStreamStore, weights_stream

log = structlog.get_logger(__name__)

_LEASE_SECONDS = 30.0  # of the run's announcement in NATS
_RENEW_SECONDS = 5.0


class BufferService:
    name = "buffer"

    def __init__(self, settings: BufferSettings) -> None:
        self._settings = settings
        # What a run has stored is read without its plugins.
        self._plan = load_plan(
            settings.config_file, settings.stage, settings.plugin_dirs, needs_algorithm=not settings.read_only
        )
        config = self._plan.config
        self.run_id = names.run_id(config.project, config.name, config.group)
        self._servicer = ReadOnlyServicer() if settings.read_only else BufferServicer()

    def register(self, server: grpc.aio.Server) -> list[str]:
        return self._servicer.register(server)

    async def work(self, ready: asyncio.Event, address: str) -> None:
        async with await connect(self._settings.nats_url, "trinity-buffer") as broker:
            context = RunContext(broker, names.RunNames(self.run_id), self._plan)
            run = await (self._reader(context) if self._settings.read_only else self._owner(context))
            await run.open()
            self._servicer.attach(run)
            ready.set()
            async with asyncio.TaskGroup() as group:
                if not self._settings.read_only:  # such a buffer lives as long as the command that reads it
                    group.create_task(watch(run))
                    about = record(self._plan, self.run_id, address, self._settings)
                    group.create_task(keep_announced(broker, about, self._settings.nats_replicas))
                await run.run()

    async def _owner(self, context: RunContext) -> Run:
        """Opens the buffer of a live run and creates missing streams on the broker."""
        settings, broker = self._settings, context.broker
        limits = await limits_of(broker, context.names, int(settings.log_gib * 2**30))
        log_bytes, blobs_bytes = context.capacity.limit_bytes, context.capacity.blobs_limit_bytes = limits
        specs = stream_specs(
            context.names, log_bytes=log_bytes, replicas=settings.nats_replicas, blobs_bytes=blobs_bytes
        )
        lines = stream_spec(
            context.names, mib=settings.lines_mib, hours=settings.lines_hours, replicas=settings.nats_replicas
        )
        on_jetstream = JetStreamStore.kind in self._plan.config.synchronizer.storage
        weights = [weights_stream(context.names)] if on_jetstream else []
        traffic = self._plan.config.explorer.traffic
        calls = [traffic_spec(context.names, traffic, settings.nats_replicas)] if traffic is not None else []
        await ensure_streams(broker, [*specs, lines, *weights, *calls])
        for queue in (context.names.tasks_stream, context.names.evaluation_tasks_stream):
            await ensure_consumer(broker, queue, names.TASKS_CONSUMER, lease_seconds=names.TASK_LEASE_SECONDS)
        versions = await Bucket.open(broker, names.VERSIONS_BUCKET, replicas=settings.nats_replicas)
        runs = await Bucket.open(broker, names.RUNS_BUCKET, replicas=settings.nats_replicas, purges=False)
        return await asyncio.to_thread(Run, context, versions, runs, settings)

    async def _reader(self, context: RunContext) -> Run:
        return await asyncio.to_thread(ReadOnlyRun, context, self._settings)

    async def drain(self, grace_seconds: float) -> None:
        """Nothing to return: unfinished work is repeated from the log."""


def record(plan: Plan, run: str, address: str, settings: BufferSettings) -> RunRecord:
    """The record by which commands find the run. `address`: the buffer's, as others reach it."""
    return RunRecord(
        version=installed_version("trinity-buffer"),
        run=run,
        stage=plan.config.name.rpartition("/")[2],
        online=not plan.offline,
        last=True,
        addresses=Addresses(address, settings.environment_address, settings.sync_address, settings.trainer_address),
        config=plan.config,
    )


async def keep_announced(broker: Broker, about: RunRecord, replicas: int) -> None:
    """Write the record and renew it, so that it ends with the buffer. A NATS that refuses it does not end the run."""
    key, value = names.RunNames(about.run).announcement_key, announcement(about)
    said: str | None = None
    while not is_cancelled():
        try:
            # Opened each time: the bucket is in memory, and a NATS that starts again has none.
            bucket = await Bucket.open(
                broker,
                names.ANNOUNCEMENTS_BUCKET,
                ttl_seconds=_LEASE_SECONDS,
                replicas=replicas,
                in_memory=True,
                purges=False,
            )
            await bucket.put(key, value)
            problem = ""
        except Exception as error:
            problem = str(error) or type(error).__name__
        if problem != said:
            log.log(
                logging.WARNING if problem else logging.INFO, "buffer.announcement.changed", key=key, problem=problem
            )
        said = problem
        await asyncio.sleep(_RENEW_SECONDS)
    raise asyncio.CancelledError
