"""Writes and reads weights as safetensors files. A tensor is hashed while it is written; files are not read again.

The format: https://github.com/huggingface/safetensors#format
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import torch
import xxhash
from safetensors import safe_open

from trinity.runtime.devices import host_memory
from trinity.runtime.errors import InvalidInput
from trinity.weights import FileInfo, Manifest, TensorInfo
from trinity.weights.checkpoint_slices import DTYPES

SHARD_BYTES = 256 * 1024**2  # of a version: explorers check several files at a time
CHECKPOINT_SHARD_BYTES = 2 * 1024**3
_DTYPES = {dtype: name for name, dtype in DTYPES.items()}
_BLOCK = 1024 * 1024  # hashed at a time: stays in the CPU's cache for the second checksum
_WRITTEN = 1024 * 1024  # per write: a whole tensor takes up to twice as long (ext4)
_HELD_BYTES = 1024**3  # host copies of a GPU's shards that are being written
_PARALLEL_FILES = 8  # of tensors that stay: 13 GB/s on 16 cores; with 4 files 5 to 10 GB/s, with 14 no more

_MOST_OF_FREE = 0.8  # of free host memory, for a copy
_ALIGNMENT = 16  # bytes: a tensor of any dtype can begin there

Weights = Iterable[tuple[str, torch.Tensor]]
_Written = tuple[list[TensorInfo], FileInfo]


def describe(name: str, dtype: torch.dtype, shape: Sequence[int]) -> TensorInfo:
    """Describes a tensor whose file and checksum are not known yet."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return TensorInfo(name, _DTYPES[dtype], tuple(shape), size, "")


