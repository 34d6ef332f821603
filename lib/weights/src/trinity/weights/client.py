"""The client of the sync service, for trainers, explorers and commands: deadlines, retries, errors, the watch.

Each function below returns a call as a value. `SyncClient` sends it with asyncio, `BlockingSyncClient` from a thread:

    async with SyncClient(address, run) as sync:
        newest = await sync.ask(versions(limit=20))

An error status is raised as the TrinityError of its code, with the service's message.
"""

import os
import socket
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.api.sync.v1 import sync_pb2_grpc
from trinity.runtime import rpc
from trinity.runtime.errors import TimedOut, Unavailable
from trinity.runtime.messages import from_message, to_message
from trinity.weights.manifest import Manifest, Measured
from trinity.weights.pointer import Epoch, Rollback
from trinity.weights.wire import VersionState, manifest_from_proto, manifest_to_proto

_FIRST_NAMESPACE = 0xEFFFFFFC  # of PIDs, of the machine itself (Linux)
_SECONDS = 60.0
_SHORT_SECONDS = 10.0
_PUBLISH_SECONDS = 600.0  # the service reads the files

T = TypeVar("T")


@dataclass(frozen=True)
class Version:
    """A version as the service knows it. `measured` is the result of the explorer that verified it.

    The manifest has only number and step for an old version, and for a manifest that the service cannot read.
    """

    manifest: Manifest
    state: VersionState
    reason: str = ""
    holders: int = 0
    pinned: bool = False
    measured: Measured | None = None
    measured_by: str = ""
    files_gone: bool = False

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
    """The data with which an explorer joins. `transports` and `platform` are those of sync.v1.Capabilities."""

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
    """An explorer's report, with canaries by version. The fields are those of sync.v1.ReportRequest."""

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
    """The service's instructions to an explorer. The LIVE version meets gates up to `gate_step`.

    `problem` is the reason why `live` is absent although the run has a LIVE version.
    """

    live: Manifest | None = None
    gate_step: int = -1
    candidate: Manifest | None = None
    epoch: Epoch | None = None
    rejected: frozenset[int] = field(default_factory=frozenset)
    problem: str = ""


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request of sync.v1, its deadline, and the function that reads its answer. The client adds the run."""

    method: str
    request: Any
    read: Callable[[Any], T]
    seconds: float = _SECONDS

    def of_run(self, run: str) -> Any:
        """Returns the request with the run filled in."""
        if "run" in self.request.DESCRIPTOR.fields_by_name:
            self.request.run = run
        return self.request


def claim(trainer_id: str, lease_id: str = "") -> Call[Claimed]:
    """Takes the run for this process, or renews the claim."""
    request = pb.ClaimRequest(trainer_id=trainer_id, pid=os.getpid(), host=host_name(), lease_id=lease_id)
    return Call("Claim", request, _claimed, seconds=5.0)


def release(lease_id: str) -> Call[None]:
    return Call("Release", pb.ReleaseRequest(lease_id=lease_id), _nothing, seconds=5.0)


def publish(
    manifest: Manifest, lease_id: str = "", rollback: int | None = None, versions_to_keep: int = 0
) -> Call[list[int]]:
    """Publishes a version; the answer lists versions whose files are no longer needed.

    `rollback` is the number of the newest rollback that the weights follow.
    """
    request = pb.PublishRequest(
        manifest=manifest_to_proto(manifest), lease_id=lease_id, rollback=rollback, versions_to_keep=versions_to_keep
    )
    return Call("Publish", request, lambda answer: list(answer.collectable), _PUBLISH_SECONDS)


def version(number: int) -> Call[Version]:
    request = pb.GetVersionRequest(version=number)
    return Call("GetVersion", request, lambda answer: _version(answer.version), _SHORT_SECONDS)


def versions(limit: int) -> Call[list[Version]]:
    """Lists versions, newest first."""
    request = pb.ListVersionsRequest(limit=limit)
    return Call("ListVersions", request, lambda answer: [_version(v) for v in answer.versions])


def pin(number: int, pinned: bool) -> Call[None]:
    """Pins a version, which keeps its files, or unpins it."""
    return Call("Pin", pb.PinRequest(version=number, pinned=pinned), _nothing)


def roll_back(number: int, keep_experience: bool, reason: str) -> Call[tuple[Rollback | None, tuple[int, ...]]]:
    """Rolls back; the answer is the rollback, new or made before, and the versions that it withdrew.

    The rollback is None for a version that is LIVE without one.
    """
    request = pb.RollbackRequest(version=number, keep_experience=keep_experience, reason=reason)
    return Call("Rollback", request, _rolled_back)


def served() -> Call[list[int]]:
    """Lists the version of each living explorer; -1 before its first."""
    return Call("ListMembers", pb.ListMembersRequest(), lambda answer: [member.version for member in answer.members])


def form_epoch(
    lease_id: str, backend: str, store_address: str, store_secret: str, excluded: Collection[str], *, renew: bool
) -> Call[Epoch | None]:
    """Forms the collective group for the next update; None if no explorer is ready."""
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
    """Joins a run; the answer is a lease and the seconds that it lives without a report."""
    able = to_message(me, pb.Capabilities, run=None, explorer_id=None, address=None, base_model=None)
    request = pb.JoinRequest(
        explorer_id=me.explorer_id,
        capabilities=able,
        pid=os.getpid(),
        host=host_name(),
        address=me.address,
        base_model=me.base_model,
    )
    return Call("Join", request, lambda answer: (answer.lease_id, answer.lease_seconds), _SHORT_SECONDS)


def host_name() -> str:
    """Returns the host on which this process id is unique: also the container, in a PID namespace of its own.

    Containers that share the network of their machine have its name, and each of them has a process 1.
    """
    name = socket.gethostname()
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return name
    return name if namespace == _FIRST_NAMESPACE else f"{name} (PID namespace {namespace})"


def report(lease_id: str, found: Report) -> Call[None]:
    canaries = [to_message(measured, pb.CanaryReport, version=number) for number, measured in found.canaries]
    request = to_message(found, pb.ReportRequest, lease_id=lease_id, canaries=canaries)
    return Call("Report", request, _nothing, _SHORT_SECONDS)


def leave(lease_id: str) -> Call[None]:
    return Call("Leave", pb.LeaveRequest(lease_id=lease_id), _nothing, seconds=2.0)


class SyncClient:
    """Sends calls for one run with asyncio, one attempt each."""

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
        """Returns the answer. With `waits`, waits within the deadline for a service that has not started yet.

        Raises Unavailable if the service does not answer in time.
        """
        method = getattr(self._stub, call.method)
        try:
            return call.read(await rpc.ask(method, call.of_run(self.run), seconds=call.seconds, waits=waits))
        except TimedOut as error:
            raise Unavailable(str(error)) from None

    async def watch(self, lease_id: str) -> AsyncIterator[View]:
        """Yields the view now and at every change while the lease lives. Always ends by raising an error."""
        with rpc.translate(self._stub.Watch):
            async for answer in self._stub.Watch(pb.WatchRequest(run=self.run, lease_id=lease_id)):
                yield _view(answer)
        raise Unavailable("the watch has ended")


class BlockingSyncClient:
    """Sends calls for one run from any thread. `ask` retries while the service, which may restart, does not answer."""

    def __init__(self, address: str, run: str) -> None:
        self._channel = rpc.blocking_channel(address)
        self._stub = sync_pb2_grpc.SyncServiceStub(self._channel)
        self.run = run
        self._retries = True

    def close(self) -> None:
        self._channel.close()

    def give_up(self) -> None:
        """Ends the retries of every thread: the service stays away."""
        self._retries = False

    def ask_once(self, call: Call[T]) -> T:
        """Raises Unavailable if the service does not answer."""
        method = getattr(self._stub, call.method)
        try:
            return call.read(rpc.ask_blocking(method, call.of_run(self.run), seconds=call.seconds))
        except TimedOut as error:
            raise Unavailable(str(error)) from None

    def ask(self, call: Call[T]) -> T:
        """Repeats a call until the service answers. Raises Unavailable only after `give_up`."""
        method, again = getattr(self._stub, call.method), lambda: self._retries
        try:
            return call.read(rpc.ask_blocking(method, call.of_run(self.run), seconds=call.seconds, again=again))
        except TimedOut as error:
            raise Unavailable(str(error)) from None


def _nothing(answer: Any) -> None:
    """Reads an empty answer."""


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
