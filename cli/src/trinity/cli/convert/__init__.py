"""`trinity convert`: what the trainer saved, as folders that transformers and vLLM load.

For each checkpoint: skip it if its weights are there, open its shards (deepspeed.py, fsdp.py; safe_load.py runs nothing
of them) or its adapters (adapters.py), stream whole tensors into safetensors files (write.py). A checkpoint that cannot
be converted is one sentence; the others are still done. Torch is imported once there is something to convert.
"""

import importlib.util
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trinity.cli.convert.errors import CheckpointError
from trinity.cli.convert.find import Checkpoint, find_checkpoints, parse_steps
from trinity.cli.errors import RunError
from trinity.weights.checkpoints import has_weights

if TYPE_CHECKING:
    from trinity.cli.convert.source import Parameter, Source
    from trinity.cli.convert.write import ModelConfig

_CONVERTED, _SKIPPED, _FAILED = "converted", "skipped", "failed"


def convert_command(checkpoint_dir: Path, base_model_dir: Path | None, steps: str | None) -> int:
    """0 if every checkpoint is converted or was before, 1 if one failed, 2 for options that cannot be used."""
    from trinity.cli.errors import ending_well

    return ending_well(lambda: _convert_all(checkpoint_dir, base_model_dir, steps))


def _convert_all(checkpoint_dir: Path, base_model_dir: Path | None, steps: str | None) -> int:
    found = find_checkpoints(checkpoint_dir, parse_steps(steps))
    if base_model_dir is not None and not (base_model_dir / "config.json").is_file():
        raise RunError(f"--base-model-dir: {base_model_dir} has no config.json, so it is no model folder", 2)
    if importlib.util.find_spec("torch") is None:
        raise RunError("trinity convert needs torch; install trinity-trainer, or run it where the trainer runs", 2)
    outcomes = Counter({_CONVERTED: 0, _SKIPPED: 0, _FAILED: 0})
    for number, checkpoint in enumerate(found, 1):
        title = f"[{number}/{len(found)}] {checkpoint.label}"
        try:
            outcome, text = _convert(checkpoint, base_model_dir, title)
        except (CheckpointError, OSError) as error:
            outcome, text = _FAILED, str(error)
        outcomes[outcome] += 1
        print(f"{title}: {outcome}: {text}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()), flush=True)
    return 1 if outcomes[_FAILED] else 0


def _convert(checkpoint: Checkpoint, base: Path | None, title: str) -> tuple[str, str]:
    """The outcome and its message. Raises CheckpointError or OSError."""
    import torch

    from trinity.cli.convert import write

    if not checkpoint.actor.is_dir():
        raise CheckpointError(f"{checkpoint.folder} has no folder actor")
    folder = checkpoint.huggingface
    if has_weights(folder):
        if base is not None:
            write.copy_base_files(base, folder)
        return _SKIPPED, f"{folder} has its weights"
    begin = time.monotonic()
    try:
        with torch.no_grad():
            source = _open(checkpoint.actor, base)
            write.copy_base_files(base, folder)
            config = write.read_config(folder)
            print(f"{title}: {source.kind}", flush=True)
            written = write.write_weights(folder, _as_asked(source, config))
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        # A file can be a sound pickle and still hold what no trainer writes.
        reason = next(iter(str(error).splitlines()), "")
        raise CheckpointError(
            f"{checkpoint.actor} holds what does not fit together ({type(error).__name__}: {reason})"
        ) from error
    seconds = time.monotonic() - begin
    shards = f"{written.files} files" if written.files > 1 else "1 file"
    return _CONVERTED, f"{written.size_bytes / 1e6:.1f} MB in {shards}, {seconds:.1f} s, {folder}"


def _open(actor: Path, base: Path | None) -> "Source":
    from trinity.cli.convert.adapters import has_adapters, open_adapters
    from trinity.cli.convert.deepspeed import open_deepspeed
    from trinity.cli.convert.fsdp import has_shards, open_fsdp

    if has_adapters(actor / "lora_adapter"):
        return open_adapters(actor / "lora_adapter", base)
    if (actor / "deepspeed").is_dir():
        return open_deepspeed(actor / "deepspeed")
    if has_shards(actor):
        return open_fsdp(actor)
    raise CheckpointError(
        f"{actor} holds neither a folder deepspeed nor files model_world_size_<W>_rank_<r>.pt; "
        "other formats cannot be converted"
    )


def _as_asked(source: "Source", config: "ModelConfig") -> Iterator["Parameter"]:
    """Tensors in the dtype to be written: float32 for float32 training, else what the config says.

    Shared tensors are written once, as transformers does, unless the config says that they are not tied.
    """
    import torch

    dtype = torch.float32 if source.trained_in is torch.float32 else config.dtype or source.trained_in
    for parameter in source.parameters:
        if dtype is not None and parameter.dtype.is_floating_point:
            parameter = replace(parameter, dtype=dtype)
        yield parameter
        if config.tied is False:
            for other, first in source.shared.items():
                if first == parameter.name:
                    yield replace(parameter, name=other)
