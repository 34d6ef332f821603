"""`trinity convert`: what the trainer saved, as folders that transformers and vLLM load.

For each checkpoint: skip it if its weights are there, open its shards (slices.py, deepspeed.py, fsdp.py, megatron;
safe_load.py runs nothing of them) or its adapters (adapters.py), stream whole tensors into safetensors files
(write.py). A checkpoint that cannot be converted is one sentence; the others are still done. Torch is imported once
there is something to convert.
"""

import importlib.util
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trinity.commands import command, group
from trinity.convert.base import OtherModel, compared, with_tower
from trinity.convert.find import Checkpoint, CheckpointError, find_checkpoints, parse_steps
from trinity.reading.errors import RunError
from trinity.reading.render import visible
from trinity.runtime import files
from trinity.runtime.errors import InvalidInput
from trinity.weights.checkpoint_manifest import ManifestWriter, has_manifest, verify
from trinity.weights.checkpoints import CONVERTED, INDEX, has_weights

if TYPE_CHECKING:
    from trinity.convert.source import Parameter, Source
    from trinity.convert.write import ModelConfig

app = group()


_CONVERTED, _SKIPPED, _FAILED = "converted", "skipped", "failed"


@command(app, "convert")
def convert(
    checkpoint_dir: Annotated[
        Path, typer.Option("--checkpoint-dir", "-c", help="Job folder, global_step folder, or anything inside one")
    ],
    base_model_dir: Annotated[
        Path | None,
        typer.Option("--base-model-dir", "-b", help="Gives config.json and a vision tower where they are missing"),
    ] = None,
    steps: Annotated[str | None, typer.Option("--steps", "-s", help="Only these steps, as 100,200")] = None,
    allow_unverified: Annotated[
        bool, typer.Option("--allow-unverified", help="Convert files that differ from the checkpoint's manifest.json")
    ] = False,
) -> int:
    """Turn checkpoints (of this trainer, or FSDP and Megatron as veRL writes them) into Hugging Face folders."""
    found = find_checkpoints(checkpoint_dir, parse_steps(steps))
    if base_model_dir is not None and not (base_model_dir / "config.json").is_file():
        raise RunError(f"--base-model-dir: {base_model_dir} has no config.json, so it is no model folder", 2)
    if importlib.util.find_spec("torch") is None:
        raise RunError("trinity convert needs torch; install trinity-trainer, or run it where the trainer runs", 2)
    outcomes = Counter({_CONVERTED: 0, _SKIPPED: 0, _FAILED: 0})
    for number, checkpoint in enumerate(found, 1):
        title = f"[{number}/{len(found)}] {checkpoint.label}"
        try:
            known = has_manifest(checkpoint.folder)  # other programs write none
            if known and not allow_unverified:
                verify(checkpoint.folder, CONVERTED)
            before = {*checkpoint.huggingface.glob("*")}
            outcome, text = _convert(checkpoint, base_model_dir, title)
            if known:
                _extend_manifest(checkpoint, before, converted=outcome == _CONVERTED)
        except (CheckpointError, InvalidInput, OSError) as error:
            outcome, text = _FAILED, str(error)
        outcomes[outcome] += 1
        print(visible(f"{title}: {outcome}: {text}"), flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()), flush=True)
    return 1 if outcomes[_FAILED] else 0


