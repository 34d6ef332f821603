"""One trainer at a time."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.servers.sync_instances import base_manifest, instance, make_manifest, until
from trinity.runtime.errors import AlreadyExists, Conflict, InvalidInput, NotFound
from trinity.sync.lifecycle import examine
from trinity.sync.runs import Run
from trinity.sync.versions import Register
from trinity.weights.wire import VersionState

pytestmark = pytest.mark.core


@pytest.fixture
async def run(nats_url: str) -> AsyncIterator[Run]:
    async with instance(nats_url, claim_seconds=1.5) as opened:
        yield opened


async def test_a_second_trainer_is_refused_by_name(run: Run, nats_url: str) -> None:
    async with instance(nats_url, claim_seconds=1.5) as two:
        await run.claims.take("one", 11, "here", "")
        for other in (run, two):
            with pytest.raises(AlreadyExists, match="process 11 on here"):
                await other.claims.take("two", 22, "there", "")
    with pytest.raises(InvalidInput, match="trainer_id"):
        await run.claims.take("", 1, "host", "")


async def test_of_two_that_come_at_once_one_gets_it(run: Run, nats_url: str) -> None:
    async with instance(nats_url) as two:
        found = await asyncio.gather(
            run.claims.take("one", 1, "a", ""), two.claims.take("two", 2, "b", ""), return_exceptions=True
        )
        assert sum(isinstance(answer, AlreadyExists) for answer in found) == 1, found


async def test_a_claim_lives_by_its_renewals(run: Run) -> None:
    claim = await run.claims.take("one", 11, "here", "")
    assert await run.claims.take("one", 11, "here", "") == run.state.claim, "its first answer was lost"
    for _ in range(5):
        await asyncio.sleep(0.5)
        assert (await run.claims.take("one", 11, "here", claim.lease_id)).lease_id == claim.lease_id
        with pytest.raises(AlreadyExists):
            await run.claims.take("two", 22, "there", "")


async def test_one_that_ran_out_is_taken_over_and_its_trainer_fenced(run: Run, tmp_path: Path) -> None:
    old = await run.claims.take("one", 11, "here", "")
    await run.versions.publish(base_manifest(), old.lease_id)
    await until(lambda: not run.claims._is_alive(run.state.claim))
    await run.versions.publish(make_manifest(tmp_path, 1), old.lease_id)  # no other process has a claim: no harm
    new = await run.claims.take("two", 22, "there", "")
    assert new.number == old.number + 1
    with pytest.raises(Conflict, match="process 22 on there"):
        await run.versions.publish(make_manifest(tmp_path, 2), old.lease_id)
    with pytest.raises(AlreadyExists, match="process 22 on there"):
        await run.claims.take("one", 11, "here", old.lease_id)
    assert max(run.state.records) == 1
    assert (await run.versions.publish(make_manifest(tmp_path, 2), new.lease_id)).state is VersionState.LIVE
    await run.claims.release(new.lease_id)
    with pytest.raises(NotFound, match="start again"):
        await run.claims.take("one", 11, "here", old.lease_id)
    with pytest.raises(Conflict, match="another trainer had the run since"):
        await run.versions.publish(make_manifest(tmp_path, 3), old.lease_id)


async def test_a_publication_under_way_when_the_run_is_taken_over_is_refused(run: Run, tmp_path: Path) -> None:
    old = await run.claims.take("one", 11, "here", "")
    checked = await run.claims.check(old.lease_id)
    await run.claims.release(old.lease_id)
    await run.claims.take("two", 22, "there", "")
    manifest = make_manifest(tmp_path, 1)
    record = await examine(manifest, run.state, run.manifests)
    with pytest.raises(Conflict, match="another trainer has taken the run over since"):
        await run.versions._register(Register(record, claim=checked))
    assert run.state.records == {}


async def test_a_version_without_a_claim_is_accepted_while_no_trainer_has_one(run: Run, tmp_path: Path) -> None:
    await run.versions.publish(base_manifest())
    claim = await run.claims.take("one", 11, "here", "")
    with pytest.raises(Conflict, match="only it makes versions"):
        await run.versions.publish(make_manifest(tmp_path, 1))
    await run.claims.release(claim.lease_id)
    await run.claims.release(claim.lease_id)
    await run.versions.publish(make_manifest(tmp_path, 1))


async def test_a_claim_outlives_the_service(run: Run, nats_url: str) -> None:
    claim = await run.claims.take("one", 11, "here", "")
    await asyncio.sleep(2.0)  # no service ran
    async with instance(nats_url, claim_seconds=1.5) as two:
        with pytest.raises(AlreadyExists):
            await two.claims.take("two", 22, "there", "")
        assert (await two.claims.take("one", 11, "here", claim.lease_id)).number == claim.number
