"""The collective group in which the trainer broadcasts weights to the explorers' engines. Both sides; needs torch.

Members meet in a store that the trainer serves. An epoch is one group; it is never repaired, only replaced:

    member: here -> (trainer: go) -> group                       forming, between steps
    member: ready v -> (trainer: go v) -> pause, receive, resume  one update

Every wait has a deadline. A member that answers "no" or nothing costs the others only the deadline: the update is
cancelled before any member pauses. A member that fails later breaks the epoch, and all members load from storage.
"""

import atexit
import contextlib
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist

from trinity.runtime.errors import InvalidInput
from trinity.runtime.process import environment, loopback_interface
from trinity.runtime.settings import LOOPBACK
from trinity.weights.checkpoint_slices import DTYPES
from trinity.weights.group_store import GroupBroken, Store
from trinity.weights.manifest import TensorInfo

_SPIN_SECONDS = 0.0001
# Broadcasts in flight on one side. The next one is always enqueued, so the network does not wait for the host.
_UNDER_WAY = 2

_ABORT_SECONDS = 10.0
_EXIT_SECONDS = 5.0
_ALIGNMENT = 16  # bytes

# torch watches every group of NCCL with threads. A collective that times out or fails blocks that thread for a minute,
# and destroying the group waits for it. Eight minutes later the monitor of the process's first group, even if that is
# another one, ends the process. (ProcessGroupNCCL.cpp of torch 2.11: Watchdog::runLoop, HeartbeatMonitor::runLoop.)
# Set before a process makes its first group, and for its children:
NCCL_OF_PROCESS = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
# Set while a group that may break is made: the thread that waits for it finds and reports its errors.
_NCCL_OF_GROUP = {
    **NCCL_OF_PROCESS,
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
_NEVER = timedelta(days=365)  # the timeout of such a group


@dataclass(frozen=True)
class Slot:
    """A tensor's place in its bucket, in bytes."""

    tensor: TensorInfo
    offset: int


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel in one broadcast. size_bytes includes the padding between them."""

    slots: tuple[Slot, ...]
    size_bytes: int


def plan_buckets(tensors: Sequence[TensorInfo], bucket_bytes: int) -> list[Bucket]:
    """Packs tensors in their order; a bucket ends before the tensor that would make it larger than `bucket_bytes`.

    A larger tensor gets a bucket for itself. Offsets are multiples of 16 bytes.
    """
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    size = 0
    for tensor in tensors:
        if slots and size + tensor.size_bytes > bucket_bytes:
            buckets.append(Bucket(tuple(slots), size))
            slots, size = [], 0
        slots.append(Slot(tensor, size))
        size += -(-tensor.size_bytes // _ALIGNMENT) * _ALIGNMENT
    if slots:
        buckets.append(Bucket(tuple(slots), size))
    return buckets


_Coming = tuple[Bucket, Any, torch.Tensor]


class Group:
    """One epoch's group, rank 0 the trainer. `broadcast` is a collective: every rank calls it, in the same order.

    All ranks make it together. Raises GroupBroken if a rank does not arrive or finish within the timeout, and
    torch.OutOfMemoryError.
    """

    def __init__(
        self,
        store: Store,
        epoch: int,
        backend: str,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_seconds: float,
    ) -> None:
        self.rank, self.device, self._timeout = rank, device, timeout_seconds
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0
        self._store = store  # torch's group needs it
        place = store.prefixed(f"group/{epoch}")
        try:
            self._group = _process_group(backend, place, store.address, rank, world_size, device, timeout_seconds)
        except RuntimeError as error:
            raise GroupBroken(f"epoch {epoch} could not be formed: {error}") from None
        try:
            self.wait(_in_time(self._connect, timeout_seconds))
        except TimeoutError:
            self.close()
            raise GroupBroken(f"epoch {epoch} was not formed within {timeout_seconds:g} s") from None
        except (GroupBroken, torch.OutOfMemoryError):
            self.close()
            raise

    def _connect(self) -> Any:
        """Starts the first broadcast. NCCL waits in it for all ranks, without a limit."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread
        return self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))

    def broadcast(self, buffer: torch.Tensor) -> Any:
        """Starts sending `buffer` (uint8) from rank 0 to the others. The result is for `wait`."""
        if self._group is None:
            raise GroupBroken("it was aborted")
        try:
            return self._group.broadcast([buffer], self._options)
        except RuntimeError as error:
            raise GroupBroken(f"broadcast failed: {error}") from None

    def wait(self, work: Any) -> None:
        """Blocks until a broadcast is done. After GroupBroken the group is unusable."""
        try:
            if self.device.type == "cpu":
                work.wait(timedelta(seconds=self._timeout))
                return
            end = time.monotonic() + self._timeout
            while not work.is_completed():
                if time.monotonic() > end:
                    raise RuntimeError(f"no end within {self._timeout:g} s")
                time.sleep(_SPIN_SECONDS)
            work.wait()  # orders this stream after the broadcast; raises its error
        except RuntimeError as error:
            self.close()
            raise GroupBroken(f"a broadcast was broken off: {str(error).splitlines()[0]}") from None

    def close(self) -> None:
        """Aborts the group without waiting for the other ranks; returns soon."""
        dropped, self._group = [self._group], None
        aborted = threading.Event()

        def end() -> None:
            with contextlib.suppress(Exception):
                dropped[0].abort()
            aborted.set()
            dropped.clear()  # its destructor waits for torch's threads; no caller waits for it

        _run_in_daemon_thread(end)
        aborted.wait(_ABORT_SECONDS)


