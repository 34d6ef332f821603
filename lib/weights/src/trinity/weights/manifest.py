"""Weight versions: the trainer makes them, the sync service verifies them, explorers load them.

Life of a version: STAGED (offered) -> VERIFIED (matches its manifest, and an explorer computed its canary) -> LIVE
(explorers load it) -> RETIRED; or REJECTED. Version 0 is the run's base model: explorers start from it, so it has
files only if the run begins with adapters.
"""

import math
import stat
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from trinity.runtime import files
from trinity.runtime.errors import InvalidInput
from trinity.weights.checkpoints import INDEX, SINGLE, safetensors_header
from trinity.weights.lora import Lora

# Bytes of an element, by safetensors' name of the dtype.
_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}

_MOST_OF_IMAGES = 64 * 1024  # bytes, of one probe

_CHECKED_TOGETHER = 16  # files hashed at once: 47 GB/s on 32 cores; 8 have 30


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a version; `dtype` is safetensors' name, `file` the file that holds it.

    `checksum` is the xxh3-128 of its bytes; empty: not computed.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    file: str
    checksum: str = ""


@dataclass(frozen=True)
class FileInfo:
    """One file of a version, with the xxh3-128 of its content."""

    name: str
    size_bytes: int
    checksum: str


@dataclass(frozen=True)
class FolderOffer:
    """Files in a folder that both sides see. `delta`: files of the difference instead of the whole version."""

    transport: ClassVar[str] = "folder"
    path: str
    delta: bool = False


@dataclass(frozen=True)
class S3Offer:
    """Objects `<prefix>/<file name>` in a bucket. `endpoint` empty: AWS's own."""

    transport: ClassVar[str] = "s3"
    bucket: str
    prefix: str
    endpoint: str = ""
    delta: bool = False


@dataclass(frozen=True)
class JetStreamOffer:
    """Blobs `<prefix>/<file name>` in the run's stream of weights."""

    transport: ClassVar[str] = "jetstream"
    prefix: str
    delta: bool = False


@dataclass(frozen=True)
class CollectiveOffer:
    """A broadcast to the members of an epoch, bucket by bucket (see collective.py)."""

    transport: ClassVar[str] = "collective"
    epoch: int
    bucket_bytes: int


Offer = FolderOffer | S3Offer | JetStreamOffer | CollectiveOffer


@dataclass(frozen=True)
class Delta:
    """The version as a difference to an older one. Applied to the base's tensors it gives the version's exact bits."""

    base_version: int
    files: tuple[FileInfo, ...]


@dataclass(frozen=True)
class Probe:
    """A token sequence of L >= 2 ids and the log-probabilities [L - 1] of each next token at temperature 1, in nats.

    `images` are the files of the images whose placeholders are among the tokens, in order.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    images: tuple[bytes, ...] = ()


# Precisions of engines that compute as the checkpoint is; "" is an explorer that does not name one.
NOT_QUANTIZED = ("", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Canary:
    """Log-probabilities that engines must reproduce after a load, within a mean and a maximum difference in nats.

    Engines that quantize weights or cache may differ `quantized_factor` times as much.
    """

    probes: tuple[Probe, ...]
    mean_tolerance: float
    max_tolerance: float
    quantized_factor: float = 1.0

    def allowed(self, precision: str) -> tuple[float, float]:
        """Returns the allowed mean and largest difference, in nats, of an engine of this precision."""
        factor = 1.0 if precision in NOT_QUANTIZED else max(1.0, self.quantized_factor)
        return self.mean_tolerance * factor, self.max_tolerance * factor


@dataclass(frozen=True)
class Measured:
    """An engine's distance from a canary, in nats. `expected` and `computed` are the values where it is largest."""

    mean_error: float
    max_error: float
    expected: float
    computed: float

    def within(self, canary: Canary, precision: str = "") -> bool:
        """Tells if an engine of this precision is sound; False also for values that are not finite."""
        mean, most = canary.allowed(precision)
        return self.mean_error <= mean and self.max_error <= most

    def __str__(self) -> str:
        return (
            f"log-probability {self.expected:.5f} expected, {self.computed:.5f} computed where it differs most; "
            f"mean difference {self.mean_error:.5f}"
        )


