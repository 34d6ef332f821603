"""The gRPC edge of the sync service: its calls, and its dataclasses as protobuf messages."""

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import lru_cache

import grpc.aio
import structlog

from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.api.sync.v1 import sync_pb2_grpc
from trinity.runtime.errors import InvalidInput, NotFound, Unavailable
from trinity.runtime.messages import from_message, to_message
from trinity.runtime.trust.identity import check_name
from trinity.sync.members import check_new
from trinity.sync.runs import Run, Runs
from trinity.sync.store.manifests import LISTED, lost_folder
from trinity.sync.store.records import Measured, Member
from trinity.sync.versions import Pin, VersionStatus
from trinity.sync.watch import Announcement
from trinity.weights.pointer import Epoch, Rollback
from trinity.weights.wire import decode_manifest, manifest_from_proto

log = structlog.get_logger(__name__)

_DEFAULT_LIMIT = 100
_MOST_BYTES = 64 * 1024  # of what an explorer says of itself: it goes into KV, other members' screens and logs
_LONGEST_FAILURE = 4096  # characters
_REMEMBERED = 64  # answers to Watch
_ROUNDED = 1.0  # large logits in bfloat16 may round a log-probability of 0 up to it


class SyncServicer(sync_pb2_grpc.SyncServiceServicer):
    """Serves every run of a NATS. The first request that names a run creates it."""

    def __init__(self) -> None:
        self._runs: Runs | None = None

    def attach(self, runs: Runs) -> None:
        """Serves calls from now on: NATS answers."""
        self._runs = runs

    def register(self, server: grpc.aio.Server) -> list[str]:
        """Adds the service to a server; returns its full names."""
        sync_pb2_grpc.add_SyncServiceServicer_to_server(self, server)
        return [pb.DESCRIPTOR.services_by_name["SyncService"].full_name]

    @property
    def _runs_open(self) -> Runs:
        if self._runs is None:
            raise Unavailable("the sync service is still starting")
        return self._runs

    async def _run(self, name: str) -> Run:
        """Returns the run, opened if it is new. Requests are checked before, since a run takes memory."""
        return await self._runs_open.get(name)

    async def _existing(self, name: str) -> Run:
        """Raises NotFound for a run without versions, claims and explorers."""
        run = await self._runs_open.find(name)
        if run is None:
            raise NotFound(f"run: no trainer and no explorer of {name!r} was here yet")
        return run

    async def Join(self, request: pb.JoinRequest, context: grpc.aio.ServicerContext) -> pb.JoinResponse:
        _check_size(request)
        member = from_message(Member, request, lease_id="")
        check_new(member)
        check_name("explorer_id", member.explorer_id)
        run = await self._run(request.run)
        await run.state.keep_platform(member)
        joined = await run.members.join(member)
        return pb.JoinResponse(lease_id=joined.lease_id, lease_seconds=run.members.lease_seconds)

    async def Watch(
        self, request: pb.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchResponse]:
        run = await self._existing(request.run)
        async for news in run.watches.follow(request.lease_id):
            yield announcement_to_proto(news)

    async def Report(self, request: pb.ReportRequest, context: grpc.aio.ServicerContext) -> pb.ReportResponse:
        request.failure = request.failure[:_LONGEST_FAILURE]
        _check_size(request)
        run = await self._existing(request.run)
        before = await run.members.find(request.lease_id)
        canaries = [measured_from_proto(canary, before.explorer_id) for canary in request.canaries]
        if request.failure:
            log.warning(
                "sync.member.load_failed",
                explorer=before.explorer_id,
                version=request.failed_version,
                reason=request.failure,
            )
        if request.version != before.version:
            log.info("sync.member.serves", explorer=before.explorer_id, version=request.version)
        changes = _reported(request, before)
        member = await run.members.report(request.lease_id, **changes)
        for canary in canaries:
            await run.canaries.measured(member, canary)
        if request.failure:
            await run.canaries.failed(
                member, request.failed_version, request.failure, is_passing=request.failure_is_passing
            )
        return pb.ReportResponse(lease_seconds=run.members.lease_seconds)

    async def Leave(self, request: pb.LeaveRequest, context: grpc.aio.ServicerContext) -> pb.LeaveResponse:
        run = await self._runs_open.find(request.run)
        if run is not None:
            await run.members.leave(request.lease_id)
        return pb.LeaveResponse()

    async def Claim(self, request: pb.ClaimRequest, context: grpc.aio.ServicerContext) -> pb.ClaimResponse:
        if not request.trainer_id:
            raise InvalidInput("trainer_id", "is empty")
        run = await self._run(request.run)
        claim = await run.claims.take(request.trainer_id, request.pid, request.host, request.lease_id)
        return pb.ClaimResponse(
            lease_id=claim.lease_id,
            lease_seconds=run.claims.claim_seconds,
            rollback=await _newest_rollback(run),
            unreadable=await _unreadable(run),
        )

    async def Release(self, request: pb.ReleaseRequest, context: grpc.aio.ServicerContext) -> pb.ReleaseResponse:
        run = await self._runs_open.find(request.run)
        if run is not None:
            await run.claims.release(request.lease_id)
        return pb.ReleaseResponse()

    async def Publish(self, request: pb.PublishRequest, context: grpc.aio.ServicerContext) -> pb.PublishResponse:
        manifest = manifest_from_proto(request.manifest)
        manifest.check()
        run = await self._run(manifest.run)
        rollback = request.rollback if request.HasField("rollback") else None
        version = await run.versions.publish(manifest, request.lease_id, rollback)
        held = {member.version for member in run.members.all()}
        collectable = await run.versions.collect(held, request.versions_to_keep)
        return pb.PublishResponse(state=version.state.wire_name, collectable=collectable)

    async def GetVersion(
        self, request: pb.GetVersionRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetVersionResponse:
        run = await self._existing(request.run)
        return pb.GetVersionResponse(version=await _version(run, await run.versions.get(request.version)))

    async def Pin(self, request: pb.PinRequest, context: grpc.aio.ServicerContext) -> pb.PinResponse:
        await (await self._existing(request.run)).versions.apply(request.version, Pin(request.pinned))
        return pb.PinResponse()

    async def Rollback(self, request: pb.RollbackRequest, context: grpc.aio.ServicerContext) -> pb.RollbackResponse:
        run = await self._existing(request.run)
        rollback = await run.versions.roll_back(
            request.version, keep_experience=request.keep_experience, reason=request.reason
        )
        if rollback is None:
            return pb.RollbackResponse()
        return pb.RollbackResponse(rollback=_rollback(rollback, run.withdrawn_by(rollback)))

    async def FormEpoch(self, request: pb.FormEpochRequest, context: grpc.aio.ServicerContext) -> pb.FormEpochResponse:
        run = await self._existing(request.run)
        await run.claims.check(request.lease_id)
        epoch = await run.epochs.form(
            run.members.all(),
            request.backend,
            (request.store_address, request.store_secret),
            set(request.excluded),
            renew=request.renew,
        )
        return pb.FormEpochResponse(epoch=epoch_to_proto(epoch) if epoch.members else None)

    async def ListVersions(
        self, request: pb.ListVersionsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListVersionsResponse:
        run = await self._runs_open.find(request.run)
        if run is None:
            return pb.ListVersionsResponse()
        listed = run.versions.all()[: request.limit or _DEFAULT_LIMIT]
        newest = await asyncio.gather(*(_version(run, version) for version in listed[:LISTED]))
        members = run.members.all()
        older = [version_to_proto(status, run.name, None, members) for status in listed[LISTED:]]
        return pb.ListVersionsResponse(versions=[*newest, *older])

    async def ListMembers(
        self, request: pb.ListMembersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListMembersResponse:
        run = await self._runs_open.find(request.run)
        if run is None:
            return pb.ListMembersResponse()
        live, members = run.state.live.version, run.members
        return pb.ListMembersResponse(
            members=[member_to_proto(m, live, members.seconds_since_report(m)) for m in members.all()]
        )


def _check_size(request: pb.JoinRequest | pb.ReportRequest) -> None:
    """Raises InvalidInput for a request that is too large."""
    if (size := request.ByteSize()) > _MOST_BYTES:
        raise InvalidInput("request", f"has {size} bytes, must have at most {_MOST_BYTES}; shorten its texts and lists")


def _reported(request: pb.ReportRequest, before: Member) -> dict[str, object]:
    """Returns the fields of a member that a report changes. A failure stays until a later load has worked."""
    failure = f"version {request.failed_version}: {request.failure}" if request.failure else before.failure
    if not request.failure and request.version != before.version:
        failure = ""
    return {
        "version": request.version,
        "state": request.state,
        "tokens_per_second": request.tokens_per_second,
        "tokens_generated": request.tokens_generated,
        "last_pause_seconds": request.last_pause_seconds,
        "transport": request.transport or before.transport,
        "failure": failure,
        "canary_max_error": request.canaries[-1].max_error if request.canaries else before.canary_max_error,
    }


async def _version(run: Run, status: VersionStatus) -> pb.WeightVersion:
    manifest, problem = await run.manifests.encoded_or_problem(status.record)
    return version_to_proto(status, run.name, manifest, run.members.all(), problem)


async def _unreadable(run: Run) -> int | None:
    """Returns the LIVE version if its manifest cannot be read."""
    record = run.state.records.get(run.state.live.version)
    return record.version if record and (await run.manifests.encoded_or_problem(record))[1] else None


async def _newest_rollback(run: Run) -> pb.RollbackRecord | None:
    """Returns the newest rollback with the versions that any rollback withdrew: the trainer may have missed several."""
    rollback = (await run.state.pointer()).rollback
    return _rollback(rollback, run.withdrawn()) if rollback else None


def _rollback(rollback: Rollback, withdrawn: Sequence[int]) -> pb.RollbackRecord:
    return to_message(rollback, pb.RollbackRecord, withdrawn=withdrawn)


def member_to_proto(member: Member, live: int, seconds_since_report: float) -> pb.Member:
    """Passes unknown values of `state`, which newer explorers may report."""
    times = {"reported_at": None, "seconds_since_report": seconds_since_report}
    lag = max(0, live - member.version)
    return to_message(member, pb.Member, lag=lag, lease_id=None, base_model=None, **times)


def measured_from_proto(report: pb.CanaryReport, explorer_id: str) -> Measured:
    """Raises InvalidInput for impossible numbers: they would reject a version, which ends a run."""
    mean, largest = report.mean_error, report.max_error
    finite = 0 <= mean <= largest * (1 + 1e-6) < math.inf
    if not finite and not (math.isnan(mean) and largest == math.inf):
        raise InvalidInput("canaries", f"have the mean {mean:g} and the largest difference {largest:g}")
    if not -math.inf < report.expected <= _ROUNDED:
        raise InvalidInput("canaries.expected", f"is {report.expected:g}, no log-probability")
    return from_message(Measured, report, explorer_id=explorer_id)


def version_to_proto(
    status: VersionStatus, run: str, manifest: bytes | None, members: Iterable[Member], problem: str = ""
) -> pb.WeightVersion:
    """`manifest` is encoded; None if it is unlisted or unreadable."""
    record = status.record
    gone = record.collected or (manifest is not None and lost_folder(decode_manifest(manifest)) is not None)
    bare = pb.Manifest(run=run, version=record.version, step=record.step)
    return pb.WeightVersion(
        manifest=bare if manifest is None else pb.Manifest.FromString(manifest),
        state=status.state.wire_name,
        reason=status.reason or problem,
        holders=sum(member.version == record.version for member in members),
        pinned=record.pinned,
        measured=to_message(record.measured, pb.CanaryReport) if record.measured else None,
        files_gone=gone,
    )


def epoch_to_proto(epoch: Epoch) -> pb.Epoch:
    members = [to_message(member, pb.EpochMember, lease_id=None) for member in epoch.members]
    return to_message(epoch, pb.Epoch, world_size=epoch.world_size, members=members)


@lru_cache(_REMEMBERED)
def announcement_to_proto(news: Announcement) -> pb.WatchResponse:
    """Built once for all streams with the same news."""
    return pb.WatchResponse(
        live=None if news.live is None else pb.Manifest.FromString(news.live),
        gate_step=news.gate_step,
        candidate=None if news.candidate is None else pb.Manifest.FromString(news.candidate),
        epoch=None if news.epoch is None else epoch_to_proto(news.epoch),
        rejected=news.rejected,
        problem=news.problem,
    )
