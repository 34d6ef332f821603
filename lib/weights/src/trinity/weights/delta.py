"""A version as a difference to an older one: a file for every shard, that applied to the base gives the shard's bytes.

`<shard>.delta` is a safetensors file. It has an entry for each of the shard's tensors, of type U8: the frames of its
blocks (blocks.py), and in its metadata the shard's own header. So the reconstructed shard equals the published
one byte for byte, with the manifest's layout and checksum. A tensor that the base lacks, or holds in another shape or
dtype, travels whole. Files are read and written piece by piece, some tens of MiB at a time, and with
read calls instead of a memory map: a base truncated meanwhile then raises an error instead of killing the process.

Part of the full bytes that travel, by the share of changed elements (270 MB of normally distributed weights, whose
elements change by about 1 % in bf16 and 0.01 % in float32; benchmarks/sync_storage.py prints it):

                                        bf16                              float32
    share of changed elements   0.1 %    1 %   10 %  100 %       0.1 %    1 %   10 %  100 %
    sparse (this)              0.11 % 0.76 %  4.7 %   18 %      0.10 % 0.73 %  5.6 %   39 %
    XOR and zstandard          0.18 %  1.4 %  9.6 %   31 %      0.17 %  1.2 %  8.6 %   56 %

XOR and zstandard would need no blocks.py, but sends twice the bytes over the network that deltas are for, and 9.6 %
of them where 10 % of the elements changed.

Elements replaced by random bits: 0.18, 1.5, 12 and 100 % against 0.29, 2.2, 17 and 100 % in bf16. At 1 % one core
encodes some 600 and applies 700 of the full MB a second; where everything has changed, some 100.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from trinity.runtime import files
from trinity.runtime.errors import InvalidInput
from trinity.weights import blocks
from trinity.weights.checkpoints import safetensors_header
from trinity.weights.manifest import FileInfo, Manifest, TensorInfo

SUFFIX = ".delta"
_FORMAT = "trinity-delta-1"
_THREADS = min(4, os.cpu_count() or 1)
_LARGEST_OFFSET = 10**15  # reserved for a header that is written last

Item = TypeVar("Item")
Result = TypeVar("Result")


def encode(base: Path, base_manifest: Manifest, source: Path, manifest: Manifest, target: Path) -> tuple[FileInfo, ...]:
    """Write the difference between two versions' files into `target`; returns its description.

    Raises InvalidInput naming a file that is missing or damaged, or a tensor that is not in its file.
    """
    with ExitStack() as stack:
        old, new = _Version(base, base_manifest, stack), _Version(source, manifest, stack)
        return tuple(_encode_shard(old, new, source / info.name, target) for info in manifest.files)


def apply(base: Path, base_manifest: Manifest, delta: Path, manifest: Manifest, target: Path) -> None:
    """Make the whole files of `manifest` in `target` from the base's and the difference's.

    Raises InvalidInput naming the tensor or file that differs from the manifest; no such file remains.
    """
    if manifest.delta is None or manifest.delta.base_version != base_manifest.version:
        wanted = manifest.delta.base_version if manifest.delta else None
        raise InvalidInput("manifest.delta.base_version", f"is {wanted}; the base given is {base_manifest.version}")
    with ExitStack() as stack:
        old = _Version(base, base_manifest, stack)
        for info in manifest.files:
            tensors = {tensor.name: tensor for tensor in manifest.tensors if tensor.file == info.name}
            difference = _Difference(delta / (info.name + SUFFIX), tensors, stack)
            partial = target / f".{info.name}.partial"
            try:
                _check_file(info, _write_shard(old, difference, partial), partial.stat().st_size)
                partial.rename(target / info.name)
            finally:
                partial.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Place:
    """The location of a tensor's bytes."""

    tensor: TensorInfo
    file: "_File"
    offset: int

    def read(self, start: int, size: int) -> blocks.Bytes:
        return self.file.read(self.offset + start, size)