@dataclass(frozen=True)
class Manifest:
    """Everything needed to load and check one version. With `lora` its tensors are adapters on the base model."""

    run: str
    version: int
    step: int
    tensors: tuple[TensorInfo, ...]
    files: tuple[FileInfo, ...]
    offers: tuple[Offer, ...]
    created_at_seconds: float
    base_model: str = ""
    delta: Delta | None = None
    canary: Canary | None = None
    lora: Lora | None = None
    ledger_sha256: bytes = b""
    parent_sha256: bytes = b""

    @property
    def folder(self) -> Path | None:
        """The folder in which the folder transport finds the whole files."""
        folders = (offer for offer in self.offers if isinstance(offer, FolderOffer) and not offer.delta)
        return next((Path(offer.path) for offer in folders), None)

    @property
    def collective(self) -> CollectiveOffer | None:
        """The broadcast on offer."""
        return next((offer for offer in self.offers if isinstance(offer, CollectiveOffer)), None)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def load_arguments(self, folder: Path) -> tuple[list[str], list[tuple[str, int]]]:
        """Returns the files' paths, and for every tensor its name and the index of its file, as engines load them."""
        index = {info.name: position for position, info in enumerate(self.files)}
        paths = [str(folder / info.name) for info in self.files]
        return paths, [(tensor.name, index[tensor.file]) for tensor in self.tensors]

    def check(self) -> None:
        """Raises InvalidInput naming an inconsistent field. Reads no file."""
        if self.version < 0 or self.step < 0:
            raise InvalidInput("manifest.version", f"is {self.version} at step {self.step}; both are >= 0")
        self._check_canary()
        if self.version == 0 and not self.base_model:
            raise InvalidInput("manifest.base_model", "is empty; version 0 is the base model")
        if self.version == 0 and not (self.files or self.tensors):
            return
        if self.version == 0 and self.lora is None:
            raise InvalidInput("manifest.lora", "is empty; version 0 is the base model, or adapters on it")
        if not self.offers:
            raise InvalidInput("manifest.offers", "is empty; it must name where the files are")
        if not self.tensors:
            raise InvalidInput("manifest.tensors", "is empty")
        names = {file.name for file in self.files}
        for tensor in self.tensors:
            if tensor.file not in names:
                raise InvalidInput("manifest.tensors", f"{tensor.name} is in {tensor.file!r}, which is not listed")
            expected = _BYTES.get(tensor.dtype, 0) * math.prod(tensor.shape)
            if tensor.size_bytes != expected:
                raise InvalidInput(
                    "manifest.tensors",
                    f"{tensor.name} has {tensor.size_bytes} bytes; {tensor.dtype} {list(tensor.shape)} has {expected}",
                )
        twice = [name for name, count in Counter(t.name for t in self.tensors).items() if count > 1]
        if twice:
            raise InvalidInput("manifest.tensors", f"{twice[0]} is listed twice")
        if self.lora is not None:
            self.lora.check({tensor.name: tensor.shape for tensor in self.tensors})
        self._check_delta()
        for info in (*self.files, *(self.delta.files if self.delta else ())):
            if info.name in ("", ".", "..") or Path(info.name).name != info.name:
                raise InvalidInput("manifest.files", f"{info.name!r} must be a plain file name")

    def _check_delta(self) -> None:
        if self.delta is not None and not 0 <= self.delta.base_version < self.version:
            raise InvalidInput(
                "manifest.delta.base_version", f"is {self.delta.base_version}; must be below version {self.version}"
            )
        if self.delta is None and any(getattr(offer, "delta", False) for offer in self.offers):
            raise InvalidInput("manifest.offers", "has an offer of a delta, but the manifest has no delta")

    def _check_canary(self) -> None:
        if self.canary is None:
            return
        for index, probe in enumerate(self.canary.probes):
            field = f"manifest.canary.probes[{index}]"
            if len(probe.token_ids) < 2 or len(probe.logprobs) != len(probe.token_ids) - 1:
                raise InvalidInput(
                    field, f"has {len(probe.token_ids)} token ids and {len(probe.logprobs)} log-probabilities; "
                    "n and n - 1 are needed, n >= 2"
                )  # fmt: skip
            if not all(math.isfinite(value) for value in probe.logprobs):
                raise InvalidInput(field, "has a log-probability that is not finite; the weights are broken")
            if (size := sum(map(len, probe.images))) > _MOST_OF_IMAGES:
                raise InvalidInput(f"{field}.images", f"have {size} bytes, at most {_MOST_OF_IMAGES} are taken")
        if not self.canary.probes:
            raise InvalidInput("manifest.canary.probes", "is empty")
        if not (self.canary.mean_tolerance > 0 and self.canary.max_tolerance > 0):
            raise InvalidInput("manifest.canary.mean_tolerance", "and max_tolerance must be > 0")
        if not math.isfinite(self.canary.quantized_factor):
            raise InvalidInput("manifest.canary.quantized_factor", f"is {self.canary.quantized_factor}")


