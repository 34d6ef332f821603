"""vLLM samples a family's model and loads a version of its language model; log-probabilities are the trainer's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.families import FAMILIES, Family, make_model
from models.test_families_compute_as_transformers import policy_of
from safetensors.torch import save_file

from support.servers.shared_engine import update_info
from trinity.trainer.model.file_parts import FileParts

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(400)]

# vLLM's kernels for CPUs know only some widths.
SIZES = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
TOKENS = [np.random.default_rng(0).integers(2, 90, length).tolist() for length in (9, 40, 100)]


@pytest.mark.parametrize("family", [pytest.param(family, id=family.kind) for family in FAMILIES if family.engine])
async def test_an_engine_loads_a_version_of_the_language_model(family: Family, tmp_path: Path) -> None:
    from trinity.explorer.engine.engine import Engine
    from trinity.explorer.types import EngineOptions

    known = {name: size for name, size in SIZES.items() if "linear" not in name or name in family.text}
    if "layer_types" in family.text:
        known["num_hidden_layers"] = len(family.text["layer_types"])
    plain = make_model(family, tmp_path / "base", known).eval()
    policy = policy_of(tmp_path / "base", packed=False)
    options = EngineOptions(
        str(tmp_path / "base"), "cpu", 128, max_num_seqs=2, engine_args={"skip_tokenizer_init": True}
    )
    close = 2e-5 if options.engine_dtype == "float32" else 0.15
    engine = await Engine.start(options)
    try:
        before = await _difference(engine, plain)
        parts = FileParts(policy.model)
        generator = torch.Generator().manual_seed(0)
        own = dict(plain.named_parameters())
        with torch.no_grad():
            for name, weight in policy.weights():
                if weight.requires_grad and name in own:
                    weight.add_(torch.randn(weight.shape, generator=generator) * 0.03)
                    own[name].copy_(weight)
        version = {
            part: tensor.clone() for name, weight in policy.weights() for part, tensor in parts.cut(name, weight.data)
        }
        (tmp_path / "next").mkdir()
        save_file(version, tmp_path / "next/model.safetensors", metadata={"format": "pt"})
        stale = await _difference(engine, plain)
        await engine.load(1, update_info(tmp_path / "next"))
        after = await _difference(engine, plain)
    finally:
        engine.close()
    assert max(before, after) < close
    assert stale > 3 * close  # else a version that is not loaded would pass


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