class _File:
    """A safetensors file, open for reading. Raises InvalidInput if it is not one, or shorter than its header says."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        self.entries = safetensors_header(path)
        self._handle = os.open(path, os.O_RDONLY)
        stack.callback(os.close, self._handle)
        self.header = self.read(8, int.from_bytes(self.read(0, 8).tobytes(), "little")).tobytes()
        self.data_offset = 8 + len(self.header)

    def read(self, offset: int, size: int) -> blocks.Bytes:
        data = np.empty(size, np.uint8)
        done = 0
        while done < size:
            count = os.preadv(self._handle, [data[done:].data], offset + done)
            if count == 0:
                raise InvalidInput(str(self.path), f"ends at {offset + done} bytes; it is damaged or being replaced")
            done += count
        return data


class _Version:
    """The tensors of a version's files in a folder."""

    def __init__(self, folder: Path, manifest: Manifest, stack: ExitStack) -> None:
        opened = {info.name: _File(folder / info.name, stack) for info in manifest.files}
        self._places: dict[str, _Place] = {}
        for tensor in manifest.tensors:
            file = opened[tensor.file]
            entry = file.entries.get(tensor.name)
            if entry is None or (entry["dtype"], tuple(entry["shape"])) != (tensor.dtype, tensor.shape):
                raise InvalidInput(tensor.name, f"is not in {file.path} as the manifest says: {entry}")
            self._places[tensor.name] = _Place(tensor, file, file.data_offset + entry["data_offsets"][0])

    def shard(self, name: str) -> list[_Place]:
        """The tensors of one file, in the order of their bytes."""
        return sorted((p for p in self._places.values() if p.tensor.file == name), key=lambda place: place.offset)

    def like(self, tensor: TensorInfo, start: int, size: int) -> blocks.Bytes:
        """A piece of the tensor of this name; zeros if no tensor has this shape and dtype."""
        place = self._places.get(tensor.name)
        if place is None or (place.tensor.dtype, place.tensor.shape) != (tensor.dtype, tensor.shape):
            return np.zeros(size, np.uint8)
        return place.read(start, size)


def _encode_shard(old: _Version, new: _Version, source: Path, target: Path) -> FileInfo:
    places = new.shard(source.name)
    sizes = {place.tensor.name: 0 for place in places}

    def encoded(piece: tuple[_Place, int, int]) -> tuple[str, bytes]:
        place, start, size = piece
        tensor = place.tensor
        return tensor.name, blocks.encode(old.like(tensor, start, size), place.read(start, size), _width(tensor))

    with ExitStack() as stack:
        metadata = {"format": _FORMAT, "header": _File(source, stack).header.decode()}
    room = len(_header(metadata, dict.fromkeys(sizes, _LARGEST_OFFSET)))
    path = target / (source.name + SUFFIX)
    with path.open("wb") as file:
        file.seek(8 + room)
        pieces = ((place, start, size) for place in places for start, size in _pieces(place.tensor))
        for name, frame in _in_order(encoded, pieces):
            file.write(frame)
            sizes[name] += len(frame)
        file.seek(0)
        file.write(room.to_bytes(8, "little") + _header(metadata, sizes).ljust(room))
    return FileInfo(path.name, path.stat().st_size, files.checksum(path))


