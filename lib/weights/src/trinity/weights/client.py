"""The client of the sync service, for trainers, explorers and commands: deadlines, retries, errors, the watch.

A call is a value, made by a function below; `SyncClient` sends it with asyncio, `BlockingSyncClient` from a thread:

    async with SyncClient(address, run) as sync:
        newest = await sync.ask(versions(limit=20))

An answer that is an error is raised as the TrinityError of its code, with the service's message.
"""

import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
import structlog

from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.api.sync.v1 import sync_pb2_grpc
from trinity.runtime import rpc
from trinity.runtime.errors import AlreadyExists, Conflict, DataLoss, Full, NotFound, TrinityError, Unavailable
from trinity.runtime.messages import from_message, to_message
from trinity.weights.canary import Measured
from trinity.weights.manifest import Manifest
from trinity.weights.pointer import Epoch, Rollback
from trinity.weights.wire import VersionState, manifest_from_proto, manifest_to_proto

log = structlog.get_logger(__name__)

_UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_ERRORS: dict[grpc.StatusCode, type[TrinityError]] = {
    error.code: error for error in (AlreadyExists, Conflict, NotFound, DataLoss, Full)
}
_SECONDS = 60.0
_SHORT_SECONDS = 10.0
_PUBLISH_SECONDS = 600.0  # the service reads the files
_RETRY_SECONDS = 0.5

T = TypeVar("T")


@dataclass(frozen=True)
class Version:
    """A version as the service knows it. `measured`: what the explorer that verified it computed.

    The manifest of an old version, or one that the service cannot read, has the number and the step alone.
    """

    manifest: Manifest
    state: VersionState
    reason: str = ""
    holders: int = 0
    pinned: bool = False
    measured: Measured | None = None
    measured_by: str = ""

    @property
    def version(self) -> int:
        return self.manifest.version


@dataclass(frozen=True)
class Claimed:
    """An answered claim.

    `rollback` is the newest one, `withdrawn` the versions that any rollback withdrew. `unreadable`: LIVE version whose
    manifest is damaged and has to be published again.
    """

    lease_id: str
    lease_seconds: float
    rollback: Rollback | None = None
    withdrawn: tuple[int, ...] = ()
    unreadable: int | None = None


@dataclass(frozen=True)
class _Formed:
    epoch: Epoch | None


@dataclass(frozen=True)
class Membership:
    """How an explorer joins. `transports` and `platform` as in sync.v1.Capabilities."""

    run: str
    explorer_id: str
    address: str
    base_model: str
    dtype: str
    tensor_parallel_size: int
    engines: int
    transports: tuple[str, ...] = ("folder",)
    platform: str = ""


@dataclass(frozen=True)
class Report:
    """What an explorer serves, and what it found out: canaries by version. Fields as in sync.v1.ReportRequest."""

    version: int
    state: str  # name of an explorer.v1.ExplorerState
    tokens_per_second: float = 0.0
    tokens_generated: int = 0
    last_pause_seconds: float = 0.0
    transport: str = ""
    failed_version: int = -1
    failure: str = ""
    failure_is_passing: bool = False
    canaries: tuple[tuple[int, Measured], ...] = ()


@dataclass(frozen=True)
class View:
    """What the service tells an explorer. `gate_step`: step up to which the LIVE version meets gates.

    `problem`: why `live` is absent although the run has a LIVE version.
    """

    live: Manifest | None = None
    gate_step: int = -1
    candidate: Manifest | None = None
    epoch: Epoch | None = None
    rejected: frozenset[int] = field(default_factory=frozenset)
    problem: str = ""


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request of sync.v1, its deadline, and what its answer means. The client adds the run."""

    method: str
    request: Any
    read: Callable[[Any], T]
    seconds: float = _SECONDS

    def of_run(self, run: str) -> Any:
        """The request, for a run."""
        if "run" in self.request.DESCRIPTOR.fields_by_name:
            self.request.run = run
        return self.request


def claim(trainer_id: str, lease_id: str = "") -> Call[Claimed]:
    """Take the run for this process, or renew the claim."""
    request = pb.ClaimRequest(trainer_id=trainer_id, pid=os.getpid(), host=socket.gethostname(), lease_id=lease_id)
    return Call("Claim", request, _claimed, seconds=5.0)


def release(lease_id: str) -> Call[None]:
    return Call("Release", pb.ReleaseRequest(lease_id=lease_id), _nothing, seconds=5.0)


def publish(
    manifest: Manifest, lease_id: str = "", rollback: int | None = None, versions_to_keep: int = 0
) -> Call[list[int]]:
    """Versions whose files are no longer needed. `rollback`: number of the newest one that the weights follow."""
    request = pb.PublishRequest(
        manifest=manifest_to_proto(manifest), lease_id=lease_id, rollback=rollback, versions_to_keep=versions_to_keep
    )
    return Call("Publish", request, lambda answer: list(answer.collectable), _PUBLISH_SECONDS)


def version(number: int) -> Call[Version]:
    request = pb.GetVersionRequest(version=number)
    return Call("GetVersion", request, lambda answer: _version(answer.version), _SHORT_SECONDS)


def versions(limit: int) -> Call[list[Version]]:
    """Newest first."""
    request = pb.ListVersionsRequest(limit=limit)
    return Call("ListVersions", request, lambda answer: [_version(v) for v in answer.versions])


def pin(number: int, pinned: bool) -> Call[None]:
    """Keep a version's files, or let them go again."""
    return Call("Pin", pb.PinRequest(version=number, pinned=pinned), _nothing)


def roll_back(number: int, keep_experience: bool, reason: str) -> Call[tuple[Rollback | None, tuple[int, ...]]]:
    """The rollback, which may have been made before, and the versions that it withdrew.

    None: the version is LIVE without a rollback.
    """
    request = pb.RollbackRequest(version=number, keep_experience=keep_experience, reason=reason)
    return Call("Rollback", request, _rolled_back)


