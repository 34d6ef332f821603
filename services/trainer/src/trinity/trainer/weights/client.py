"""The trainer's client of the sync service: blocking calls, retried while the service is unavailable."""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import structlog

from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.api.sync.v1 import sync_pb2_grpc
from trinity.runtime import rpc
from trinity.runtime.errors import AlreadyExists, Conflict, NotFound, TrinityError, Unavailable
from trinity.weights import Manifest, VersionState, manifest_from_proto, manifest_to_proto

log = structlog.get_logger(__name__)

_PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_REFUSALS: dict[grpc.StatusCode, type[TrinityError]] = {
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.FAILED_PRECONDITION: Conflict,
    grpc.StatusCode.NOT_FOUND: NotFound,
}
_STAGE_SECONDS = 600.0
_CALL_SECONDS = 60.0
_RETRY_SECONDS = 0.5

T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """The verifying explorer's distance from a version's canary, in nats."""

    mean_error: float
    max_error: float


@dataclass(frozen=True)
class Known:
    """A version as recorded by the service."""

    manifest: Manifest
    state: VersionState
    reason: str
    is_committed: bool
    measured: Measured | None

    @property
    def version(self) -> int:
        return self.manifest.version


@dataclass(frozen=True)
class Rollback:
    """The newest rollback; number 0: there was none. `newest_step`: it meets gates up to that step.

    withdrawn: versions withdrawn by this or an earlier rollback.
    """

    number: int = 0
    version: int = -1
    withdrawn: tuple[int, ...] = ()
    newest_step: int = -1


@dataclass(frozen=True)
class Claimed:
    """An answered claim."""

    lease_id: str
    lease_seconds: float
    rollback: Rollback


class SyncClient:
    """One run's calls. A refusal is raised as the TrinityError of its code, with the service's message."""

    def __init__(self, address: str, run: str) -> None:
        self._channel = rpc.blocking_channel(address)
        self._stub = sync_pb2_grpc.SyncServiceStub(self._channel)
        self.run = run

    def close(self) -> None:
        self._channel.close()

    def claim(self, trainer_id: str, lease_id: str, timeout_seconds: float) -> Claimed:
        """One attempt. Unavailable if the service does not answer."""
        request = pb.ClaimRequest(
            run=self.run, trainer_id=trainer_id, pid=os.getpid(), host=socket.gethostname(), lease_id=lease_id
        )
        answer = _once(lambda: self._stub.Claim(request, timeout=timeout_seconds))
        newest, rollback = answer.rollback, Rollback()
        if newest.number:
            rollback = Rollback(newest.number, newest.version, tuple(newest.withdrawn), newest.newest_step)
        return Claimed(answer.lease_id, answer.lease_seconds, rollback)

    def release(self, lease_id: str) -> None:
        """One attempt: without it the claim expires."""
        _once(lambda: self._stub.Release(pb.ReleaseRequest(run=self.run, lease_id=lease_id), timeout=5))

    def versions(self, limit: int) -> list[Known]:
        """Newest first."""
        request = pb.ListVersionsRequest(run=self.run, limit=limit)
        return [_known(v) for v in _retrying(lambda: self._stub.ListVersions(request, timeout=_CALL_SECONDS)).versions]

    def version(self, number: int) -> Known:
        request = pb.GetVersionRequest(run=self.run, version=number)
        return _known(_retrying(lambda: self._stub.GetVersion(request, timeout=_CALL_SECONDS)).version)

    def stage(self, manifest: Manifest, lease_id: str, rollback: int) -> None:
        """`rollback`: number of the newest one applied to the weights."""
        request = pb.StageRequest(manifest=manifest_to_proto(manifest), lease_id=lease_id, rollback=rollback)
        _retrying(lambda: self._stub.Stage(request, timeout=_STAGE_SECONDS))

    def commit(self, version: int, lease_id: str, versions_to_keep: int) -> list[int]:
        """Versions whose files are no longer needed."""
        request = pb.CommitRequest(run=self.run, version=version, lease_id=lease_id, versions_to_keep=versions_to_keep)
        return list(_retrying(lambda: self._stub.Commit(request, timeout=_CALL_SECONDS)).collectable)

    def form_epoch(self, request: pb.FormEpochRequest) -> pb.FormEpochResponse:
        return _retrying(lambda: self._stub.FormEpoch(request, timeout=_CALL_SECONDS))

    def served(self) -> list[int]:
        """The version each living explorer serves; -1: none yet."""
        request = pb.ListMembersRequest(run=self.run)
        return [m.version for m in _retrying(lambda: self._stub.ListMembers(request, timeout=_CALL_SECONDS)).members]


def _known(message: pb.WeightVersion) -> Known:
    report = message.measured
    measured = None
    if message.HasField("measured"):
        measured = Measured(report.mean_error, report.max_error)
    state = VersionState(message.state)
    return Known(manifest_from_proto(message.manifest), state, message.reason, message.committed, measured)


def _once(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except grpc.RpcError as error:
        code, details = error.code(), str(error.details())
        if code in _PASSING:
            raise Unavailable(f"the sync service does not answer: {details}") from None
        raise _REFUSALS.get(code, TrinityError)(details) from None


def _retrying(call: Callable[[], T]) -> T:
    """Retry until the service answers: it may be restarting."""
    while True:
        try:
            return _once(call)
        except Unavailable as error:
            log.info("trainer.sync.retry", reason=str(error))
        time.sleep(_RETRY_SECONDS)