def manifest_of_folder(run: str, version: int, folder: Path, *, checksums: bool = True) -> Manifest:
    """Makes the manifest of a Hugging Face folder from the headers of its safetensors files.

    Raises InvalidInput naming the file that is missing or damaged.
    """
    index = files.read_json(folder / INDEX)
    names = sorted(set(index["weight_map"].values())) if isinstance(index, dict) else [SINGLE]
    tensors: list[TensorInfo] = []
    infos: list[FileInfo] = []
    for name in names:
        path = folder / name
        tensors += [
            TensorInfo(key, entry["dtype"], tuple(entry["shape"]), entry["data_offsets"][1] - entry["data_offsets"][0],
                       name)
            for key, entry in sorted(safetensors_header(path).items(), key=lambda item: item[1]["data_offsets"][0])
        ]  # fmt: skip
        infos.append(FileInfo(name, path.stat().st_size, files.checksum(path) if checksums else ""))
    offer = FolderOffer(str(folder.absolute()))
    return Manifest(run, version, version, tuple(tensors), tuple(infos), (offer,), time.time())


def regular_size(path: Path) -> int:
    """Returns the bytes of a regular file. Raises InvalidInput for others: pipes and devices could be read for ever."""
    try:
        found = path.stat()
    except OSError:
        raise InvalidInput(path.name, f"is missing in {path.parent}") from None
    if not stat.S_ISREG(found.st_mode):
        raise InvalidInput(path.name, f"in {path.parent} is no regular file")
    return found.st_size


def check_sizes(manifest: Manifest, folder: Path) -> None:
    """Compares the sizes of the files in `folder` with the manifest. Raises InvalidInput naming the file."""
    for info in manifest.files:
        size = regular_size(folder / info.name)
        if size != info.size_bytes:
            raise InvalidInput(info.name, f"has {size} bytes, the manifest says {info.size_bytes}")


def check_files(manifest: Manifest, folder: Path) -> None:
    """Compares the files in `folder` with the manifest: size, then checksum. Raises InvalidInput naming the file."""
    check_sizes(manifest, folder)
    with ThreadPoolExecutor(_CHECKED_TOGETHER) as threads:
        checksums = threads.map(files.checksum, (folder / info.name for info in manifest.files))
        for info, checksum in zip(manifest.files, checksums, strict=True):
            if checksum != info.checksum:
                raise InvalidInput(info.name, f"has checksum {checksum}, the manifest says {info.checksum}")
