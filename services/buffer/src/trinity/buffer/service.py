"""Wiring of the buffer."""

import asyncio

import grpc.aio

from trinity.api.buffer.v1 import buffer_pb2, buffer_pb2_grpc
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
        self._servicer = BufferServicer()

    def register(self, server: grpc.aio.Server) -> list[str]:
        buffer_pb2_grpc.add_BufferServiceServicer_to_server(self._servicer, server)
        return [buffer_pb2.DESCRIPTOR.services_by_name["BufferService"].full_name]

    async def work(self, ready: asyncio.Event, address: str) -> None:
        settings = self._settings
        async with await connect(settings.nats_url, "trinity-buffer") as broker:
            context = RunContext(broker, names.RunNames(self.run_id), self._plan)
            log_bytes = int(settings.log_gib * 2**30)
            specs = stream_specs(context.names, log_bytes=log_bytes, replicas=settings.nats_replicas)
            await ensure_streams(broker, specs)
            versions = await Bucket.open(broker, names.VERSIONS_BUCKET, replicas=settings.nats_replicas)
            runs = await Bucket.open(broker, names.RUNS_BUCKET, replicas=settings.nats_replicas)
            run = await asyncio.to_thread(Run, context, versions, runs, settings.cache_mib * 2**20)
            await run.open()
            self._servicer.attach(run)
            ready.set()
            await run.run()

    async def drain(self, grace_seconds: float) -> None:
        """Nothing to hand back: whatever is half done is done again from the log."""
