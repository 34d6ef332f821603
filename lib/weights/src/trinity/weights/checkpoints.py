"""Checkpoints and model folders on disk. The trainer writes them; commands and services read them."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trinity.runtime import files
from trinity.runtime.errors import InvalidInput

_NAME = re.compile(r"global_step_(\d+)")
COMPLETE = ".full_checkpoint"  # written last; a folder without it is no checkpoint
CONVERTED = ("actor/slices", "actor/deepspeed", "actor/lora_adapter")  # what `trinity convert` reads
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".npz", ".ckpt"}


def step_of(folder: Path) -> int | None:
    """Returns the step in a checkpoint folder's name; None for any other name."""
    found = _NAME.fullmatch(folder.name)
    return int(found[1]) if found else None


def complete_steps(job_dir: Path) -> list[int]:
    """Returns the steps of all complete checkpoints, ascending."""
    if not job_dir.is_dir():
        return []
    found = [(step_of(path), path) for path in job_dir.iterdir()]
    return sorted(step for step, path in found if step is not None and (path / COMPLETE).exists())


def checkpoint_folder(job_dir: Path, step: int) -> Path:
    return job_dir / f"global_step_{step}"


def model_folder(job_dir: Path, step: int) -> Path:
    """Returns the Hugging Face folder of a checkpoint."""
    return checkpoint_folder(job_dir, step) / "actor" / "huggingface"


def has_weights(folder: Path) -> bool:
    """Returns True if a folder has model.safetensors, or an index and every file it lists, in full length."""
    if _is_whole(folder / SINGLE):
        return True
    index = files.read_json(folder / INDEX)
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names:
        return False
    return all(_is_whole(folder / str(name)) for name in set(names.values()))


def check_weights(folder: Path) -> None:
    """Raises InvalidInput for a safetensors file of a model that is not there, or not whole. Other forms pass."""
    index = files.read_json(folder / INDEX)
    listed = index.get("weight_map") if isinstance(index, dict) else None
    single = (folder / SINGLE).is_file()  # transformers prefers it
    for name in [SINGLE] if single else sorted({*map(str, listed.values())}) if isinstance(listed, dict) else []:
        safetensors_header(folder / name)


def _is_whole(path: Path) -> bool:
    try:
        return bool(safetensors_header(path))
    except InvalidInput:
        return False


def safetensors_header(path: Path) -> dict[str, Any]:
    """Returns dtype, shape and data_offsets of a safetensors file's tensors by name, read off the header.

    Raises InvalidInput unless the file is as long as its header says. The format:
    https://github.com/huggingface/safetensors#format
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > path.stat().st_size:
                raise ValueError("the header is longer than the file")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        end = max((_end_of(entry) for entry in header.values()), default=0)
        if 8 + size + end != path.stat().st_size:
            raise ValueError(f"{path.stat().st_size} bytes instead of {8 + size + end}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInput(str(path), f"is no whole safetensors file: {error}") from None
    return dict(header)


def encode_header(tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> bytes:
    """Returns the head of a safetensors file, up to the data. Tensors are given in order: name, dtype, shape, bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape, size in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def data_begin(path: Path) -> int:
    """Returns the first byte of a safetensors file's data; `data_offsets` count from there."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _end_of(entry: dict[str, Any]) -> int:
    """Returns the end of a tensor's bytes. Raises ValueError, KeyError or TypeError for an invalid entry."""
    begin, end = entry["data_offsets"]
    whole = isinstance(entry["dtype"], str) and isinstance(entry["shape"], list)
    if not whole or any(type(one) is not int for one in (*entry["shape"], begin, end)) or not 0 <= begin <= end:
        raise ValueError(f"a tensor is described by {str(entry)[:200]}")
    return int(end)


def newest_model(job_dir: Path) -> tuple[int, Path] | None:
    """Returns step and Hugging Face folder of the newest checkpoint that has weights."""
    for step in reversed(complete_steps(job_dir)):
        folder = model_folder(job_dir, step)
        if has_weights(folder):
            return step, folder
    return None


def _not_quantized(config: bytes) -> bytes:
    try:
        values = json.loads(config)
    except ValueError:
        return config
    if not isinstance(values, dict) or "quantization_config" not in values:
        return config
    return json.dumps({key: value for key, value in values.items() if key != "quantization_config"}, indent=2).encode()


def copy_all_but_weights(source: Path, target: Path) -> None:
    """Copies a model's config, tokenizer and chat template into a folder; existing files stay.

    config.json is copied last: its presence shows that the other files are complete. It loses its
    `quantization_config`, since trained weights are not quantized.
    """
    target.mkdir(parents=True, exist_ok=True)
    found = [path for path in source.iterdir() if path.is_file() and not path.name.startswith(".")]
    for path in sorted(found, key=lambda path: path.name == "config.json"):
        weights = path.suffix in _WEIGHTS or path.name.endswith(".index.json")
        if not weights and not (target / path.name).exists():
            content = path.read_bytes()
            if path.name == "config.json":
                content = _not_quantized(content)
            files.write_atomic(target / path.name, content)
