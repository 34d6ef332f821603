"""The Hugging Face folder: weights that are whole or not there, and the base model's other files."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trinity.convert.find import CheckpointError
from trinity.convert.source import Parameter
from trinity.runtime import files
from trinity.runtime.process import FileLock
from trinity.weights.checkpoint_slices import DTYPES
from trinity.weights.checkpoints import INDEX, SINGLE, copy_all_but_weights, encode_header

SHARD_BYTES = 2 * 1024**3
_CONFIG = "config.json"
_ASIDE, _LOCK = ".converting-", "lock"
# Names of the safetensors format.
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NAMES |= {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}

# What config.json may ask for; parameters are not quantized here.
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def copy_base_files(base: Path | None, folder: Path) -> None:
    """Copies all files of the base model but its weights into a folder without config.json. Keeps existing files.

    Raises CheckpointError if there is no base.
    """
    if (folder / _CONFIG).is_file():
        return
    if base is None:
        raise CheckpointError(f"{folder / _CONFIG} is missing; give the base model's folder with --base-model-dir")
    copy_all_but_weights(base, folder)


@dataclass(frozen=True)
class ModelConfig:
    """The weights' dtype and ties by config.json, None where it has no entry; and whether the model reads images."""

    dtype: torch.dtype | None
    tied: bool | None
    has_tower: bool


def read_config(folder: Path) -> ModelConfig:
    path = folder / _CONFIG
    values = files.read_json(path)
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    text = values.get("text_config")
    text = text if isinstance(text, dict) else {}

    def said(key: str) -> Any:
        return values.get(key, text.get(key))

    name = said("dtype") or said("torch_dtype")
    dtype = _DTYPES.get(name.removeprefix("torch.")) if isinstance(name, str) else None
    tied = said("tie_word_embeddings")
    return ModelConfig(dtype, tied if isinstance(tied, bool) else None, "vision_config" in values)


@dataclass(frozen=True)
class Written:
    files: int
    size_bytes: int


def write_weights(folder: Path, parameters: Iterable[Parameter], shard_bytes: int = SHARD_BYTES) -> Written:
    """Write parameters, in order, into model.safetensors, or into shards of about `shard_bytes` and an index.

    Everything is written into a temporary folder first. The file whose name makes the weights count moves last, after
    the content is on the disk.
    """
    _remove_leftovers(folder)
    with _aside(folder) as temporary:
        parts: list[Path] = []
        places: dict[str, int] = {}
        size_bytes = 0
        for shard in _shards(parameters, shard_bytes):
            places |= dict.fromkeys((parameter.name for parameter in shard), len(parts))
            parts.append(temporary / str(len(parts)))
            size_bytes += _write_file(parts[-1], shard)
        names = [f"model-{index + 1:05d}-of-{len(parts):05d}.safetensors" for index in range(len(parts))]
        # An index that is left from weights that are not complete must not vouch for the new files.
        (folder / INDEX).unlink(missing_ok=True)
        if len(parts) == 1:
            os.replace(parts[0], folder / SINGLE)
        else:
            (folder / SINGLE).unlink(missing_ok=True)
            for part, name in zip(parts, names, strict=True):
                os.replace(part, folder / name)
            weight_map = {name: names[index] for name, index in places.items()}
            files.write_json(folder / INDEX, {"metadata": {"total_size": size_bytes}, "weight_map": weight_map})
        files.sync_folder(folder)
    return Written(len(parts), size_bytes)


@contextlib.contextmanager
def _aside(folder: Path) -> Iterator[Path]:
    """A folder to write in; its lock says that its owner lives."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=_ASIDE) as name:
        lock = FileLock(Path(name, _LOCK))
        lock.acquire()
        try:
            yield Path(name)
        finally:
            lock.release()


def _remove_leftovers(folder: Path) -> None:
    """Leftovers of killed conversions."""
    for path in folder.glob(f"{_ASIDE}*"):
        lock = FileLock(path / _LOCK)
        if lock.acquire():
            shutil.rmtree(path, ignore_errors=True)
            lock.release()


def _shards(parameters: Iterable[Parameter], shard_bytes: int) -> Iterator[list[Parameter]]:
    shard: list[Parameter] = []
    size = 0
    for parameter in parameters:
        if shard and size + parameter.size_bytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(parameter)
        size += parameter.size_bytes
    if not shard:
        raise CheckpointError("the checkpoint holds no tensors")
    yield shard


def _write_file(path: Path, shard: list[Parameter]) -> int:
    """A safetensors file, piece by piece; returns the bytes of the tensors.

    The format: https://huggingface.co/docs/safetensors. The widest dtype comes first, so that all are aligned.
    """
    ordered = sorted(shard, key=lambda parameter: -parameter.dtype.itemsize)
    for parameter in ordered:
        if parameter.dtype not in _NAMES:
            raise CheckpointError(f"{parameter.name} is of {parameter.dtype}, which safetensors cannot hold")
    with path.open("wb") as file:
        file.write(encode_header((one.name, _NAMES[one.dtype], one.shape, one.size_bytes) for one in ordered))
        for parameter in ordered:
            for piece in parameter.pieces:
                flat = piece.detach().to(parameter.dtype).contiguous().reshape(-1)
                file.write(flat.view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    return sum(parameter.size_bytes for parameter in ordered)
