"""Leases of explorers: renewed by reports, one of a name, alive through restarts of the service and of NATS."""

import asyncio
import contextlib
import time
from dataclasses import replace
from pathlib import Path

import pytest

from support.servers.nats import NatsServer
from support.servers.sync_instances import instance, make_member, until
from trinity.runtime import names
from trinity.runtime.broker import connect
from trinity.runtime.errors import AlreadyExists, InvalidInput, NotFound, Unavailable
from trinity.sync.runs import Run
from trinity.sync.store.records import Member

pytestmark = pytest.mark.core


def served(run: Run) -> list[tuple[str, int]]:
    return [(member.explorer_id, member.version) for member in run.members.all()]


async def test_a_lease_is_renewed_by_reports_and_runs_out_without(nats_url: str) -> None:
    async with instance(nats_url, lease_seconds=1.2) as run:
        joined = await run.members.join(make_member())
        for _ in range(5):
            await asyncio.sleep(0.5)
            await run.members.report(joined.lease_id, version=3)
        assert served(run) == [("a", 3)]
        end = run.members.end(joined.lease_id)
        await until(end.done)
        assert served(run) == []
        with pytest.raises(NotFound, match="join again"):
            await run.members.report(joined.lease_id)


async def test_a_name_is_taken_as_long_as_its_lease_lives(nats_url: str) -> None:
    async with instance(nats_url, lease_seconds=1.2) as run, instance(nats_url, lease_seconds=1.2) as two:
        first = await run.members.join(make_member(pid=1))
        for other in (run, two):
            with pytest.raises(AlreadyExists, match=r"process 1 on host; explorer\.name must differ"):
                await other.members.join(make_member(pid=2))
        again = await run.members.join(make_member(pid=1))  # the same process comes back
        with pytest.raises(NotFound):
            await run.members.report(first.lease_id)
        await until(lambda: not run.members.all() and not two.members.all())
        await two.members.join(make_member(pid=2))
        with pytest.raises(NotFound):
            await run.members.report(again.lease_id)


async def test_a_name_is_free_once_nats_has_forgotten_a_killed_explorer(nats_url: str) -> None:
    """Values of members expire in NATS, which tells nobody."""
    async with instance(nats_url, lease_seconds=1.2) as run, await connect(nats_url, "test") as broker:
        await run.members.join(make_member(pid=1))
        await until(lambda: not run.members.all())
        assert await broker.js.purge_stream(f"KV_{names.MEMBERS_BUCKET}", subject="$KV.>")
        async with asyncio.timeout(10):
            await run.members.join(make_member(pid=2))
        assert [member.pid for member in run.members.all()] == [2]


async def test_who_leaves_is_gone_everywhere(nats_url: str) -> None:
    async with instance(nats_url) as run, instance(nats_url) as two:
        joined = await run.members.join(make_member())
        await until(lambda: two.members.all())
        await two.members.leave(joined.lease_id)
        await until(lambda: not run.members.all())
        for one in (run, two):
            with pytest.raises(NotFound):
                await one.members.find(joined.lease_id)
        await run.members.leave(joined.lease_id)
        assert (await run.members.join(make_member(pid=2))).pid == 2


@pytest.mark.parametrize("lease", ["", "x", ".", "*.1", ">.1", "a.b.c", "absent-000000.1"])
async def test_a_lease_that_was_never_given_is_not_found(nats_url: str, lease: str) -> None:
    async with instance(nats_url) as run:
        with pytest.raises(NotFound):
            await run.members.find(lease)


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", "a\x1b[31m", "a\0b"])
async def test_a_name_that_no_explorer_has_joins_nothing(nats_url: str, name: str) -> None:
    async with instance(nats_url) as run:
        with pytest.raises(InvalidInput, match="explorer_id"):
            await run.members.join(make_member(name))
        assert (await run.members.join(make_member("x" * 256))).explorer_id == "x" * 256


async def test_a_report_that_says_nothing_new_is_not_written(nats_url: str) -> None:
    async with instance(nats_url) as run:
        joined = await run.members.join(make_member())
        key = run.members._names.member_key("a")
        written = run.members._mirror.known(key).revision
        for tokens in range(20):
            await run.members.report(joined.lease_id, tokens_generated=tokens)
        assert run.members._mirror.known(key).revision == written
        assert run.members.all()[0].tokens_generated == 19
        await run.members.report(joined.lease_id, version=1)
        assert run.members._mirror.known(key).revision > written


async def test_members_outlive_the_service(nats_url: str) -> None:
    async with instance(nats_url, lease_seconds=1.5) as run:
        dead = await run.members.join(make_member("dead"))
        await asyncio.sleep(1.0)
        joined = [await run.members.join(make_member(name)) for name in "ab"]
        await asyncio.sleep(0.7)
        await run.members.report(joined[0].lease_id, version=1)
    await asyncio.sleep(2.0)  # longer than a lease: no member could report
    async with instance(nats_url, lease_seconds=1.5) as run:
        assert served(run) == [("a", 1), ("b", -1)]
        for member in joined:
            await run.members.report(member.lease_id, version=2)
        with pytest.raises(NotFound):
            await run.members.report(dead.lease_id)


async def test_members_outlive_a_time_in_which_the_service_stood_still(nats_url: str) -> None:
    async with instance(nats_url, lease_seconds=2.0, claim_seconds=2.0) as run:
        joined = await run.members.join(make_member())
        await run.claims.take("one", 1, "here", "")
        await asyncio.sleep(0.6)
        time.sleep(4.0)  # noqa: ASYNC251  as SIGSTOP would
        await asyncio.sleep(0.1)
        with pytest.raises(AlreadyExists):
            await run.claims.take("two", 2, "there", "")
        await run.members.report(joined.lease_id, version=1)
        assert served(run) == [("a", 1)]


async def test_members_outlive_a_crash_of_nats(nats_server: NatsServer) -> None:
    async with instance(nats_server.url, lease_seconds=20.0) as run, instance(nats_server.url) as two:
        joined = [await run.members.join(make_member(name)) for name in "ab"]
        nats_server.kill()
        nats_server.start()

        async def report(member: Member) -> None:
            async with asyncio.timeout(15):
                while True:
                    with contextlib.suppress(Unavailable):
                        await run.members.report(member.lease_id, version=5)
                        return
                    await asyncio.sleep(0.1)

        await asyncio.gather(*map(report, joined))
        await until(lambda: served(two) == [("a", 5), ("b", 5)])
        assert served(run) == [("a", 5), ("b", 5)]


async def test_an_instance_hears_of_the_members_of_another(nats_url: str, tmp_path: Path) -> None:
    async with instance(nats_url) as run, instance(nats_url) as two:
        joined = await run.members.join(make_member())
        assert (await two.members.find(joined.lease_id)).explorer_id == "a", "before it was told"
        await two.members.report(joined.lease_id, version=4, failure="none")
        await until(lambda: served(run) == [("a", 4)])
        assert run.members.all()[0] == replace(two.members.all()[0])
