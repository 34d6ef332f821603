"""Protobuf at the edge, dataclasses inside."""

from collections.abc import Iterable, Sequence

from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.sync.store.records import Capabilities, Epoch, Measured, Member
from trinity.sync.store.state import Judged
from trinity.weights.pointer import Rollback


def member_from_join(request: pb.JoinRequest) -> Member:
    """A member without a lease."""
    able = request.capabilities
    return Member(
        explorer_id=request.explorer_id,
        lease_id="",
        pid=request.pid,
        host=request.host,
        address=request.address,
        base_model=request.base_model,
        capabilities=Capabilities(
            tuple(able.transports), able.dtype, able.tensor_parallel_size, able.engines, able.zone
        ),
    )


def member_to_proto(member: Member, live: int, seconds_since_report: float) -> pb.Member:
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
        seconds_since_report=seconds_since_report,
        tokens_generated=member.tokens_generated,
        transport=member.transport,
        last_pause_seconds=member.last_pause_seconds,
        failure=member.failure,
        canary_max_error=member.canary_max_error,
    )


def measured_from_proto(report: pb.CanaryReport, explorer_id: str) -> Measured:
    return Measured(report.version, report.mean_error, report.max_error, report.expected, report.computed, explorer_id)


def _measured_to_proto(measured: Measured | None) -> pb.CanaryReport | None:
    if measured is None:
        return None
    return pb.CanaryReport(
        version=measured.version,
        mean_error=measured.mean_error,
        max_error=measured.max_error,
        expected=measured.expected,
        computed=measured.computed,
        explorer_id=measured.explorer_id,
    )


def version_to_proto(judged: Judged, manifest: pb.Manifest, members: Iterable[Member]) -> pb.WeightVersion:
    record = judged.record
    return pb.WeightVersion(
        manifest=manifest,
        state=judged.state.wire_name,
        reason=judged.reason,
        holders=sum(member.version == record.version for member in members),
        pinned=record.pinned,
        committed=record.committed,
        measured=_measured_to_proto(record.measured),
    )


def epoch_to_proto(epoch: Epoch) -> pb.Epoch:
    return pb.Epoch(
        number=epoch.number,
        backend=epoch.backend,
        store_address=epoch.store_address,
        world_size=epoch.world_size,
        members=[
            pb.EpochMember(explorer_id=member.explorer_id, first_rank=member.first_rank, ranks=member.ranks)
            for member in epoch.members
        ],
    )


def rollback_to_proto(rollback: Rollback | None, withdrawn: Sequence[int]) -> pb.RollbackRecord | None:
    if rollback is None:
        return None
    return pb.RollbackRecord(
        number=rollback.number,
        version=rollback.version,
        withdrawn=withdrawn,
        keep_experience=rollback.keep_experience,
        reason=rollback.reason,
        at_seconds=rollback.at_seconds,
        newest_step=rollback.newest_step,
    )
