"""Wiring of the buffer."""

import asyncio
import os

import grpc.aio

from trinity import plugins
from trinity.api.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from trinity.buffer.ledger.retention import limit_of
from trinity.buffer.readonly import ReadOnlyRun, ReadOnlyServicer
from trinity.buffer.run import Run
from trinity.buffer.servicer import BufferServicer
from trinity.buffer.settings import BufferSettings
from trinity.buffer.shared import RunContext
from trinity.buffer.streams import stream_specs
from trinity.config.service import load_plan
from trinity.runtime import names
from trinity.runtime.broker import Bucket, connect, ensure_streams


class BufferService:
    name = "buffer"

    def __init__(self, settings: BufferSettings) -> None:
        self._settings = settings
        self._plan = load_plan(settings.config_file, settings.stage)
        config = self._plan.config
        self.run_id = names.run_id(config.project, config.name, config.group)
        self._servicer = ReadOnlyServicer() if settings.read_only else BufferServicer()

    def register(self, server: grpc.aio.Server) -> list[str]:
        buffer_pb2_grpc.add_BufferServiceServicer_to_server(self._servicer, server)
        return [buffer_pb2.DESCRIPTOR.services_by_name["BufferService"].full_name]

    async def work(self, ready: asyncio.Event, address: str) -> None:
        async with await connect(self._settings.nats_url, "trinity-buffer") as broker:
            context = RunContext(broker, names.RunNames(self.run_id), self._plan)
            run = await (self._reader(context) if self._settings.read_only else self._owner(context))
            await run.open()
            self._servicer.attach(run)
            ready.set()
            await run.run()

    async def _owner(self, context: RunContext) -> Run:
        """The buffer of a live run; makes what is missing on the broker."""
        settings, broker = self._settings, context.broker
        context.capacity.limit_bytes = await limit_of(broker, context.names, settings)
        specs = stream_specs(context.names, log_bytes=context.capacity.limit_bytes, replicas=settings.nats_replicas)
        await ensure_streams(broker, specs)
        versions = await Bucket.open(broker, names.VERSIONS_BUCKET, replicas=settings.nats_replicas)
        runs = await Bucket.open(broker, names.RUNS_BUCKET, replicas=settings.nats_replicas)
        plugins.load([folder for folder in settings.plugin_dirs.split(os.pathsep) if folder])
        return await asyncio.to_thread(Run, context, versions, runs, settings)

    async def _reader(self, context: RunContext) -> Run:
        return await asyncio.to_thread(ReadOnlyRun, context, self._settings)

    async def drain(self, grace_seconds: float) -> None:
        """Nothing to hand back: whatever is half done is done again from the log."""