def _header(metadata: dict[str, str], sizes: dict[str, int]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    return json.dumps(header, separators=(",", ":")).encode()


class _Difference:
    """A file of differences. `header` is that of the shard to be made, `tensors` what it holds, in their order."""

    def __init__(self, path: Path, tensors: dict[str, TensorInfo], stack: ExitStack) -> None:
        self._file = _File(path, stack)
        try:
            metadata = json.loads(self._file.header)["__metadata__"]
            if metadata["format"] != _FORMAT:
                raise ValueError(f"its format is {metadata['format']!r}, not {_FORMAT!r}")
            self.header: bytes = metadata["header"].encode()
            self.tensors = _tensors_in_order(json.loads(self.header), tensors)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInput(str(path), f"is no difference of this version: {error!r}") from None
        missing = sorted(tensors.keys() - self._file.entries.keys())
        if missing:
            raise InvalidInput(missing[0], f"is missing in {path}")

    def pieces(self) -> Iterator[tuple[TensorInfo, int, int, int, int, int]]:
        """Tensor, start and size of a block; kind, place and length of its frame's payload."""
        for tensor in self.tensors:
            begin, end = self._file.entries[tensor.name]["data_offsets"]
            at, end = self._file.data_offset + begin, self._file.data_offset + end
            for start, size in _pieces(tensor):
                if at + blocks.FRAME.size > end:
                    raise InvalidInput(tensor.name, f"its difference in {self._file.path} is cut off")
                kind, length = blocks.FRAME.unpack(self._file.read(at, blocks.FRAME.size).tobytes())
                at += blocks.FRAME.size
                if at + length > end:
                    raise InvalidInput(tensor.name, f"its difference in {self._file.path} is cut off")
                yield tensor, start, size, kind, at, length
                at += length

    def decoded(self, old: _Version, piece: tuple[TensorInfo, int, int, int, int, int]) -> blocks.Bytes:
        tensor, start, size, kind, at, length = piece
        payload = self._file.read(at, length).tobytes()
        try:
            return blocks.decode(kind, payload, old.like(tensor, start, size), _width(tensor))
        except ValueError as error:
            raise InvalidInput(tensor.name, f"its difference in {self._file.path} is damaged: {error}") from None


def _tensors_in_order(header: dict[str, Any], tensors: dict[str, TensorInfo]) -> list[TensorInfo]:
    """The tensors in file order. ValueError unless the header lists exactly these, without gaps."""
    header.pop("__metadata__", None)
    if header.keys() != tensors.keys():
        raise ValueError(f"other tensors than the manifest: {sorted(header.keys() ^ tensors.keys())[:3]}")
    ordered = sorted(header, key=lambda name: (header[name]["data_offsets"], name))
    end = 0
    for name in ordered:
        entry, tensor = header[name], tensors[name]
        place = [end, end + tensor.size_bytes]
        if (entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]) != (tensor.dtype, tensor.shape, place):
            raise ValueError(f"{name} is {entry}, the manifest has {tensor.dtype} {list(tensor.shape)} at {place}")
        end = place[1]
    return [tensors[name] for name in ordered]


def _write_shard(old: _Version, difference: _Difference, path: Path) -> str:
    """The file's checksum. Raises InvalidInput naming the tensor whose result differs from the manifest."""
    content = xxhash.xxh3_128()
    digests = {tensor.name: xxhash.xxh3_128() for tensor in difference.tensors}
    with path.open("wb") as file:

        def write(data: Any) -> None:
            file.write(data)
            content.update(data)

        write(len(difference.header).to_bytes(8, "little") + difference.header)
        for tensor, data in _in_order(lambda p: (p[0], difference.decoded(old, p)), difference.pieces()):
            write(data.data)
            digests[tensor.name].update(data.data)
    for tensor in difference.tensors:
        checksum = digests[tensor.name].hexdigest()
        if tensor.checksum and checksum != tensor.checksum:
            raise InvalidInput(
                tensor.name, f"has checksum {checksum} with its difference applied, the manifest says {tensor.checksum}"
            )
    return content.hexdigest()


def _check_file(info: FileInfo, checksum: str, size: int) -> None:
    if (size, checksum) != (info.size_bytes, info.checksum or checksum):
        raise InvalidInput(
            info.name, f"has {size} bytes and checksum {checksum} with its difference applied, the manifest says "
            f"{info.size_bytes} and {info.checksum}"
        )  # fmt: skip


def _width(tensor: TensorInfo) -> int:
    """Bytes of an element; 1 for dtypes of another width."""
    elements = int(np.prod(tensor.shape, dtype=np.int64))
    width = tensor.size_bytes // elements if elements else 1
    return width if width in (2, 4, 8) and width * elements == tensor.size_bytes else 1


def _pieces(tensor: TensorInfo) -> Iterator[tuple[int, int]]:
    """Start and size of each block, in bytes."""
    for start in range(0, tensor.size_bytes, blocks.BLOCK_BYTES):
        yield start, min(blocks.BLOCK_BYTES, tensor.size_bytes - start)


def _in_order(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """work(item) of each, done in threads a few ahead of the reader, in the order of the items."""
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(_THREADS) as pool:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * _THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