def write_shards(
    weights: Weights,
    layout: Sequence[TensorInfo],
    folder: Path,
    pattern: str,
    shard_bytes: int = SHARD_BYTES,
    *,
    all_stay: bool = False,
) -> tuple[list[TensorInfo], list[FileInfo]]:
    """Writes tensors in order into files of about `shard_bytes`; `pattern` names them, as "part-{:05d}.safetensors".

    Raises InvalidInput if `layout` does not describe `weights`. A CPU tensor is written before the next is requested.
    If `all_stay`, all tensors stay unchanged, and several files are written at a time. A shard of GPU tensors is copied
    to the host, and written while the next tensors arrive.
    """
    folder.mkdir(parents=True, exist_ok=True)
    given = iter(weights)
    at_once = _PARALLEL_FILES if all_stay else max(1, _HELD_BYTES // shard_bytes)
    written: list[Future[_Written]] = []
    with ThreadPoolExecutor(at_once) as writers:
        for shard in _shards(layout, shard_bytes):
            path, parts = folder / pattern.format(len(written)), _parts(shard, given)
            first = next(parts)
            if all_stay or _is_away(first):
                if len(written) >= at_once:
                    written[-at_once].result()
                held = [first, *parts] if all_stay else _held(shard, chain([first], parts))
                written.append(writers.submit(_write, path, shard, held))
            else:
                written.append(Future())
                written[-1].set_result(_write(path, shard, chain([first], parts)))
        for name, _ in given:
            raise InvalidInput("weights", f"got {name} after the last expected tensor")
    found = [file.result() for file in written]
    return [tensor for tensors, _ in found for tensor in tensors], [info for _, info in found]


def _is_away(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


def _held(shard: Sequence[TensorInfo], parts: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Copies a shard's tensors into one pinned buffer, whose memory torch reuses: ten times as fast as other memory."""
    size = sum(tensor.size_bytes for tensor in shard)
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    held = list(buffer.split([tensor.size_bytes for tensor in shard]))
    for copy, part in zip(held, parts, strict=True):
        copy.copy_(part, non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
    return held


def _parts(shard: Sequence[TensorInfo], given: Iterator[tuple[str, torch.Tensor]]) -> Iterator[torch.Tensor]:
    """Yields the shard's tensors as bytes [n]. Raises InvalidInput if one differs from the layout."""
    for expected in shard:
        name, tensor = next(given, ("nothing", torch.empty(0)))
        if (name, tuple(tensor.shape), _DTYPES.get(tensor.dtype)) != (expected.name, expected.shape, expected.dtype):
            got = f"got {name} {list(tensor.shape)} {tensor.dtype}"
            raise InvalidInput("weights", f"expected {expected.name} {list(expected.shape)} {expected.dtype}, {got}")
        yield tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _write(path: Path, shard: list[TensorInfo], parts: Iterable[torch.Tensor]) -> _Written:
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as aside:
        writer = _Writer(file, aside)
        writer.write(_header(shard))
        tensors = [
            replace(tensor, file=path.name, checksum=writer.write(memoryview(part.cpu().numpy().data)))
            for tensor, part in zip(shard, parts, strict=True)
        ]
    return tensors, FileInfo(path.name, writer.size_bytes, writer.checksum)


def _shards(layout: Sequence[TensorInfo], shard_bytes: int) -> Iterator[list[TensorInfo]]:
    """Splits a layout into shards of one dtype each, so that every tensor is aligned to its elements."""
    shard: list[TensorInfo] = []
    size = 0
    for tensor in layout:
        if shard and (size + tensor.size_bytes > shard_bytes or tensor.dtype != shard[0].dtype):
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.size_bytes
    if shard:
        yield shard


def _header(shard: list[TensorInfo]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in shard:
        offsets = [at, at + tensor.size_bytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
        at = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class _Writer:
    """Writes a file while another thread computes its checksum."""

    def __init__(self, file: BinaryIO, aside: ThreadPoolExecutor) -> None:
        self._file = file
        self._aside = aside
        self._digest = xxhash.xxh3_128()
        self.size_bytes = 0

    @property
    def checksum(self) -> str:
        return self._digest.hexdigest()

    def write(self, data: bytes | memoryview) -> str:
        """Writes a part of the file; returns the part's checksum."""
        view = memoryview(data)
        hashed = self._aside.submit(self._hash, view)
        self.size_bytes += len(view)
        try:
            while view:
                view = view[self._file.write(view[:_WRITTEN]) :]
        finally:
            checksum = hashed.result()
        return checksum

    def _hash(self, view: memoryview) -> str:
        digest = xxhash.xxh3_128()
        for begin in range(0, len(view), _BLOCK):
            block = view[begin : begin + _BLOCK]
            digest.update(block)
            self._digest.update(block)
        return digest.hexdigest()


def read_version(manifest: Manifest, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of a version whose whole files are in `folder`, in the manifest's order."""
    shards = {info.name: safe_open(folder / info.name, "pt") for info in manifest.files}
    for tensor in manifest.tensors:
        yield tensor.name, shards[tensor.file].get_tensor(tensor.name)


def write_huggingface_index(folder: Path, tensors: Sequence[TensorInfo], infos: Sequence[FileInfo]) -> None:
    """Writes transformers' index of several shards; a single shard is renamed to model.safetensors."""
    if len(infos) == 1:
        (folder / infos[0].name).rename(folder / "model.safetensors")
        return
    index = {
        "metadata": {"total_size": sum(tensor.size_bytes for tensor in tensors)},
        "weight_map": {tensor.name: tensor.file for tensor in tensors},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


class Snapshot:
    """A copy of the weights in host memory, to publish while the next step changes the weights.

    reserve -> (take -> iterate) any number of times. Each `take` overwrites the memory of the one before. For a GPU the
    memory is pinned, so that copies run at the speed of the bus.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._tensors: list[tuple[str, torch.Tensor]] = []

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors)

    def reserve(self, layout: Sequence[TensorInfo]) -> None:
        """Allocates the memory for tensors that `layout` describes."""
        size = sum(_rooms(layout))
        if self._buffer.numel() != size:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # frees the old memory first
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._on_gpu)

    def fits(self, layout: Sequence[TensorInfo]) -> bool:
        """Returns True if host memory has room for a copy, or holds it already; ranks of a machine share the room."""
        size, free = sum(_rooms(layout)), host_memory() * 2**30
        own = free / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return not free or size <= max(self._buffer.numel(), own * _MOST_OF_FREE)

    @torch.no_grad()
    def take(self, layout: Sequence[TensorInfo], weights: Weights) -> "Snapshot":
        """Copies the tensors that `layout` describes; returns itself. Reserves memory if needed."""
        self._tensors = []
        self.reserve(layout)
        for (name, tensor), room in zip(weights, self._buffer.split(_rooms(layout)), strict=True):
            size = tensor.numel() * tensor.element_size()
            copy = room[:size].view(tensor.dtype).view(tensor.shape)
            copy.copy_(tensor, non_blocking=True)
            self._tensors.append((name, copy))
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        return self


def _rooms(layout: Sequence[TensorInfo]) -> list[int]:
    """Returns the bytes reserved for each tensor."""
    return [-(-tensor.size_bytes // _ALIGNMENT) * _ALIGNMENT for tensor in layout]
