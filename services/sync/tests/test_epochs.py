"""Collective groups in numbered epochs: the same members, the same number."""

from collections.abc import AsyncIterator

import pytest

from support.servers.sync_instances import base_manifest, instance, make_member
from trinity.runtime.errors import InvalidInput
from trinity.sync.runs import Run
from trinity.sync.store.records import Member
from trinity.weights.pointer import Epoch
from trinity.weights.wire import ExplorerState

pytestmark = pytest.mark.core


@pytest.fixture
async def run(nats_url: str) -> AsyncIterator[Run]:
    async with instance(nats_url) as opened:
        await opened.versions.publish(base_manifest())
        yield opened


async def ready(run: Run, name: str, pid: int = 1, engines: int = 1) -> Member:
    joined = await run.members.join(make_member(name, pid, "folder", "collective-gloo", engines=engines))
    return await run.members.report(joined.lease_id, version=0, state=ExplorerState.WAITING)


async def form(run: Run, backend: str = "gloo", excluded: tuple[str, ...] = (), renew: bool = False) -> Epoch:
    return await run.epochs.form(run.members.all(), backend, ("127.0.0.1:1", "00"), excluded, renew=renew)


def ranks(epoch: Epoch) -> list[tuple[str, int, int]]:
    return [(member.explorer_id, member.first_rank, member.ranks) for member in epoch.members]


async def test_the_same_members_keep_their_number(run: Run) -> None:
    await ready(run, "b", engines=2)
    await ready(run, "a")
    first = await form(run)
    assert (first.number, first.world_size, ranks(first)) == (1, 4, [("a", 1, 1), ("b", 2, 2)])
    assert await form(run) == first
    assert (await form(run, renew=True)).number == 2


async def test_who_joins_leaves_or_is_excluded_changes_it(run: Run) -> None:
    first = await ready(run, "a")
    assert (await form(run)).number == 1
    await ready(run, "b")
    assert ranks(await form(run)) == [("a", 1, 1), ("b", 2, 1)]
    without = await form(run, excluded=("a",))
    assert (without.number, ranks(without)) == (3, [("b", 1, 1)])
    await run.members.leave(first.lease_id)
    assert (await form(run)).number == 3


async def test_a_member_that_restarted_is_another_one(run: Run) -> None:
    await ready(run, "a")
    assert (await form(run)).number == 1
    await ready(run, "a")
    assert (await form(run)).number == 2


@pytest.mark.parametrize(
    "unready", [{"state": ExplorerState.EVALUATING}, {"state": ExplorerState.STARTING}, {"state": 99}, {"version": 7}]
)
async def test_who_is_not_ready_stays_out(run: Run, unready: dict[str, object]) -> None:
    await ready(run, "a")
    member = await ready(run, "b")
    await run.members.report(member.lease_id, **unready)
    assert ranks(await form(run)) == [("a", 1, 1)]


async def test_another_backend_is_another_group(run: Run) -> None:
    await ready(run, "a")
    await form(run)
    assert (await form(run, backend="nccl")).members == (), "no member can"
    assert run.state.epoch.number == 2, "and the members of the last one hear that it is over"
    assert (await form(run, backend="nccl")).number == 2
    with pytest.raises(InvalidInput, match="backend"):
        await form(run, backend="mpi")


async def test_no_ready_member_is_no_epoch(run: Run) -> None:
    await run.members.join(make_member("a"))
    assert await form(run) == Epoch()


async def test_two_instances_count_together(run: Run, nats_url: str) -> None:
    await ready(run, "a")
    async with instance(nats_url) as two:
        numbers = [(await form(one, renew=True)).number for one in (run, two, run, two)]
        assert numbers == [1, 2, 3, 4]
