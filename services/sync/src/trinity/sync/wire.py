"""Conversion between the service's dataclasses and protobuf messages."""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.runtime.errors import InvalidInput
from trinity.runtime.messages import from_message, to_message
from trinity.sync.store.manifests import lost_folder
from trinity.sync.store.records import Measured, Member
from trinity.sync.versions import VersionStatus
from trinity.sync.watch import Announcement
from trinity.weights import decode_manifest
from trinity.weights.pointer import Epoch, Rollback

_REMEMBERED = 64  # answers to Watch
_ROUNDED = 1.0  # large logits in bfloat16 may round a log-probability of 0 up to it


def member_from_join(request: pb.JoinRequest) -> Member:
    """Makes a member without a lease."""
    return from_message(Member, request, lease_id="")


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


def rollback_to_proto(rollback: Rollback | None, withdrawn: Sequence[int]) -> pb.RollbackRecord | None:
    return to_message(rollback, pb.RollbackRecord, withdrawn=withdrawn) if rollback else None


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