def served() -> Call[list[int]]:
    """The version that each living explorer serves; -1: none yet."""
    return Call("ListMembers", pb.ListMembersRequest(), lambda answer: [member.version for member in answer.members])


def form_epoch(
    lease_id: str, backend: str, store_address: str, store_secret: str, excluded: Collection[str], *, renew: bool
) -> Call[Epoch | None]:
    """The collective group for the next update; None if no explorer is ready."""
    request = pb.FormEpochRequest(
        lease_id=lease_id,
        backend=backend,
        store_address=store_address,
        store_secret=store_secret,
        excluded=excluded,
        renew=renew,
    )
    return Call("FormEpoch", request, lambda answer: from_message(_Formed, answer).epoch)


def join(me: Membership) -> Call[tuple[str, float]]:
    """A lease, and how many seconds it lives without a report."""
    able = pb.Capabilities(
        transports=me.transports,
        dtype=me.dtype,
        tensor_parallel_size=me.tensor_parallel_size,
        engines=me.engines,
        platform=me.platform,
    )
    request = pb.JoinRequest(
        explorer_id=me.explorer_id,
        capabilities=able,
        pid=os.getpid(),
        host=socket.gethostname(),
        address=me.address,
        base_model=me.base_model,
    )
    return Call("Join", request, lambda answer: (answer.lease_id, answer.lease_seconds), _SHORT_SECONDS)


def report(lease_id: str, found: Report) -> Call[None]:
    canaries = [to_message(measured, pb.CanaryReport, version=number) for number, measured in found.canaries]
    request = to_message(found, pb.ReportRequest, lease_id=lease_id, canaries=canaries)
    return Call("Report", request, _nothing, _SHORT_SECONDS)


def leave(lease_id: str) -> Call[None]:
    return Call("Leave", pb.LeaveRequest(lease_id=lease_id), _nothing, seconds=2.0)


class SyncClient:
    """Calls for one run with asyncio. Each is one attempt."""

    def __init__(self, address: str, run: str) -> None:
        self._channel = rpc.channel(address)
        self._stub = sync_pb2_grpc.SyncServiceStub(self._channel)
        self.run = run

    async def __aenter__(self) -> "SyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def ask(self, call: Call[T], *, waits: bool = False) -> T:
        """`waits`: within its time it waits for a service that is not there yet. Raises Unavailable after that."""
        send = getattr(self._stub, call.method)
        try:
            return call.read(await send(call.of_run(self.run), timeout=call.seconds, wait_for_ready=waits))
        except grpc.aio.AioRpcError as error:
            raise _raised(error) from None
        except grpc.aio.UsageError as error:  # the channel was closed meanwhile
            raise Unavailable(f"the connection to the sync service is closed: {error}") from None

    async def watch(self, lease_id: str) -> AsyncIterator[View]:
        """What to load, now and at every change, for as long as the lease lives. Ends with an error."""
        try:
            async for answer in self._stub.Watch(pb.WatchRequest(run=self.run, lease_id=lease_id)):
                yield _view(answer)
        except grpc.aio.AioRpcError as error:
            raise _raised(error) from None
        except grpc.aio.UsageError as error:
            raise Unavailable(f"the connection to the sync service is closed: {error}") from None
        raise Unavailable("the watch has ended")


class BlockingSyncClient:
    """Calls for one run from any thread; `ask` is repeated while the service does not answer: it may be restarting."""

    def __init__(self, address: str, run: str) -> None:
        self._channel = rpc.blocking_channel(address)
        self._stub = sync_pb2_grpc.SyncServiceStub(self._channel)
        self.run = run

    def close(self) -> None:
        self._channel.close()

    def ask_once(self, call: Call[T]) -> T:
        """Unavailable if the service does not answer."""
        try:
            return call.read(getattr(self._stub, call.method)(call.of_run(self.run), timeout=call.seconds))
        except grpc.RpcError as error:
            raise _raised(error) from None

    def ask(self, call: Call[T]) -> T:
        while True:
            try:
                return self.ask_once(call)
            except Unavailable as error:
                log.info("weights.sync.retry", call=call.method, reason=str(error))
            time.sleep(_RETRY_SECONDS)


def _raised(error: Any) -> TrinityError:
    code, details = error.code(), str(error.details())
    if code in _UNAVAILABLE:
        return Unavailable(f"the sync service does not answer: {details}")
    return _ERRORS.get(code, TrinityError)(details)


def _nothing(answer: Any) -> None:
    """The answer says only that the call was done."""


def _claimed(answer: pb.ClaimResponse) -> Claimed:
    return from_message(Claimed, answer, withdrawn=tuple(answer.rollback.withdrawn))


def _rolled_back(answer: pb.RollbackResponse) -> tuple[Rollback | None, tuple[int, ...]]:
    withdrawn = tuple(answer.rollback.withdrawn)
    return (from_message(Rollback, answer.rollback) if answer.HasField("rollback") else None), withdrawn


def _version(message: pb.WeightVersion) -> Version:
    manifest, state = manifest_from_proto(message.manifest), VersionState(message.state)
    return from_message(Version, message, manifest=manifest, state=state, measured_by=message.measured.explorer_id)


def _view(message: pb.WatchResponse) -> View:
    live = manifest_from_proto(message.live) if message.HasField("live") else None
    return from_message(
        View,
        message,
        live=live,
        gate_step=max(message.gate_step, live.step) if live is not None else -1,
        candidate=manifest_from_proto(message.candidate) if message.HasField("candidate") else None,
        rejected=frozenset(message.rejected),
    )
