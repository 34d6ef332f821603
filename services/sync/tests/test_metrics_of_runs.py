"""What sync's metrics say of a run: its members and how far behind they are, its versions, its trainer's claim."""

from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from support.servers.sync_instances import RUN, base_manifest, instance, make_manifest, make_member
from trinity.sync.service import measure
from trinity.weights.wire import ExplorerState

pytestmark = pytest.mark.core


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"trinity_sync_{name}", {"run": RUN, **labels})


async def test_metrics_follow_members_versions_and_the_claim(nats_url: str, tmp_path: Path) -> None:
    async with instance(nats_url) as run:
        await measure([run])
        assert (value("live_version"), value("members", state="running"), value("claim_age_seconds")) == (-1, 0, None)

        claim = await run.claims.take("trainer", 1, "host", "")
        for manifest in (base_manifest(), make_manifest(tmp_path, 1), make_manifest(tmp_path, 2)):
            await run.versions.publish(manifest, claim.lease_id)
        behind, starting = await run.members.join(make_member("a")), await run.members.join(make_member("b", 2))
        await run.members.report(behind.lease_id, version=1, state=int(ExplorerState.RUNNING))
        await measure([run])
        assert value("live_version") == 2
        assert (value("members", state="running"), value("members", state="starting")) == (1, 1)
        assert value("member_lag_versions", explorer="a") == 1
        assert value("member_lag_versions", explorer="b") is None
        assert (value("versions", state="live"), value("versions", state="retired")) == (1, 2)
        assert 0 <= (value("claim_age_seconds") or 0) < 20

        await run.versions.roll_back(1, keep_experience=False, reason="test")
        for lease in (behind.lease_id, starting.lease_id):
            await run.members.leave(lease)
        await run.claims.release(claim.lease_id)
        await measure([run])
        assert (value("live_version"), value("versions", state="rejected")) == (1, 1)
        assert (value("members", state="running"), value("member_lag_versions", explorer="a")) == (0, None)
        assert value("claim_age_seconds") is None
    await measure([])
    assert value("live_version") is None
