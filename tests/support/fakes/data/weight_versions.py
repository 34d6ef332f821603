"""Weight versions for tests, with random bits and without torch, and storage that a test can damage."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import obstore
import xxhash
from numpy.typing import NDArray
from obstore.store import S3Store as Objects

from trinity.runtime import files
from trinity.runtime.broker import connect
from trinity.runtime.names import RunNames
from trinity.weights import delta as deltas
from trinity.weights.checkpoints import encode_header
from trinity.weights.manifest import Delta, FileInfo, FolderOffer, Manifest, Offer, TensorInfo
from trinity.weights.stores import Store, open_store

WIDTHS = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "U8": 1}


@dataclass(frozen=True)
class Tensor:
    """Bits of a tensor: unsigned integers as wide as an element of `dtype`."""

    dtype: str
    bits: NDArray[np.unsignedinteger]


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Normally distributed in bf16 and float32; random bits in others."""
    random = np.random.default_rng(seed)
    if dtype in ("F32", "BF16"):
        values = random.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
        bits = np.asarray(values).view(np.uint32)
        return Tensor(dtype, bits if dtype == "F32" else (bits >> 16).astype(np.uint16))
    kind = np.dtype(f"u{WIDTHS[dtype]}")
    return Tensor(dtype, np.asarray(random.integers(0, np.iinfo(kind).max, shape, dtype=kind, endpoint=True)))


def changed(tensor: Tensor, share: float, seed: int = 1) -> Tensor:
    """About `share` of the elements moved by one to eight units in the last place."""
    random = np.random.default_rng(seed)
    step = random.integers(1, 9, tensor.bits.shape, dtype=np.uint8).astype(tensor.bits.dtype)
    where = random.random(tensor.bits.shape) < share
    return Tensor(tensor.dtype, np.asarray(np.where(where, tensor.bits + step, tensor.bits)))


def write_version(run: str, version: int, folder: Path, tensors: Mapping[str, Tensor], *, shards: int = 2) -> Manifest:
    """The tensors in safetensors files, and their manifest with all checksums. On offer in the folder itself."""
    folder.mkdir(parents=True)
    held: list[TensorInfo] = []
    infos = []
    for shard in range(shards):
        name = f"part-{shard:05d}.safetensors"
        mine = {key: tensors[key] for key in list(tensors)[shard::shards]}
        _write_safetensors(folder / name, mine)
        for key, tensor in mine.items():
            data = tensor.bits.tobytes()
            checksum = xxhash.xxh3_128_hexdigest(data)
            held.append(TensorInfo(key, tensor.dtype, tensor.bits.shape, len(data), name, checksum))
        infos.append(FileInfo(name, (folder / name).stat().st_size, files.checksum(folder / name)))
    return Manifest(run, version, version, tuple(held), tuple(infos), (FolderOffer(str(folder)),), 1.0)


def _write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    head = encode_header((name, one.dtype, one.bits.shape, one.bits.nbytes) for name, one in tensors.items())
    path.write_bytes(head + b"".join(tensor.bits.tobytes() for tensor in tensors.values()))


def with_delta(base: Path, base_manifest: Manifest, source: Path, manifest: Manifest, target: Path) -> Manifest:
    """The manifest with its difference, whose files are written to `target`."""
    target.mkdir(parents=True, exist_ok=True)
    infos = deltas.encode(base, base_manifest, source, manifest, target)
    return replace(manifest, delta=Delta(base_manifest.version, infos))


class Storage:
    """One place of each kind, and ways to damage what lies there. `kind` as in Capabilities."""

    def __init__(self, kind: str, run: str, folder: Path, nats_url: str) -> None:
        self.kind, self.run, self.folder, self.nats_url = kind, run, folder, nats_url
        self.entry = {"folder": str(folder), "s3": "s3://weights/jobs", "jetstream": "jetstream"}[kind]

    def open(self) -> Store:
        return open_store(self.entry, self.run, folder=Path("/nowhere"), nats_url=self.nats_url)

    async def truncate(self, version: int, name: str) -> None:
        await self._change(version, name, lambda data: data[:-1])

    async def flip_a_bit(self, version: int, name: str) -> None:
        await self._change(version, name, lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])

    async def remove(self, version: int, name: str) -> None:
        if self.kind == "folder":
            self._path(version, name).unlink()
        elif self.kind == "s3":
            obstore.delete(_objects(), self._key(version, name))
        else:
            names = RunNames(self.run)
            async with await connect(self.nats_url, "test") as broker:
                await broker.purge_subject(names.weights_stream, names.weights_parts(f"v{version}", name))

    async def _change(self, version: int, name: str, change) -> None:  # type: ignore[no-untyped-def]
        if self.kind == "folder":
            path = self._path(version, name)
            path.write_bytes(change(path.read_bytes()))
        elif self.kind == "s3":
            obstore.put(
                _objects(),
                self._key(version, name),
                change(bytes(obstore.get(_objects(), self._key(version, name)).bytes())),
            )
        else:
            names = RunNames(self.run)
            async with await connect(self.nats_url, "test") as broker:
                subjects = (await broker.js.stream_info(names.weights_stream, subjects_filter=">")).state.subjects
                of_file = re.escape(names.weights_part(f"v{version}", name, ""))
                last = max(int(s.rpartition(".")[2]) for s in subjects or {} if re.fullmatch(of_file + "[0-9]+", s))
                subject = names.weights_part(f"v{version}", name, last)
                chunk = await broker.last(names.weights_stream, subject)
                await broker.js.publish(subject, change(chunk.data))

    def _path(self, version: int, name: str) -> Path:
        return self.folder / self.run / f"v{version}" / name

    def _key(self, version: int, name: str) -> str:
        return f"jobs/{self.run}/v{version}/{name}"


def _objects() -> Objects:
    return Objects("weights", client_options={"allow_http": True})


def content_of(folder: Path, manifest: Manifest) -> dict[str, str]:
    """Checksums of a version's files in a folder, by name."""
    return {info.name: files.checksum(folder / info.name) for info in manifest.files}


class Publisher:
    """Versions of one model, put into any number of stores: the trainer's part."""

    def __init__(self, folder: Path, stores: list[Store], tensors: dict[str, Tensor] | None = None) -> None:
        self.folder, self.stores = folder, stores
        self.tensors = tensors or {"a": random_tensor("BF16", (400_000,)), "b": random_tensor("F32", (5, 7))}
        self.manifests: dict[int, Manifest] = {}

    def publish(self, version: int, *, base: int = 0, whole: bool = True) -> Manifest:
        """Whole files, a difference to `base`, or both; sealed in all stores."""
        self.tensors = {name: changed(tensor, 0.01, version) for name, tensor in self.tensors.items()}
        run = self.stores[0].run
        here = self.folder / f"v{version}"
        manifest = write_version(run, version, here, self.tensors)
        offers: list[Offer] = []
        if base:
            difference = self.folder / f"d{version}"
            manifest = with_delta(self.folder / f"v{base}", self.manifests[base], here, manifest, difference)
            offers += [store.put(manifest, difference, delta=True) for store in self.stores]
        if whole:
            offers += [store.put(manifest, here, delta=False) for store in self.stores]
        manifest = replace(manifest, offers=tuple(offers))
        for store in self.stores:
            store.seal(manifest)
        self.manifests[version] = manifest
        return manifest

    def is_in(self, folder: Path, version: int) -> bool:
        manifest = self.manifests[version]
        return content_of(folder, manifest) == content_of(self.folder / f"v{version}", manifest)
