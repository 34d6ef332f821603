"""`trinity weights rollback`: make an older version LIVE again and wait until all have followed."""

import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
import typer

from trinity.api.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.api.sync.v1 import sync_pb2_grpc
from trinity.cli.commands.live import CALL_SECONDS, answer, live_services
from trinity.cli.commands.reader import JobStage
from trinity.cli.errors import RunError
from trinity.cli.supervise.services import Addresses
from trinity.cli.tail import visible
from trinity.cli.weight_text import state_of, to_json
from trinity.runtime import rpc

_POLL_SECONDS = 0.5
_MOST_VERSIONS = 1_000_000


@dataclass(frozen=True)
class RollbackRequest:
    """The options of the command line. `wait_seconds`: time for explorers and buffer to follow."""

    version: int
    keep_experience: bool = False
    reason: str = ""
    yes: bool = False
    wait_seconds: float = 300.0
    as_json: bool = False


@dataclass(frozen=True)
class RunSnapshot:
    """The run before the rollback: LIVE version, versions to withdraw, explorers that have to load."""

    live: int
    withdrawn: tuple[int, ...]
    explorers: tuple[str, ...]


def roll_back(job_stage: JobStage, request: RollbackRequest) -> str:
    """Roll back and report the result. RunError if it is refused, or if explorers or buffer do not follow in time."""
    return asyncio.run(_roll_back(job_stage, request))


async def _roll_back(job_stage: JobStage, request: RollbackRequest) -> str:
    addresses = await live_services(job_stage)
    async with rpc.channel(addresses.sync) as channel, rpc.channel(addresses.buffer) as buffer_channel:
        sync = sync_pb2_grpc.SyncServiceStub(channel)
        buffer = buffer_pb2_grpc.BufferServiceStub(buffer_channel)
        snapshot = await take_snapshot(sync, job_stage.run, request.version)
        if snapshot.live == request.version:
            return _said(request, f"version {request.version} is LIVE already; nothing was done", {"rollback": None})
        print(announcement(job_stage.name, snapshot, request), file=sys.stderr if request.as_json else sys.stdout)
        _confirm(request)
        before = await _fenced(buffer, job_stage.run) if addresses.buffer and not request.keep_experience else 0
        message = pb.RollbackRequest(
            run=job_stage.run, version=request.version, keep_experience=request.keep_experience, reason=request.reason
        )
        done = (await answer(sync.Rollback(message, timeout=CALL_SECONDS), "sync")).rollback
        return await _follow_up(job_stage, request, done, sync, buffer, before, addresses)


async def _follow_up(
    job_stage: JobStage,
    request: RollbackRequest,
    done: pb.RollbackRecord,
    sync: sync_pb2_grpc.SyncServiceStub,
    buffer: buffer_pb2_grpc.BufferServiceStub,
    before: int,
    addresses: Addresses,
) -> str:
    deadline = time.monotonic() + request.wait_seconds
    dropped = 0
    if not done.keep_experience and addresses.buffer:
        dropped = await _until_fenced(buffer, job_stage.run, done, deadline) - before
    explorers = await _until_served(sync, job_stage.run, done, deadline)
    experience = (
        "their experience stays"
        if done.keep_experience
        else f"the fence keeps {dropped} stored group(s) out of later batches"
    )
    text = (
        f"version {done.version} is LIVE again (rollback {done.number}): {len(explorers)} explorer(s) serve it or a "
        f"newer one that was not withdrawn; {experience}"
    )
    facts = {"number": done.number, "version": done.version, "withdrawn": list(done.withdrawn)}
    return _said(request, text, {"rollback": facts, "explorers": explorers, "dropped_groups": dropped})


def _said(request: RollbackRequest, text: str, facts: dict[str, object]) -> str:
    return to_json(facts) if request.as_json else text


