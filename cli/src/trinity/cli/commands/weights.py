"""`trinity weights`: the versions of a live run. Looking, pinning, and one version in full; rollback.py goes back."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.api.sync.v1 import sync_pb2_grpc
from trinity.cli.commands.live import CALL_SECONDS, answer, live_services
from trinity.cli.commands.reader import JobStage
from trinity.cli.weight_text import brief, describe, table, to_json, whole
from trinity.runtime import rpc


def list_versions(job_stage: JobStage, limit: int, as_json: bool) -> str:
    """The newest versions, newest first."""

    async def read() -> Sequence[pb.WeightVersion]:
        async with sync_of(job_stage) as stub:
            request = pb.ListVersionsRequest(run=job_stage.run, limit=limit)
            return (await answer(stub.ListVersions(request, timeout=CALL_SECONDS), "sync")).versions

    found = [brief(version) for version in asyncio.run(read())]
    if as_json:
        return to_json(found)
    if not found:
        return f"{job_stage.name}: no versions yet; the base model is the first"
    more = f", the newest; --limit {2 * limit} shows more" if len(found) == limit else ""
    return table(f"{job_stage.name}: {len(found)} version(s){more}", found)


def show_version(job_stage: JobStage, number: int, as_json: bool) -> str:
    """All fields of one version."""

    async def read() -> tuple[pb.WeightVersion, list[str]]:
        async with sync_of(job_stage) as stub:
            asked = pb.GetVersionRequest(run=job_stage.run, version=number)
            version = (await answer(stub.GetVersion(asked, timeout=CALL_SECONDS), "sync")).version
            listed = pb.ListMembersRequest(run=job_stage.run)
            members = (await answer(stub.ListMembers(listed, timeout=CALL_SECONDS), "sync")).members
            return version, [member.explorer_id for member in members if member.version == number]

    version, explorers = asyncio.run(read())
    found = whole(version) | {"explorers": explorers}
    return to_json(found) if as_json else describe(found)


def pin_version(job_stage: JobStage, number: int, pinned: bool, as_json: bool) -> str:
    """Pin or unpin a version's files."""

    async def pin() -> None:
        async with sync_of(job_stage) as stub:
            request = pb.PinRequest(run=job_stage.run, version=number, pinned=pinned)
            await answer(stub.Pin(request, timeout=CALL_SECONDS), "sync")

    asyncio.run(pin())
    if as_json:
        return to_json({"version": number, "pinned": pinned})
    if pinned:
        return f"version {number} is pinned: its files stay until `trinity weights unpin {number}`"
    return f"version {number} is not pinned: its files are deleted once they are not needed"


@contextlib.asynccontextmanager
async def sync_of(job_stage: JobStage) -> AsyncIterator[sync_pb2_grpc.SyncServiceStub]:
    """The sync service of a live stage. RunError if the stage is not live."""
    addresses = await live_services(job_stage)
    async with rpc.channel(addresses.sync) as channel:
        yield sync_pb2_grpc.SyncServiceStub(channel)
