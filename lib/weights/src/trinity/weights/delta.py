"""A version as a difference to an older one. Applied to the base, each difference file gives a shard's exact bytes.

`<shard>.delta` is a safetensors file. For each tensor of the shard it has an entry of type U8 with the frames of the
tensor's blocks, and in its metadata the shard's own header. So the reconstructed shard equals the published one byte
for byte, with the manifest's layout and checksum. A tensor that the base lacks, or holds in another shape or dtype,
travels whole. Files are read and written piece by piece, some tens of MiB at a time, and with read calls instead of a
memory map: a base truncated meanwhile then raises an error instead of killing the process.

A block is at most BLOCK_BYTES of a tensor, seen as unsigned integers as wide as an element. Its frame has one of four
kinds, the smallest that is cheap to find:

    SAME    nothing changed; empty
    SPARSE  positions of the changed elements, as the gaps between them, and their differences
    DENSE   the difference of every element, when half of them changed
    WHOLE   the bytes as they are, when packing does not help

A difference is new - base of the two bit patterns (modulo 2^bits), with its sign folded into the lowest bit: an element
that moves by one unit in the last place is 1 or 2 at every exponent. Gaps and differences are packed by zstandard, byte
plane by byte plane, since the high bytes are nearly all zero. Without a base its bytes count as zeros.

Part of the full bytes that travel, by the share of changed elements (270 MB of normally distributed weights, whose
elements change by about 1 % in bf16 and 0.01 % in float32; benchmarks/sync_storage.py prints it):

                                        bf16                              float32
    share of changed elements   0.1 %    1 %   10 %  100 %       0.1 %    1 %   10 %  100 %
    sparse (this)              0.11 % 0.76 %  4.7 %   18 %      0.10 % 0.73 %  5.6 %   39 %
    XOR and zstandard          0.18 %  1.4 %  9.6 %   31 %      0.17 %  1.2 %  8.6 %   56 %

XOR and zstandard would save some 120 lines here, but sends 1.4 to 2 times the bytes over the network, which deltas
exist to save.

Elements replaced by random bits: 0.18, 1.5, 12 and 100 % against 0.29, 2.2, 17 and 100 % in bf16. At 1 % one core
encodes some 600 and applies 700 of the full MB a second; where everything has changed, some 100.
"""

import json
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from trinity.runtime import files
from trinity.runtime.errors import InvalidInput
from trinity.weights.checkpoints import safetensors_header
from trinity.weights.manifest import FileInfo, Manifest, TensorInfo

SUFFIX = ".delta"
_FORMAT = "trinity-delta-1"
_THREADS = min(4, os.cpu_count() or 1)
_LARGEST_OFFSET = 10**15  # reserved for a header that is written last
BLOCK_BYTES = 1024 * 1024  # a multiple of every element's width

FRAME = struct.Struct("<BI")  # kind, length of the payload in bytes
_SPARSE = struct.Struct("<BII")  # width of a gap in bytes, changed elements, length of the packed gaps in bytes
_LEVEL = 1  # level 3 packs no better here and takes 1.5 times as long
_DENSE_SHARE = 0.5
_WORTH_PACKING = 0.98

Item = TypeVar("Item")
Result = TypeVar("Result")
Bytes = NDArray[np.uint8]
Elements = NDArray[Any]


def encode(base: Path, base_manifest: Manifest, source: Path, manifest: Manifest, target: Path) -> tuple[FileInfo, ...]:
    """Writes the difference between two versions' files into `target`; returns its description.

    Raises InvalidInput naming a file that is missing or damaged, or a tensor that is not in its file.
    """
    with ExitStack() as stack:
        old, new = _Version(base, base_manifest, stack), _Version(source, manifest, stack)
        return tuple(_encode_shard(old, new, source / info.name, target) for info in manifest.files)


def apply(base: Path, base_manifest: Manifest, delta: Path, manifest: Manifest, target: Path) -> None:
    """Makes the whole files of `manifest` in `target` from the base's and the difference's.

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

    def read(self, start: int, size: int) -> Bytes:
        return self.file.read(self.offset + start, size)


class _File:
    """A safetensors file, open for reading. Raises InvalidInput for another format or a file that is cut off."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        self.entries = safetensors_header(path)
        self._handle = os.open(path, os.O_RDONLY)
        stack.callback(os.close, self._handle)
        self.header = self.read(8, int.from_bytes(self.read(0, 8).tobytes(), "little")).tobytes()
        self.data_offset = 8 + len(self.header)

    def read(self, offset: int, size: int) -> Bytes:
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

    def like(self, tensor: TensorInfo, start: int, size: int) -> Bytes:
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
        return tensor.name, encode_block(old.like(tensor, start, size), place.read(start, size), _width(tensor))

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
    """A file of differences. `header` and `tensors`, in file order, belong to the shard that it makes."""

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
                if at + FRAME.size > end:
                    raise InvalidInput(tensor.name, f"its difference in {self._file.path} is cut off")
                kind, length = FRAME.unpack(self._file.read(at, FRAME.size).tobytes())
                at += FRAME.size
                if at + length > end:
                    raise InvalidInput(tensor.name, f"its difference in {self._file.path} is cut off")
                yield tensor, start, size, kind, at, length
                at += length

    def decoded(self, old: _Version, piece: tuple[TensorInfo, int, int, int, int, int]) -> Bytes:
        tensor, start, size, kind, at, length = piece
        payload = self._file.read(at, length).tobytes()
        try:
            return decode_block(kind, payload, old.like(tensor, start, size), _width(tensor))
        except ValueError as error:
            raise InvalidInput(tensor.name, f"its difference in {self._file.path} is damaged: {error}") from None


