"""Writes and reads weights as safetensors files. A tensor is hashed while it is written; files are not read again.

The format: https://github.com/huggingface/safetensors#format
"""

import json
import mmap
import os
import shutil
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import BinaryIO

import structlog
import torch
import xxhash
from safetensors import safe_open

from trinity.runtime.devices import host_memory
from trinity.runtime.errors import InvalidInput
from trinity.weights.checkpoint_slices import DTYPES
from trinity.weights.checkpoints import encode_header
from trinity.weights.manifest import FileInfo, Manifest, TensorInfo

log = structlog.get_logger(__name__)

SHARD_BYTES = 256 * 1024**2  # of a version: explorers check several files at a time
CHECKPOINT_SHARD_BYTES = 2 * 1024**3
_DTYPES = {dtype: name for name, dtype in DTYPES.items()}
# Written, or hashed, by one call. After each call a thread waits for the interpreter, 5 ms while the next step has it.
_PIECE = 16 * 1024**2
_HASHED_TOGETHER = 16  # files in memory: 74 GB/s; 8 have 40
VERSION_FILES = "part-{:05d}.safetensors"
_HELD_BYTES = 1024**3  # host copies of a GPU's shards that are being written
_PARALLEL_FILES = 8  # of tensors that stay: 13 GB/s on 16 cores; with 4 files 5 to 10 GB/s, with 14 no more

_NEXT = ".next."  # begins the name of a folder whose files are to come

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
    return encode_header((tensor.name, tensor.dtype, tensor.shape, tensor.size_bytes) for tensor in shard)


