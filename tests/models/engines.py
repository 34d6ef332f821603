"""An engine of vLLM samples a family's model and loads a version of its language model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models.families import SIZES, Family, make_model
from safetensors.torch import save_file

from trinity.config.schema.model import ModelConfig
from trinity.trainer.model.attention import choose_attention
from trinity.trainer.model.file_parts import FileParts
from trinity.trainer.model.policy import load_policy
from trinity.trainer.model.vision import freeze_all_but_text
from trinity.weights.manifest import manifest_of_folder

TOKENS = [np.random.default_rng(0).integers(2, 90, length).tolist() for length in (9, 40, 100)]


@dataclass(frozen=True)
class Differences:
    """Means of the absolute differences between the engine's log-probabilities and the trainer's.

    before: with the model's files; stale: the trainer has the next weights, the engine not yet; after: both have them.
    """

    before: float
    stale: float
    after: float


async def differences_of(
    family: Family, folder: Path, sizes: Mapping[str, Any], device: str, **engine: Any
) -> Differences:
    """Makes a model of the family in an empty folder and measures. engine: vLLM's arguments."""
    from trinity.explorer.engine.engine import Engine
    from trinity.explorer.types import EngineOptions

    known = {name: size for name, size in sizes.items() if name in family.text or name in SIZES}
    if {"layer_types", "linear_attn_config"} & set(family.text):
        known.pop("num_hidden_layers")
    if "mrope_section" in (rope := family.text.get("rope_parameters", {})):
        half = sizes["head_dim"] // 2
        known["rope_parameters"] = {**rope, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    plain = make_model(family, folder / "base", known).eval()
    choose_attention(plain)
    policy = load_policy(ModelConfig(model_path=str(folder / "base")), torch.float32, 64)
    freeze_all_but_text(policy.model)
    arguments = {"skip_tokenizer_init": True, **engine}
    options = EngineOptions(
        str(folder / "base"), device, 128, max_num_seqs=2, enforce_eager=True, engine_args=arguments
    )
    started = await Engine.start(options)
    try:
        before = await _difference(started, plain)
        generator = torch.Generator().manual_seed(0)
        own = dict(plain.named_parameters())
        with torch.no_grad():
            for name, weight in policy.weights():
                if weight.requires_grad and name in own:
                    weight.add_(torch.randn(weight.shape, generator=generator) * 0.03)
                    own[name].copy_(weight)
        parts = FileParts(policy.model)
        version = {
            part: tensor.clone() for name, weight in policy.weights() for part, tensor in parts.cut(name, weight.data)
        }
        (folder / "next").mkdir()
        save_file(version, folder / "next/model.safetensors", metadata={"format": "pt"})
        stale = await _difference(started, plain)
        files, tensors = manifest_of_folder("run", 1, folder / "next", checksums=False).load_arguments(folder / "next")
        await started.load(1, {"files": files, "tensors": [list(tensor) for tensor in tensors]})
        return Differences(before, stale, await _difference(started, plain))
    finally:
        started.close()


async def _difference(engine: Any, model: Any) -> float:
    """Mean of the absolute differences of log-probabilities."""
    differences = []
    for tokens in TOKENS:
        ids = torch.tensor(tokens)
        with torch.no_grad():
            logs = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0].float(), -1)
        expected = logs[:-1].gather(1, ids[1:, None])[:, 0].numpy()
        found = np.asarray(await engine.logprobs(tokens))[-len(expected) :]
        differences.append(np.abs(found - expected))
    return float(np.concatenate(differences).mean())
