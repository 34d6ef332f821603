"""The gRPC edge of the sync service."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import grpc.aio
import structlog

from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.api.sync.v1 import sync_pb2_grpc
from trinity.runtime.broker import Bucket
from trinity.runtime.errors import InvalidInput, NotFound, Unavailable
from trinity.runtime.weights import manifest_from_proto, manifest_to_proto
from trinity.sync.members import Capabilities, Member, Members
from trinity.sync.versions import Version, Versions

log = structlog.get_logger(__name__)

_DEFAULT_LIMIT = 100
# Versions older than this many before LIVE are given up as soon as nobody serves them.
_KEEP_BEHIND_LIVE = 1


class SyncServicer(sync_pb2_grpc.SyncServiceServicer):
    """Serves every run of a NATS; a run exists as soon as somebody names it."""

    def __init__(self, lease_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self._buckets: tuple[Bucket, Bucket] | None = None

    def attach(self, versions: Bucket, members: Bucket) -> None:
        """NATS answers: calls can be served from now on."""
        self._buckets = versions, members

    def _bucket(self, index: int, run: str) -> Bucket:
        if self._buckets is None:
            raise Unavailable("the sync service is still starting")
        if not run:
            raise InvalidInput("run", "is empty")
        return self._buckets[index]

    def _versions(self, run: str) -> Versions:
        return Versions(self._bucket(0, run), run)

    def _members(self, run: str) -> Members:
        return Members(self._bucket(1, run), run, self._lease_seconds)

    async def Join(self, request: pb.JoinRequest, context: grpc.aio.ServicerContext) -> pb.JoinResponse:
        offered = request.capabilities
        member = Member(
            explorer_id=request.explorer_id,
            lease_id="",
            pid=request.pid,
            host=request.host,
            address=request.address,
            base_model=request.base_model,
            capabilities=Capabilities(
                tuple(offered.transports), offered.dtype, offered.tensor_parallel_size, offered.engines, offered.zone
            ),
        )
        joined = await self._members(request.run).join(member)
        log.info("sync.member.joined", explorer=joined.explorer_id, pid=joined.pid, host=joined.host)
        return pb.JoinResponse(lease_id=joined.lease_id, lease_seconds=self._lease_seconds)

    async def Watch(
        self, request: pb.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchResponse]:
        versions, members = self._versions(request.run), self._members(request.run)
        await members.find(request.lease_id)
        changes = versions.watch()
        try:
            waiting = asyncio.ensure_future(anext(changes))
            while True:
                done, _ = await asyncio.wait([waiting], timeout=self._lease_seconds)
                await members.find(request.lease_id)
                if not done:
                    continue
                live = waiting.result()
                waiting = asyncio.ensure_future(anext(changes))
                if live.version < 0:
                    yield pb.WatchResponse()
                else:
                    yield pb.WatchResponse(live=manifest_to_proto((await versions.get(live.version)).manifest))
        finally:
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                await waiting
            await changes.aclose()  # type: ignore[attr-defined]

    async def Report(self, request: pb.ReportRequest, context: grpc.aio.ServicerContext) -> pb.ReportResponse:
        members = self._members(request.run)
        member = await members.find(request.lease_id)
        if request.failure:
            log.warning(
                "sync.member.load_failed",
                explorer=member.explorer_id,
                version=request.failed_version,
                reason=request.failure,
            )
        if request.version != member.version:
            log.info("sync.member.serves", explorer=member.explorer_id, version=request.version)
        await members.report(
            member.explorer_id,
            request.lease_id,
            version=request.version,
            state=request.state,
            tokens_per_second=request.tokens_per_second,
            tokens_generated=request.tokens_generated,
        )
        return pb.ReportResponse(lease_seconds=self._lease_seconds)

    async def Leave(self, request: pb.LeaveRequest, context: grpc.aio.ServicerContext) -> pb.LeaveResponse:
        members = self._members(request.run)
        with contextlib.suppress(NotFound):
            member = await members.find(request.lease_id)
            await members.leave(member.explorer_id)
            log.info("sync.member.left", explorer=member.explorer_id)
        return pb.LeaveResponse()

    async def Stage(self, request: pb.StageRequest, context: grpc.aio.ServicerContext) -> pb.StageResponse:
        manifest = manifest_from_proto(request.manifest)
        version = await self._versions(manifest.run).stage(manifest)
        return pb.StageResponse(state=version.state.wire_name)

    async def Commit(self, request: pb.CommitRequest, context: grpc.aio.ServicerContext) -> pb.CommitResponse:
        live = await self._versions(request.run).commit(request.version)
        log.info("sync.version.live", version=live.version, step=live.step)
        held = {member.version for member in await self._members(request.run).all()}
        older = range(max(0, live.version - _KEEP_BEHIND_LIVE))
        return pb.CommitResponse(collectable=[version for version in older if version not in held])

    async def ListVersions(
        self, request: pb.ListVersionsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListVersionsResponse:
        members = await self._members(request.run).all()
        versions = (await self._versions(request.run).all())[: request.limit or _DEFAULT_LIMIT]
        return pb.ListVersionsResponse(versions=[_version(version, members) for version in versions])

    async def ListMembers(
        self, request: pb.ListMembersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListMembersResponse:
        live = (await self._versions(request.run).live()).version
        members = await self._members(request.run).all()
        return pb.ListMembersResponse(members=[_member(member, live) for member in members])


def _version(version: Version, members: list[Member]) -> pb.WeightVersion:
    return pb.WeightVersion(
        manifest=manifest_to_proto(version.manifest),
        state=version.state.wire_name,
        reason=version.reason,
        holders=sum(member.version == version.manifest.version for member in members),
    )


def _member(member: Member, live: int) -> pb.Member:
    able = member.capabilities
    return pb.Member(
        explorer_id=member.explorer_id,
        capabilities=pb.Capabilities(
            transports=able.transports,
            dtype=able.dtype,
            tensor_parallel_size=able.tensor_parallel_size,
            engines=able.engines,
            zone=able.zone,
        ),
        pid=member.pid,
        host=member.host,
        address=member.address,
        version=member.version,
        lag=max(0, live - member.version),
        state=member.state,
        tokens_per_second=member.tokens_per_second,
        seconds_since_report=time.time() - member.reported_at,
        tokens_generated=member.tokens_generated,
    )
