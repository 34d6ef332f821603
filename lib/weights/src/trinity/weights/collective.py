"""The collective group over which the trainer broadcasts weights to the explorers' engines. Both sides; needs torch.

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
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist

from trinity.runtime.errors import InvalidInput, TrinityError
from trinity.runtime.process import environment
from trinity.weights import nccl
from trinity.weights.buckets import Bucket, plan_buckets
from trinity.weights.manifest import TensorInfo

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_POLL_SECONDS = 0.005
_SPIN_SECONDS = 0.0001
_YES, _NO = b"yes", b"no"
# Broadcasts in flight on one side. The next one is always enqueued, so the network does not wait for the host.
_UNDER_WAY = 2

_ABORT_SECONDS = 10.0
_EXIT_SECONDS = 5.0

_Coming = tuple[Bucket, Any, torch.Tensor]


class GroupBroken(TrinityError):
    """A member of the group is gone, hangs or refuses; the epoch has ended."""


class Store:
    """Where trainer and members meet: torch's TCPStore, with deadlines and without blocking reads."""

    def __init__(self, store: Any, host: str) -> None:
        self._store = store
        self.address = f"{host}:{store.port}"

    @classmethod
    def serve(cls, host: str) -> "Store":
        """Listens on a free port. A loopback host binds that address only; any other name binds all interfaces."""
        loopback = host in ("127.0.0.1", "localhost")
        with socket.socket() as listening:
            listening.bind(("127.0.0.1" if loopback else "0.0.0.0", 0))
            listening.listen(128)
            descriptor = listening.detach()
        port = socket.socket(fileno=os.dup(descriptor)).getsockname()[1]
        options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "master_listen_fd": descriptor}
        return cls(dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=10), **options), host)

    @classmethod
    def connect(cls, address: str, timeout_seconds: float) -> "Store":
        """Raises GroupBroken if no process serves it."""
        host, _, port = address.rpartition(":")
        try:
            limit = timedelta(seconds=timeout_seconds)
            return cls(dist.TCPStore(host, int(port), timeout=limit, wait_for_workers=False), host)
        except (RuntimeError, ValueError) as error:
            raise GroupBroken(f"the trainer's store at {address} does not answer: {error}") from None

    def prefixed(self, prefix: str) -> Any:
        """For a process group."""
        return dist.PrefixStore(prefix, self._store)

    def say(self, key: str, yes: bool = True) -> None:
        with _broken_store():
            self._store.set(key, _YES if yes else _NO)

    def heard(self, key: str) -> bool | None:
        """The value of a key; None: not set yet."""
        with _broken_store():
            return bytes(self._store.get(key)) == _YES if self._store.check([key]) else None

    def wait(self, key: str, timeout_seconds: float) -> bool:
        """Whether the answer "yes" came in time."""
        return self.wait_all([key], timeout_seconds)[0] is True

    def wait_all(self, keys: Sequence[str], timeout_seconds: float) -> list[bool | None]:
        """The answer under each key; returns early when all are yes, or one is no."""
        end = time.monotonic() + timeout_seconds
        while True:
            heard = [self.heard(key) for key in keys]
            if all(heard) or False in heard or time.monotonic() >= end:
                return heard
            time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def _broken_store() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.distributed.DistError is one
        raise GroupBroken(f"the trainer's store is gone: {error}") from None


class Group:
    """One epoch's group, rank 0 the trainer. `broadcast` is a collective: every rank calls it, in the same order.

    Made by every rank together. Raises GroupBroken when a rank does not come, or is not done, within the timeout.
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
        place = store.prefixed(f"group/{epoch}")
        try:
            self._group = _process_group(backend, place, rank, world_size, device, timeout_seconds)
        except RuntimeError as error:
            raise GroupBroken(f"epoch {epoch} could not be formed: {error}") from None
        try:
            self.wait(_in_time(self._connect, timeout_seconds))
        except TimeoutError:
            self.close()
            raise GroupBroken(f"epoch {epoch} was not formed within {timeout_seconds:g} s") from None
        except GroupBroken:
            self.close()
            raise

    def _connect(self) -> Any:
        """The first broadcast. NCCL waits in it for all ranks, as long as it takes."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread
        return self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))

    def broadcast(self, buffer: torch.Tensor) -> Any:
        """Start sending `buffer` (uint8) from rank 0 to the others; pass the result to `wait`."""
        if self._group is None:
            raise GroupBroken("it was aborted")
        try:
            return self._group.broadcast([buffer], self._options)
        except RuntimeError as error:
            raise GroupBroken(f"broadcast failed: {error}") from None

    def wait(self, work: Any) -> None:
        """Blocks until a broadcast is done. After GroupBroken the group cannot be used."""
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
        """Abort the group without waiting for the other ranks; returns soon."""
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
    """The caller may stop waiting for it. The exit of the process waits for `_EXIT_SECONDS`.

    Python ends daemon threads by force at its exit. One that destroys a group then would abort the process.
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
    """Its result or its exception. TimeoutError: the call keeps running, and no caller waits for it."""
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
    backend: str, place: Any, rank: int, world_size: int, device: torch.device, timeout_seconds: float
) -> Any:
    if backend == "gloo":
        return dist.ProcessGroupGloo(place, rank, world_size, timedelta(seconds=timeout_seconds))
    if backend != "nccl":
        raise InvalidInput("backend", f"is {backend!r}; gloo and nccl are known")
    torch.cuda.set_device(device)
    with environment(nccl.OF_GROUP):
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = nccl.NEVER
        return dist.ProcessGroupNCCL(place, rank, world_size, options)


def send(group: Group, tensors: Sequence[TensorInfo], weights: Iterable[tuple[str, torch.Tensor]], size: int) -> None:
    """Rank 0: broadcast a version. `weights` yields the tensors in the order of `tensors`; `size` is bucket_bytes.

    A bucket is packed while the one before it travels. Raises InvalidInput if the weights differ from those announced.
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
        if (name, tuple(tensor.shape), tensor.dtype) != (info.name, tuple(info.shape), _DTYPES[info.dtype]):
            raise InvalidInput("weights", f"{info.name} is due, {name} {list(tensor.shape)} {tensor.dtype} came")
        if info.size_bytes:
            raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            buffer[slot.offset : slot.offset + info.size_bytes].copy_(raw)


def receive(group: Group, tensors: Sequence[TensorInfo], size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Other ranks: the tensors of a version as they come. A bucket's memory is free once its tensors are dropped."""
    return chain.from_iterable(receive_buckets(group, tensors, size))


def receive_buckets(group: Group, tensors: Sequence[TensorInfo], size: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """As `receive`, one bucket at a time; the transfer has started when this returns. One bucket is prefetched."""
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
        tensors.append((info.name, raw.view(_DTYPES[info.dtype]).view(tuple(info.shape))))
    group.wait(work)
    return tensors
