"""Reads batches from the buffer, ahead of the trainer and across restarts of the service."""

import contextlib
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog

from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.api.buffer.v1 import buffer_pb2_grpc
from trinity.runtime import rpc
from trinity.runtime.errors import DataLoss, TrinityError
from trinity.runtime.waits import START_SECONDS

log = structlog.get_logger(__name__)

_AHEAD = 2
# Retries after the buffer reports a lost batch: a NATS replica that lags has it a little later.
_MOST_LOSSES = 10
_RETRY_SECONDS = 0.5
_CALL_SECONDS = 60.0
_FINISHED_SECONDS = 0.2
_HEARD_SECONDS = 10.0  # in which the buffer hears of a version
_PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


# What a batch consists of; other modules read these messages by their fields.
LedgerEntry = pb.LedgerEntry
LedgerGroup = pb.LedgerGroup
Example = pb.Example


class BatchLost(DataLoss):
    """The buffer cannot serve the steps that this trainer needs."""

    for_good = True


class BatchRefused(TrinityError):
    """The buffer refuses a batch for what the YAML names, which no restart mends."""

    for_good = True


@dataclass
class RawBatch:
    """A whole batch as received."""

    entry: LedgerEntry
    groups: list[pb.BatchGroup] = field(default_factory=list)
    examples: list[Example] = field(default_factory=list)


def encode_batch(batch: RawBatch) -> bytes:
    """Encodes the entry, then groups, then examples as length-prefixed messages."""
    messages = [batch.entry, *batch.groups, *batch.examples]
    parts = [message.SerializeToString() for message in messages]
    head = struct.pack("<II", len(batch.groups), len(batch.examples))
    return head + b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def decode_batch(data: bytes) -> RawBatch:
    groups, examples = struct.unpack_from("<II", data)
    at, parts = 8, []
    for _ in range(1 + groups + examples):
        (size,) = struct.unpack_from("<Q", data, at)
        parts.append(data[at + 8 : at + 8 + size])
        at += 8 + size
    return RawBatch(
        entry=pb.LedgerEntry.FromString(parts[0]),
        groups=[pb.BatchGroup.FromString(part) for part in parts[1 : 1 + groups]],
        examples=[pb.Example.FromString(part) for part in parts[1 + groups :]],
    )


