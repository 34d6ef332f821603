"""Wiring of the sync service, and its metrics."""

import asyncio
from collections import Counter
from collections.abc import Iterable

import grpc.aio

from trinity.runtime import names
from trinity.runtime.broker import Broker, Bucket, connect
from trinity.runtime.metrics import Gauge, sample, show
from trinity.sync.runs import Buckets, Run, Runs
from trinity.sync.servicer import SyncServicer
from trinity.sync.settings import SyncSettings
from trinity.weights.wire import ExplorerState, VersionState

# Entries of members expire after this time, far above any lease.
_MEMBERS_SECONDS = 3600.0


MEMBERS = Gauge("trinity_sync_members", "Explorers with a lease, by state", ["run", "state"])
LAG = Gauge(
    "trinity_sync_member_lag_versions",
    "Versions from the one that an explorer serves to the LIVE one; not of explorers that serve none yet",
    ["run", "explorer"],
)
VERSIONS = Gauge(
    "trinity_sync_versions", "Weight versions by state; withdrawn ones are among the rejected", ["run", "state"]
)
LIVE = Gauge("trinity_sync_live_version", "The LIVE weight version; -1: none", ["run"])
CLAIM = Gauge("trinity_sync_claim_age_seconds", "Seconds since the trainer that has the run renewed its claim", ["run"])


async def open_buckets(broker: Broker, settings: SyncSettings) -> Buckets:
    """Opens the buckets, made if missing. Leases are in memory: after a crash of NATS their holders join again."""
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
        """Does nothing: all state is in KV."""


async def measure(runs: Iterable[Run]) -> None:
    """Sets the gauges from the open runs."""
    members: dict[tuple[str, ...], float] = {}
    lags: dict[tuple[str, ...], float] = {}
    versions: dict[tuple[str, ...], float] = {}
    live: dict[tuple[str, ...], float] = {}
    claims: dict[tuple[str, ...], float] = {}
    for run in runs:
        serving = run.members.all()
        states = Counter(ExplorerState(member.state) for member in serving)
        members |= {(run.name, state.name.lower()): states[state] for state in ExplorerState}
        newest = run.state.live.version
        live[run.name,] = newest
        lags |= {(run.name, m.explorer_id): max(0, newest - m.version) for m in serving if m.version >= 0 <= newest}
        found = Counter(version.state for version in run.versions.all())
        versions |= {(run.name, state.name.lower()): found[state] for state in VersionState}
        if run.state.claim.lease_id:
            claims[run.name,] = run.state.mirror.age_seconds(run.state.names.claim_key)
    for gauge, values in ((MEMBERS, members), (LAG, lags), (VERSIONS, versions), (LIVE, live), (CLAIM, claims)):
        show(gauge, values)