def _convert(checkpoint: Checkpoint, base: Path | None, title: str) -> tuple[str, str]:
    """The outcome and its message. Raises CheckpointError or OSError."""
    import torch

    from trinity.convert import write

    if not checkpoint.actor.is_dir():
        raise CheckpointError(f"{checkpoint.folder} has no folder actor")
    folder = checkpoint.huggingface
    if has_weights(folder):
        if base is not None:
            write.copy_base_files(base, folder)
        return _SKIPPED, f"{folder} has its weights"
    begin, before = time.monotonic(), {*folder.glob("*")}
    try:
        with torch.no_grad():
            files_of = _config_folder(checkpoint.actor, base)
            source = _open(checkpoint.actor, base, files_of)
            write.copy_base_files(files_of, folder)
            config = write.read_config(folder)
            print(f"{title}: {source.kind}", flush=True)
            source = compared(source, base, gives_config=files_of is base)
            if config.has_tower:
                source = with_tower(source, base or _trained_model(checkpoint.folder), checkpoint.actor)
            written = write.write_weights(folder, _as_asked(source, config))
    except OtherModel:
        for path in {*folder.glob("*")} - before:  # another base model may be given next time
            path.unlink()
        raise
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        # A file can be a sound pickle with contents that no trainer writes.
        reason = next(iter(str(error).splitlines()), "")
        raise CheckpointError(
            f"{checkpoint.actor} holds what does not fit together ({type(error).__name__}: {reason})"
        ) from error
    seconds = time.monotonic() - begin
    shards = f"{written.files} files" if written.files > 1 else "1 file"
    return _CONVERTED, f"{written.size_bytes / 1e6:.1f} MB in {shards}, {seconds:.1f} s, {folder}"


def _extend_manifest(checkpoint: Checkpoint, before: set[Path], *, converted: bool) -> None:
    """Add what was written to the checkpoint's manifest. An interrupted one may have left weights."""
    written = {*checkpoint.huggingface.glob("*")} - before
    if converted:
        written |= {*checkpoint.huggingface.glob("*.safetensors"), *checkpoint.huggingface.glob(INDEX)}
    ManifestWriter(checkpoint.folder, [path.relative_to(checkpoint.folder).as_posix() for path in written]).write()


def _trained_model(checkpoint: Path) -> Path | None:
    """Returns the folder of the model that the run of a checkpoint began with; None if it is not here."""
    config = files.read_json(checkpoint.parent / "config.json")
    model = config.get("model") if isinstance(config, dict) else None
    path = model.get("model_path") if isinstance(model, dict) else None
    return Path(path).expanduser() if isinstance(path, str) and path else None


def _config_folder(actor: Path, base: Path | None) -> Path | None:
    """The folder with config.json: the checkpoint's (older veRL names it otherwise), else the base model's."""
    own = (actor / "huggingface", actor / "hf_config_and_tokenizer")
    return next((folder for folder in own if (folder / "config.json").is_file()), base)


def _open(actor: Path, base: Path | None, files_of: Path | None) -> "Source":
    from trinity.convert.adapters import has_adapters, open_adapters
    from trinity.convert.deepspeed import open_deepspeed
    from trinity.convert.fsdp import has_shards, open_fsdp
    from trinity.convert.megatron import has_megatron, open_megatron
    from trinity.convert.slices import FOLDER, open_slices

    if has_adapters(actor / "lora_adapter"):
        return open_adapters(actor / "lora_adapter", base)
    if (actor / FOLDER).is_dir():
        return open_slices(actor / FOLDER)
    if (actor / "deepspeed").is_dir():
        return open_deepspeed(actor / "deepspeed")
    if has_shards(actor):
        return open_fsdp(actor)
    if has_megatron(actor):
        return open_megatron(actor, files_of)
    raise CheckpointError(
        f"{actor} holds neither a folder slices, deepspeed or dist_ckpt, nor files model_world_size_<W>_rank_<r>.pt or "
        "mp_rank_<t>/model.pt; other formats cannot be converted"
    )


def _as_asked(source: "Source", config: "ModelConfig") -> Iterator["Parameter"]:
    """Tensors in the dtype to be written: float32 for float32 training, else what the config says.

    Shared tensors are written once, as transformers does, unless the config says that they are not tied.
    """
    import torch

    dtype = torch.float32 if source.trained_in is torch.float32 else config.dtype or source.trained_in
    for parameter in source.parameters:
        if dtype is not None and parameter.dtype.is_floating_point and not parameter.keeps_dtype:
            parameter = replace(parameter, dtype=dtype)
        yield parameter
        if config.tied is False:
            for other, first in source.shared.items():
                if first == parameter.name:
                    yield replace(parameter, name=other)
