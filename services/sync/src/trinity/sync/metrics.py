"""What operators watch of the runs that this process serves: members, versions, the trainer's claim."""

from collections import Counter
from collections.abc import Iterable

from trinity.runtime.metrics import Gauge, show
from trinity.sync.runs import Run
from trinity.weights import ExplorerState, VersionState

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


async def measure(runs: Iterable[Run]) -> None:
    """Set the gauges from the open runs."""
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