_threads: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


def _run_in_daemon_thread(work: Callable[[], None]) -> None:
    """Runs `work` in a thread that callers need not wait for. The exit of the process waits for `_EXIT_SECONDS`.

    Python ends daemon threads by force at its exit. A thread that then destroys a group would abort the process.
    """
    thread = threading.Thread(target=work, daemon=True, name="group")
    _threads.add(thread)
    thread.start()


@atexit.register
def _join_threads() -> None:
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))


def _in_time(work: Callable[[], Any], seconds: float) -> Any:
    """Returns the result of a call or raises its exception. After TimeoutError the call runs on without a caller."""
    done: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((work(), None))
        except Exception as error:
            done.put((None, error))

    _run_in_daemon_thread(run)
    try:
        result, error = done.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    try:
        if error is not None:
            raise error
        return result
    finally:
        del error  # its traceback references this frame


def _process_group(
    backend: str, place: Any, address: str, rank: int, world_size: int, device: torch.device, timeout_seconds: float
) -> Any:
    if backend == "gloo":
        with environment({"GLOO_SOCKET_IFNAME": _interface(address)}):
            return dist.ProcessGroupGloo(place, rank, world_size, timedelta(seconds=timeout_seconds))
    if backend != "nccl":
        raise InvalidInput("backend", f"is {backend!r}; gloo and nccl are known")
    torch.cuda.set_device(device)
    with environment(_NCCL_OF_GROUP):
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _NEVER
        return dist.ProcessGroupNCCL(place, rank, world_size, options)


def _interface(store_address: str) -> str:
    """Returns gloo's interface: the loopback for a store on it, else the user's; empty for the host's address."""
    if store_address.rpartition(":")[0].strip("[]") in LOOPBACK:
        return loopback_interface()
    given = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return "" if given == loopback_interface() else given  # the loopback is for the trainer's own ranks


def send(group: Group, tensors: Sequence[TensorInfo], weights: Iterable[tuple[str, torch.Tensor]], size: int) -> None:
    """Rank 0: broadcasts a version. `weights` yields the tensors in the order of `tensors`; `size` is bucket_bytes.

    A bucket is packed while the one before it travels. Raises InvalidInput if the weights differ from those announced,
    GroupBroken, and torch.OutOfMemoryError if there is no room for a bucket.
    """
    given = iter(weights)
    under_way: deque[tuple[Any, torch.Tensor]] = deque()
    for bucket in plan_buckets(tensors, size):
        buffer = torch.empty(bucket.size_bytes, dtype=torch.uint8, device=group.device)
        _pack(bucket, given, buffer)
        under_way.append((group.broadcast(buffer), buffer))
        if len(under_way) == _UNDER_WAY:
            group.wait(under_way.popleft()[0])
    while under_way:
        group.wait(under_way.popleft()[0])


def _pack(bucket: Bucket, weights: Iterator[tuple[str, torch.Tensor]], buffer: torch.Tensor) -> None:
    for slot in bucket.slots:
        name, tensor = next(weights, ("nothing", torch.empty(0)))
        info = slot.tensor
        if (name, tuple(tensor.shape), tensor.dtype) != (info.name, tuple(info.shape), DTYPES[info.dtype]):
            raise InvalidInput("weights", f"{info.name} is due, {name} {list(tensor.shape)} {tensor.dtype} came")
        if info.size_bytes:
            raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            buffer[slot.offset : slot.offset + info.size_bytes].copy_(raw, non_blocking=True)


def receive(group: Group, tensors: Sequence[TensorInfo], size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Other ranks: yields the tensors of a version. A bucket's memory is free once its tensors are dropped."""
    return chain.from_iterable(receive_buckets(group, tensors, size))


def receive_buckets(group: Group, tensors: Sequence[TensorInfo], size: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yields a version's tensors bucket by bucket, one bucket ahead. The transfer has started when this returns."""
    later = iter(plan_buckets(tensors, size))
    coming = deque(_begin(group, bucket) for bucket in islice(later, _UNDER_WAY))
    return _arriving(group, coming, later)


def _arriving(
    group: Group, coming: deque[_Coming], later: Iterator[Bucket]
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    while coming:
        yield _arrived(group, *coming.popleft())  # no reference here keeps its buffer alive
        coming.extend(_begin(group, bucket) for bucket in islice(later, 1))


def _begin(group: Group, bucket: Bucket) -> _Coming:
    buffer = torch.empty(bucket.size_bytes, dtype=torch.uint8, device=group.device)
    return bucket, group.broadcast(buffer), buffer


def _arrived(group: Group, bucket: Bucket, work: Any, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    tensors = []
    for slot in bucket.slots:
        info = slot.tensor
        raw = buffer[slot.offset : slot.offset + info.size_bytes]
        tensors.append((info.name, raw.view(DTYPES[info.dtype]).view(tuple(info.shape))))
    group.wait(work)
    return tensors
