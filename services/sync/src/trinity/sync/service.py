"""Wiring of the sync service."""

import asyncio

import grpc.aio

from trinity.api.sync.v1 import sync_pb2, sync_pb2_grpc
from trinity.runtime import names
from trinity.runtime.broker import Bucket, connect
from trinity.sync.servicer import SyncServicer
from trinity.sync.settings import SyncSettings


class SyncService:
    name = "sync"
    run_id = ""

    def __init__(self, settings: SyncSettings) -> None:
        self._settings = settings
        self._servicer = SyncServicer(settings.lease_seconds)

    def register(self, server: grpc.aio.Server) -> list[str]:
        sync_pb2_grpc.add_SyncServiceServicer_to_server(self._servicer, server)
        return [sync_pb2.DESCRIPTOR.services_by_name["SyncService"].full_name]

    async def work(self, ready: asyncio.Event, address: str) -> None:
        settings = self._settings
        async with await connect(settings.nats_url, "trinity-sync") as broker:
            versions = await Bucket.open(broker, names.VERSIONS_BUCKET, replicas=settings.nats_replicas)
            members = await Bucket.open(broker, names.MEMBERS_BUCKET, replicas=settings.nats_replicas)
            self._servicer.attach(versions, members)
            ready.set()
            await asyncio.Event().wait()

    async def drain(self, grace_seconds: float) -> None:
        """Nothing to hand back: all state is in KV."""