class _Checksums:
    """The checksums of a file's parts and of the whole."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    @property
    def checksum(self) -> str:
        return self._digest.hexdigest()

    def hash(self, view: memoryview) -> str:
        """Adds a part to the file's checksum; returns the part's."""
        digest = xxhash.xxh3_128()
        for begin in range(0, len(view), _PIECE):
            block = view[begin : begin + _PIECE]
            digest.update(block)
            self._digest.update(block)
        return digest.hexdigest()


class _Writer(_Checksums):
    """Writes a file while another thread computes its checksum."""

    def __init__(self, file: BinaryIO, aside: ThreadPoolExecutor) -> None:
        super().__init__()
        self._file = file
        self._aside = aside
        self.size_bytes = 0

    def write(self, data: bytes | memoryview) -> str:
        """Writes a part of the file; returns the part's checksum."""
        view = memoryview(data)
        hashed = self._aside.submit(self.hash, view)
        self.size_bytes += len(view)
        try:
            while view:
                view = view[self._file.write(view[:_PIECE]) :]
        finally:
            checksum = hashed.result()
        return checksum


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

    reserve -> (expect -> take | abandon, and iterate or `give`) any number of times -> close. Each `take` overwrites
    the memory of the one before. Iteration may begin after `expect`, in another thread: it yields each tensor as soon
    as it is copied. For a GPU the memory is pinned, so that copies run at the speed of the bus.

    With `root`, a folder in shared memory, the memory is that of the next version's files: `give` hands them over, and
    `reserve` makes new ones, which takes 0.3 s a GB and is for the time after a version. Without room for them the
    memory is the process's.
    """

    def __init__(self, device: torch.device, root: Path | None = None) -> None:
        self._on_gpu = device.type == "cuda"
        self._device = device
        self._root = root
        self._files: _Files | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._coming = _Coming()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._coming)

    @property
    def has_files(self) -> bool:
        """True if `give` hands the copy over."""
        return self._files is not None and not self._files.given

    def reserve(self, layout: Sequence[TensorInfo]) -> None:
        """Allocates the memory for tensors that `layout` describes."""
        if self._root is not None and self._reserve_files(self._root, list(layout)):
            self._buffer = torch.empty(0, dtype=torch.uint8)
            return
        size = sum(_rooms(layout))
        if self._buffer.numel() != size:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # frees the old memory first
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._on_gpu)

    def _reserve_files(self, root: Path, layout: list[TensorInfo]) -> bool:
        if self._files is not None and self._files.layout == layout and not self._files.given:
            return True
        self._coming = _Coming()  # no tensor keeps the old memory
        self.close()
        try:
            self._files = _Files(root, layout, self._device)
        except OSError as error:
            log.warning("trainer.version.no_files_ahead", folder=str(root), reason=str(error))
        return self._files is not None

    def fits(self, layout: Sequence[TensorInfo]) -> bool:
        """Returns True if host memory has room for a copy, or holds it already; ranks of a machine share the room."""
        size, free = sum(_rooms(layout)), host_memory() * 2**30
        own = free / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return not free or size <= max(self._buffer.numel(), own * _MOST_OF_FREE)

    def expect(self, layout: Sequence[TensorInfo]) -> "Snapshot":
        """Forgets the tensors: `take` will copy the next ones. Returns itself. Reserves memory if needed."""
        self.reserve(layout)
        self._coming = _Coming()
        return self

    def abandon(self) -> None:
        """Ends iterations that wait for `take`, by an error."""
        self._coming.end(broken=True)

    @torch.no_grad()
    def take(self, layout: Sequence[TensorInfo], weights: Weights) -> "Snapshot":
        """Copies the tensors that `layout` describes; returns itself. Reserves memory if needed."""
        if self._coming.ended:
            self.expect(layout)
        self.reserve(layout)
        rooms = self._files.rooms if self._files is not None else self._buffer.split(_rooms(layout))
        for (name, tensor), room in zip(weights, rooms, strict=True):
            size = tensor.numel() * tensor.element_size()
            copy = room[:size].view(tensor.dtype).view(tensor.shape)
            copy.copy_(tensor, non_blocking=True)
            self._coming.add(name, copy, torch.cuda.current_stream().record_event() if self._on_gpu else None)
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        self._coming.end()
        return self

    def give(self, folder: Path) -> tuple[list[TensorInfo], list[FileInfo]]:
        """Hashes the files of a version while their tensors are copied, and names their folder.

        Raises InvalidInput if the layout does not describe the tensors.
        """
        assert self._files is not None
        given, hashed = iter(self), []
        with ThreadPoolExecutor(_HASHED_TOGETHER) as threads:
            for file in self._files.files:
                list(_parts(file.shard, given))  # waits until they are copied
                hashed.append(threads.submit(file.written))
            for name, _ in given:
                raise InvalidInput("weights", f"got {name} after the last expected tensor")
        found = [file.result() for file in hashed]
        self._files.folder.rename(folder)
        self._files.given = True
        return [tensor for tensors, _ in found for tensor in tensors], [info for _, info in found]

    def close(self) -> None:
        """Frees the memory of files. Removes files that were not given away."""
        if self._files is not None:
            self._files.close()
        self._files = None


class _Files:
    """The files of a version whose tensors are to come, in a folder whose name no version has."""

    def __init__(self, root: Path, layout: list[TensorInfo], device: torch.device) -> None:
        """Removes such folders of killed trainers. Raises OSError without room."""
        for left in root.glob(f"{_NEXT}*"):
            shutil.rmtree(left, ignore_errors=True)
        self.layout, self.given = layout, False
        self.folder = root / f"{_NEXT}{uuid.uuid4().hex}"
        self.folder.mkdir(parents=True)
        self.files: list[_MappedFile] = []
        try:
            for number, shard in enumerate(_shards(layout, SHARD_BYTES)):
                self.files.append(_MappedFile(self.folder / VERSION_FILES.format(number), shard, device))
        except BaseException:
            self.close()
            raise

    @property
    def rooms(self) -> list[torch.Tensor]:
        return [room for file in self.files for room in file.rooms]

    def close(self) -> None:
        for file in self.files:
            file.unpin()
        self.files = []
        if not self.given:
            shutil.rmtree(self.folder, ignore_errors=True)


class _MappedFile:
    """A file with its header; `rooms` are the bytes of its tensors, pinned for a GPU."""

    def __init__(self, path: Path, shard: list[TensorInfo], device: torch.device) -> None:
        self.path, self.shard, self._device, self._pinned = path, shard, device, False
        self._header = _header(shard)
        sizes = [tensor.size_bytes for tensor in shard]
        with path.open("xb+") as file:
            os.posix_fallocate(file.fileno(), 0, len(self._header) + sum(sizes))  # else no room would be a SIGBUS
            mapped = mmap.mmap(file.fileno(), len(self._header) + sum(sizes))
        mapped[: len(self._header)] = self._header
        self._whole = torch.frombuffer(mapped, dtype=torch.uint8)
        self.rooms = list(self._whole[len(self._header) :].split(sizes))
        if device.type == "cuda":
            with torch.cuda.device(device):
                code = int(torch.cuda.cudart().cudaHostRegister(self._whole.data_ptr(), len(self._whole), 0))
            if code:
                raise OSError(f"CUDA does not pin {path.name}: error {code}")
            self._pinned = True

    def written(self) -> _Written:
        """Returns what `_write` does."""
        checksums = _Checksums()
        checksums.hash(memoryview(self._header))
        tensors = [
            replace(tensor, file=self.path.name, checksum=checksums.hash(memoryview(room.numpy().data)))
            for tensor, room in zip(self.shard, self.rooms, strict=True)
        ]
        return tensors, FileInfo(self.path.name, len(self._whole), checksums.checksum)

    def unpin(self) -> None:
        if self._pinned:
            with torch.cuda.device(self._device):
                torch.cuda.cudart().cudaHostUnregister(self._whole.data_ptr())
        self._pinned = False


class _Coming:
    """Tensors that one thread copies, in order, while others iterate over them."""

    def __init__(self) -> None:
        self._tensors: list[tuple[str, torch.Tensor, torch.cuda.Event | None]] = []
        self._changed = threading.Condition()
        self._broken = self.ended = False

    def add(self, name: str, tensor: torch.Tensor, copied: "torch.cuda.Event | None") -> None:
        with self._changed:
            self._tensors.append((name, tensor, copied))
            self._changed.notify_all()

    def end(self, broken: bool = False) -> None:
        with self._changed:
            self._broken, self.ended = broken, True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index in count():
            with self._changed:
                self._changed.wait_for(lambda: self.ended or len(self._tensors) > index)  # noqa: B023
                if self._broken:
                    raise RuntimeError("the weights were not copied")
                if len(self._tensors) == index:
                    return
                name, tensor, copied = self._tensors[index]
            if copied is not None:
                copied.synchronize()
            yield name, tensor


def _rooms(layout: Sequence[TensorInfo]) -> list[int]:
    """Returns the bytes reserved for each tensor."""
    return [-(-tensor.size_bytes // _ALIGNMENT) * _ALIGNMENT for tensor in layout]
