"""Weights from safetensors files to a device, a bucket at a time, through pinned memory.

    files -- threads --> a stage (pinned) -- one copy, asynchronous --> the bucket on the device --> tensors, its views

A GPU copies from pinned memory by itself, but not from a memory-mapped file: there one host thread copies tensor after
tensor into a buffer of the driver, and nothing overlaps. Here the next stages are read while one is copied. All copies
run in the stream that uses the tensors, so the host never waits for them.
"""

import os
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import _TYPES

from trinity.runtime.errors import InvalidInput
from trinity.weights.checkpoints import data_begin, safetensors_header
from trinity.weights.collective import Bucket, plan_buckets
from trinity.weights.manifest import TensorInfo

_SHARE_BYTES = 4 * 1024**2  # of a stage: what one thread reads
_SHARES = 16  # 46 GB/s; 8 threads with twice the share have 22
_STAGES = 4  # one travels, one is waited for, two are read

Named = tuple[str, torch.Tensor]
_DTYPES: dict[str, torch.dtype] = {name: dtype for name, dtype in _TYPES.items() if dtype is not None}


@dataclass(frozen=True)
class Found:
    """A tensor in a file, with its first byte. `info` is independent of the file."""

    info: TensorInfo
    path: str
    begin: int


def find(paths: Sequence[str], tensors: Sequence[Sequence[Any]]) -> list[Found]:
    """Find tensors, given as (name, index in `paths`), in their files. Keeps the order.

    Raises InvalidInput naming a file that is missing or damaged, or lacks a tensor.
    """
    headers = [safetensors_header(Path(path)) for path in paths]
    begins = [data_begin(Path(path)) for path in paths]
    found = []
    for name, index in tensors:
        entry = headers[index].get(name)
        if entry is None:
            raise InvalidInput(paths[index], f"does not hold a tensor {name!r}")
        if entry["dtype"] not in _DTYPES:
            raise InvalidInput(paths[index], f"holds {name!r} in {entry['dtype']}; known are {', '.join(_DTYPES)}")
        begin, end = entry["data_offsets"]
        info = TensorInfo(name, entry["dtype"], tuple(entry["shape"]), end - begin, "")
        found.append(Found(info, paths[index], begins[index] + begin))
    return found


class Staging:
    """A worker's pinned memory, made when it is first needed and kept: pinning takes longer than a load."""

    def __init__(self, device: torch.device, share_bytes: int = _SHARE_BYTES) -> None:
        self._device = device
        self._share = share_bytes
        self._stage = share_bytes * _SHARES

    @cached_property
    def _stages(self) -> deque["_Stage"]:
        return deque(_Stage(self._stage, self._device) for _ in range(_STAGES))

    def read(self, tensors: Sequence[Found]) -> Generator[list[Named]]:
        """Yield the tensors in their order, on the device, a bucket at a time. Yielded tensors stay valid.

        Only one read may run; close it if it is left early. Raises OSError, and InvalidInput if a file was shortened.
        """
        with ExitStack() as held:
            files = {path: held.enter_context(open(path, "rb", 0)) for path in {tensor.path for tensor in tensors}}
            threads = ThreadPoolExecutor(_SHARES, "staging")
            held.callback(threads.shutdown, cancel_futures=True)
            buckets = plan_buckets([tensor.info for tensor in tensors], self._stage)
            places = iter(tensors)
            parts = [_grouped(_pieces(bucket, places, files, self._share), self._stage) for bucket in buckets]
            later = (self._begin(part, threads) for of_bucket in parts for part in of_bucket)
            coming = deque(islice(later, _STAGES - 1))
            for bucket, of_bucket in zip(buckets, parts, strict=True):
                yield self._arrived(bucket, len(of_bucket), coming, later)  # no name here keeps its memory

    def _begin(self, pieces: list["_Piece"], threads: ThreadPoolExecutor) -> "_Coming":
        """Read the pieces of one stage by all threads."""
        stage = self._stages[0]
        self._stages.rotate(-1)
        stage.wait()
        first = pieces[0].to // self._stage * self._stage
        reading = [threads.submit(_read, share, stage.bytes, first) for share in _grouped(pieces, self._share)]
        return _Coming(stage, first, pieces[-1].to + pieces[-1].size, reading)

    def _arrived(self, bucket: Bucket, parts: int, coming: deque["_Coming"], later: Iterator["_Coming"]) -> list[Named]:
        room = self._room(bucket.size_bytes)
        for _ in range(parts):
            part = coming.popleft()
            for share in part.reading:
                share.result()
            part.stage.send(room[part.begin : part.end])
            coming.extend(islice(later, 1))
        return [(slot.tensor.name, _view(room, slot.offset, slot.tensor)) for slot in bucket.slots]

    def _room(self, size_bytes: int) -> torch.Tensor:
        """On the host if the device is full: a bucket is as large as the largest tensor, and vLLM takes what it can."""
        try:
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")


class _Stage:
    """Memory that is read into, and copied from."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._memory = torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self._sent = torch.cuda.Event() if pinned else None
        self.bytes = self._memory.numpy().data

    def send(self, target: torch.Tensor) -> None:
        """Copy its first bytes to the bucket. `wait` returns when they are copied."""
        target.copy_(self._memory[: len(target)], non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def wait(self) -> None:
        if self._sent is not None:
            self._sent.synchronize()


@dataclass(frozen=True)
class _Piece:
    """Bytes that one thread reads at once: from a byte of a file to a byte of a bucket."""

    file: FileIO
    begin: int
    to: int
    size: int


@dataclass(frozen=True)
class _Coming:
    """Bytes of a bucket that are being read into a stage."""

    stage: _Stage
    begin: int
    end: int
    reading: list[Future[None]]


def _pieces(bucket: Bucket, tensors: Iterator[Found], files: dict[str, FileIO], most: int) -> list[_Piece]:
    """Split a bucket into pieces, in order, none of which crosses a multiple of `most` bytes."""
    pieces = []
    for slot, tensor in zip(bucket.slots, tensors, strict=False):
        at, end = slot.offset, slot.offset + slot.tensor.size_bytes
        while at < end:
            size = min(end, (at // most + 1) * most) - at
            pieces.append(_Piece(files[tensor.path], tensor.begin + at - slot.offset, at, size))
            at += size
    return pieces


def _grouped(pieces: list[_Piece], size: int) -> list[list[_Piece]]:
    """Group pieces by the multiple of `size` bytes before them."""
    return [list(group) for _, group in groupby(pieces, lambda piece: piece.to // size)]


def _read(pieces: list[_Piece], stage: memoryview, first: int) -> None:
    for piece in pieces:
        begin, left = piece.begin, stage[piece.to - first : piece.to - first + piece.size]
        while left:
            count = os.preadv(piece.file.fileno(), [left], begin)
            if not count:
                raise InvalidInput(piece.file.name, f"ends at byte {begin}; it was longer when the load began")
            begin, left = begin + count, left[count:]


def _view(room: torch.Tensor, offset: int, info: TensorInfo) -> torch.Tensor:
    return room[offset : offset + info.size_bytes].view(_DTYPES[info.dtype]).view(info.shape)
