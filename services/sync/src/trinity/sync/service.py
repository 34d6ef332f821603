"""Wiring of the sync service."""

import asyncio

import grpc.aio

from trinity.runtime import names
from trinity.runtime.broker import Broker, Bucket, connect
from trinity.runtime.metrics import sample
from trinity.sync.metrics import measure
from trinity.sync.runs import Buckets, Runs
from trinity.sync.servicer import SyncServicer
from trinity.sync.settings import SyncSettings

# Members that are gone leave NATS by themselves. Far above any lease.
_MEMBERS_SECONDS = 3600.0


async def open_buckets(broker: Broker, settings: SyncSettings) -> Buckets:
    """The buckets, made if missing. Leases are in memory: after a crash of NATS their holders join again."""
    replicas = settings.nats_replicas
    members_seconds = max(_MEMBERS_SECONDS, 10 * settings.lease_seconds)
    return Buckets(
        versions=await Bucket.open(broker, names.VERSIONS_BUCKET, replicas=replicas),
        manifests=await Bucket.open(broker, names.MANIFESTS_BUCKET, replicas=replicas),
        members=await Bucket.open(
            broker, names.MEMBERS_BUCKET, ttl_seconds=members_seconds, replicas=replicas, in_memory=True
        ),
        most_bytes=broker.client.max_payload,
    )


class SyncService:
    name = "sync"
    run_id = ""

    def __init__(self, settings: SyncSettings) -> None:
        self._settings = settings
        self._servicer = SyncServicer()

    def register(self, server: grpc.aio.Server) -> list[str]:
        return self._servicer.register(server)

    async def work(self, ready: asyncio.Event, address: str) -> None:
        async with await connect(self._settings.nats_url, "trinity-sync") as broker:
            runs = Runs(await open_buckets(broker, self._settings), self._settings)
            self._servicer.attach(runs)
            async with asyncio.TaskGroup() as group:
                group.create_task(sample(lambda: measure(runs.open)))
                await runs.work(ready)

    async def drain(self, grace_seconds: float) -> None:
        """Nothing to hand back: all state is in KV."""