async def take_snapshot(sync: sync_pb2_grpc.SyncServiceStub, run: str, version: int) -> RunSnapshot:
    """The effect of a rollback to a version. RunError if there is no such version, or it cannot be LIVE again."""
    asked = pb.GetVersionRequest(run=run, version=version)
    wanted = (await answer(sync.GetVersion(asked, timeout=CALL_SECONDS), "sync")).version
    if wanted.state not in (pb.VERSION_STATE_LIVE, pb.VERSION_STATE_RETIRED):
        why = f" ({wanted.reason})" if wanted.reason else ""
        raise RunError(visible(f"version {version} is {state_of(wanted)}{why}; roll back to one that was LIVE"))
    listed = pb.ListVersionsRequest(run=run, limit=_MOST_VERSIONS)
    versions = (await answer(sync.ListVersions(listed, timeout=CALL_SECONDS), "sync")).versions
    members = (await answer(sync.ListMembers(pb.ListMembersRequest(run=run), timeout=CALL_SECONDS), "sync")).members
    live = next((v.manifest.version for v in versions if v.state == pb.VERSION_STATE_LIVE), -1)
    newer = [v for v in versions if v.manifest.version > version and state_of(v) != "REJECTED"]
    return RunSnapshot(
        live,
        tuple(sorted(v.manifest.version for v in newer)),
        tuple(member.explorer_id for member in members if member.version != version),
    )


def announcement(name: str, snapshot: RunSnapshot, request: RollbackRequest) -> str:
    """The effect of the rollback as text."""
    experience = "stays in later batches" if request.keep_experience else "enters no later batch"
    loads = ", ".join(snapshot.explorers) or "no explorer"
    return visible(
        f"{name}: version {request.version} becomes LIVE again in place of {snapshot.live}; withdrawn: "
        f"{numbers(snapshot.withdrawn)}, whose experience {experience}; loads it: {loads}; the trainer continues "
        "from its weights"
    )


def numbers(values: Sequence[int]) -> str:
    """Versions, the middle of a long list left out."""
    if len(values) <= 6:
        return ", ".join(map(str, values)) or "none"
    return f"{values[0]}, {values[1]}, ..., {values[-1]} ({len(values)} versions)"


def _confirm(request: RollbackRequest) -> None:
    if request.yes:
        return
    if not sys.stdin.isatty():
        raise RunError("nothing was done; --yes does it without asking", code=2)
    if not typer.confirm("Continue?", err=True):
        raise RunError("nothing was done")


async def _fenced(buffer: buffer_pb2_grpc.BufferServiceStub, run: str) -> int:
    """Groups that fences have dropped so far; 0 from a buffer that does not answer, which fences later."""
    try:
        stats = await buffer.Stats(buffer_pb2.StatsRequest(run=run), timeout=CALL_SECONDS)
    except grpc.aio.AioRpcError:
        return 0
    return int(stats.dropped.get("fenced", 0))


async def _until_fenced(
    buffer: buffer_pb2_grpc.BufferServiceStub, run: str, done: pb.RollbackRecord, deadline: float
) -> int:
    """Groups that fences have dropped, this one included. The buffer fences by itself too; asking twice is harmless."""
    newest = max([done.newest_step, *done.withdrawn])
    request = buffer_pb2.FenceRequest(run=run, versions=range(done.version + 1, newest + 1))
    while True:
        left = max(0.1, deadline - time.monotonic())
        try:
            return int((await buffer.Fence(request, timeout=left)).dropped)
        except grpc.aio.AioRpcError as error:
            away = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            if not away:
                raise RunError(f"rollback {done.number} was made, but {error.details()}") from None
            if time.monotonic() > deadline:
                raise RunError(
                    f"rollback {done.number} was made; the buffer has not fenced it yet and does so when it is back "
                    f"({error.details()})"
                ) from None
        await asyncio.sleep(_POLL_SECONDS)


async def _until_served(
    sync: sync_pb2_grpc.SyncServiceStub, run: str, done: pb.RollbackRecord, deadline: float
) -> list[str]:
    """Wait until every explorer that serves has left the withdrawn versions; returns their names."""
    late: list[pb.Member] = []
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):
            members = (await sync.ListMembers(pb.ListMembersRequest(run=run), timeout=CALL_SECONDS)).members
            serving = [member for member in members if member.version >= 0]
            late = [member for member in serving if not _has_gone_back(member, done)]
            if not late:
                return [member.explorer_id for member in serving]
        if time.monotonic() > deadline:
            who = "; ".join(
                f"{m.explorer_id} serves {m.version} ({m.state}, reported {m.seconds_since_report:.0f} s ago)"
                for m in late
            )
            raise RunError(visible(f"rollback {done.number} was made, but not all have followed: {who}"))
        await asyncio.sleep(_POLL_SECONDS)


def _has_gone_back(member: pb.Member, done: pb.RollbackRecord) -> bool:
    newest = max([done.newest_step, *done.withdrawn])
    return member.version == done.version or member.version > newest