class BufferClient:
    """Rank 0's client of the buffer: start -> next, for each step. Requests wait for a restarting buffer."""

    def __init__(self, address: str, run: str) -> None:
        self._channel = rpc.blocking_channel(address)
        self._stub = buffer_pb2_grpc.BufferServiceStub(self._channel)
        self._run = run
        self._batches: queue.Queue[RawBatch | Exception] = queue.Queue(maxsize=_AHEAD)
        self._closed = threading.Event()
        self._calling = threading.Lock()
        self._call: Any = None  # the stream of batches
        self._replaced: Any = None  # a cancelled stream, whose request did not say that the trainer waits
        self._receives = False  # True once parts of a batch have arrived
        self._taken = 0  # step of the batch that the trainer has
        self._awaited = 0  # step for which the trainer waits
        self.waiting_for = ""
        self.checkpoint_wanted = False

    def rewind(self, step: int) -> pb.RewindResponse:
        """Reports the step after which this trainer continues. Raises BatchLost if the buffer cannot serve the next."""
        try:
            request = pb.RewindRequest(run=self._run, step=step)
            deadline = time.monotonic() + START_SECONDS
            return rpc.ask_blocking(
                self._stub.Rewind, request, seconds=_CALL_SECONDS, again=lambda: time.monotonic() < deadline
            )
        except DataLoss as error:
            raise BatchLost(str(error)) from None

    def commit(self, step: int, oldest_kept_step: int) -> None:
        """Reports a durable checkpoint."""
        request = pb.CommitStepRequest(run=self._run, step=step, oldest_kept_step=oldest_kept_step)
        with contextlib.suppress(*rpc.NO_ANSWER):  # raised once this client is closed
            rpc.ask_blocking(
                self._stub.CommitStep, request, seconds=_CALL_SECONDS, again=lambda: not self._closed.is_set()
            )

    def wait_until_finished(self, live_version: int, stopping: Callable[[], bool]) -> None:
        """Waits until the run's last evaluation has ended too, or `stopping` returns True.

        The buffer may hear after the trainer that `live_version` is LIVE, and then evaluates it.
        """
        heard_by = time.monotonic() + _HEARD_SECONDS
        while not stopping():
            with contextlib.suppress(*rpc.NO_ANSWER):
                said = rpc.ask_blocking(self._stub.Stats, pb.StatsRequest(run=self._run), seconds=_CALL_SECONDS)
                if said.finished and (said.live_step >= live_version or time.monotonic() > heard_by):
                    return  # after a rollback another version is LIVE
            time.sleep(_FINISHED_SECONDS)

    def start(self, from_step: int) -> None:
        """Starts to prefetch."""
        self._taken = from_step - 1
        threading.Thread(target=self._read_for_ever, args=(from_step,), daemon=True, name="batches").start()

    def next(self, timeout_seconds: float) -> RawBatch | None:
        """Returns the next batch in step order, or None after the timeout. Raises the error that ended the reading."""
        with contextlib.suppress(queue.Empty):
            item = self._batches.get(timeout=timeout_seconds)
            if isinstance(item, Exception):
                raise item
            self._taken = item.entry.step
            return item
        self._wait()
        return None

    def _wait(self) -> None:
        """Tells the buffer that the trainer now waits for the next step, rather than reading ahead."""
        with self._calling:
            if self._awaited == self._taken + 1:
                return
            self._awaited = self._taken + 1
            if self._call is not None and not self._receives:
                self._replaced = self._call
                self._call.cancel()

    def close(self) -> None:
        self._closed.set()
        self._channel.close()

    def _read_for_ever(self, step: int) -> None:
        losses = 0
        while not self._closed.is_set():
            try:
                for batch in self._stream(step):
                    self.waiting_for, self.checkpoint_wanted = "", False
                    self._batches.put(batch)
                    losses = 0
                    step = batch.entry.step + 1
                return
            except grpc.RpcError as error:
                if self._replaced is self._call:
                    continue
                losses += error.code() is grpc.StatusCode.DATA_LOSS
                if losses > _MOST_LOSSES:
                    self._batches.put(BatchLost(f"the batch of step {step} cannot be read any more: {error.details()}"))
                    return
                if error.code() not in (*_PASSING, grpc.StatusCode.DATA_LOSS):
                    kind = BatchRefused if error.code() is grpc.StatusCode.INVALID_ARGUMENT else TrinityError
                    self._batches.put(kind(f"the buffer refuses step {step}: {error.details()}"))
                    return
                self.waiting_for = "the buffer"
                log.info("trainer.buffer.retry", step=step, code=error.code().name)
            except Exception as error:
                self._batches.put(error)
                return
            time.sleep(_RETRY_SECONDS)

    def _stream(self, from_step: int) -> Iterator[RawBatch]:
        batch: RawBatch | None = None
        with self._calling:
            waits = self._awaited == from_step
            request = pb.StreamBatchesRequest(run=self._run, from_step=from_step, waits=waits)
            self._call, self._receives = self._stub.StreamBatches(request, wait_for_ready=True), False
        for part in self._call:
            kind = part.WhichOneof("part")
            self._receives = kind not in ("waiting", "end")
            if kind == "waiting":
                self.waiting_for = f"step {part.waiting.step}: {part.waiting.reason}"
                self.checkpoint_wanted = part.waiting.checkpoint_wanted
            elif kind == "entry":
                batch = RawBatch(part.entry)
            elif batch is None:
                raise DataLoss(f"the buffer sent a {kind} outside a batch")
            elif kind == "group":
                batch.groups.append(part.group)
            elif kind == "example":
                batch.examples.append(part.example)
            else:
                self._check(batch)
                yield batch
                batch = None

    def _check(self, batch: RawBatch) -> None:
        entry = batch.entry
        if entry.skip_reason:
            return
        got = [group.ordinal for group in batch.groups]
        if got != [member.ordinal for member in entry.groups]:
            raise DataLoss(f"step {entry.step}: the groups sent are not those of the ledger entry")
        rows = [] if entry.groups else [*entry.rows]  # rows of an archive are groups
        rows += [expert.row for expert in entry.auxiliary]
        if [example.row for example in batch.examples] != rows:
            raise DataLoss(f"step {entry.step}: the rows sent are not those of the ledger entry")