def _tensors_in_order(header: dict[str, Any], tensors: dict[str, TensorInfo]) -> list[TensorInfo]:
    """Returns the tensors in file order. Raises ValueError unless the header lists exactly these, without gaps."""
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
    for start in range(0, tensor.size_bytes, BLOCK_BYTES):
        yield start, min(BLOCK_BYTES, tensor.size_bytes - start)


def _in_order(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yields work(item) for each item, in order. Threads work a few items ahead of the reader."""
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(_THREADS) as pool:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * _THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class Kind(IntEnum):
    SAME = 0
    SPARSE = 1
    DENSE = 2
    WHOLE = 3


def encode_block(base: Bytes, new: Bytes, width: int) -> bytes:
    """The frame that makes `new` of `base`, blocks of the same length: one element or more, `width` bytes each."""
    old, elements = _elements(base, width), _elements(new, width)
    changed = old != elements
    count = int(np.count_nonzero(changed))
    if count == 0:
        return FRAME.pack(Kind.SAME, 0)
    kind, payload = Kind.DENSE, b""
    if count < _DENSE_SHARE * len(elements):
        kind, payload = Kind.SPARSE, _sparse(old, elements, np.flatnonzero(changed))
    else:
        payload = _pack(_fold(elements - old))
    if len(payload) > _WORTH_PACKING * len(new):
        kind, payload = Kind.WHOLE, new.tobytes()
    return FRAME.pack(kind, len(payload)) + payload


def decode_block(kind: int, payload: bytes, base: Bytes, width: int) -> Bytes:
    """The `new` block given to `encode_block`. Raises ValueError for a payload of another kind or length."""
    if kind == Kind.SAME and not payload:
        return base
    if kind == Kind.WHOLE and len(payload) == len(base):
        return np.frombuffer(payload, np.uint8)
    old = _elements(base, width)
    if kind == Kind.DENSE:
        return (old + _unfold(_unpack(payload, len(old), width))).view(np.uint8)
    if kind != Kind.SPARSE or len(payload) < _SPARSE.size:
        raise ValueError(f"a frame of kind {kind} with {len(payload)} bytes")
    gap_width, count, length = _SPARSE.unpack_from(payload)
    if gap_width not in (1, 2, 4) or not 0 < count <= len(old):
        raise ValueError(f"{count} changes with gaps of {gap_width} bytes in a block of {len(old)} elements")
    packed = payload[_SPARSE.size :]
    positions = np.cumsum(_unpack(packed[:length], count, gap_width).astype(np.int64) + 1) - 1
    if positions[-1] >= len(old):
        raise ValueError(f"a change at {positions[-1]} in a block of {len(old)} elements")
    new = old.copy()
    new[positions] += _unfold(_unpack(packed[length:], count, width))
    return new.view(np.uint8)


def _sparse(old: Elements, new: Elements, positions: NDArray[np.intp]) -> bytes:
    gaps = np.diff(positions, prepend=-1) - 1
    narrow = gaps.astype(np.min_scalar_type(int(gaps.max())))
    packed = _pack(narrow)
    head = _SPARSE.pack(narrow.itemsize, len(positions), len(packed))
    return head + packed + _pack(_fold(new[positions] - old[positions]))


def _elements(data: Bytes, width: int) -> Elements:
    return data.view(f"<u{width}")


def _fold(difference: Elements) -> Elements:
    """0, -1, 1, -2, ... as 0, 1, 2, 3, ..."""
    signed = difference.view(f"<i{difference.itemsize}")
    folded: Elements = ((signed << 1) ^ (signed >> (8 * difference.itemsize - 1))).view(difference.dtype)
    return folded


def _unfold(folded: Elements) -> Elements:
    one = folded.dtype.type(1)
    return (folded >> one) ^ (~(folded & one) + one)


def _pack(values: Elements) -> bytes:
    planes = values.view(np.uint8).reshape(len(values), values.itemsize).T
    return zstandard.compress(planes.tobytes(), _LEVEL)


def _unpack(packed: bytes, count: int, width: int) -> Elements:
    """`count` values of `width` bytes; damaged packed bytes never yield more."""
    try:
        if zstandard.frame_content_size(packed) != count * width:
            raise ValueError("packed values of another length")
        raw = zstandard.ZstdDecompressor().decompress(packed, max_output_size=count * width)
    except zstandard.ZstdError as error:
        raise ValueError(f"packed values that are damaged: {error}") from None
    planes = np.frombuffer(raw, np.uint8).reshape(width, count)
    return np.ascontiguousarray(planes.T).reshape(-1).view(f"<u{width}")
