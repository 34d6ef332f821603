"""An engine that quantizes its weights loads versions as they are published, and names its precision per token."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from trinity.data.experience import SamplingParams
from trinity.explorer.engine.pool import EnginePool
from trinity.explorer.types import EngineOptions
from trinity.weights.manifest import Canary, Probe

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(300)]

_INT8 = "int8_per_channel_weight_only"  # FP8 needs a GPU
_TOKENS = list(range(5, 69))


async def test_quantized_weights_are_those_of_the_loaded_version(quickstart_model: Path, tmp_path: Path) -> None:
    options = EngineOptions(
        str(quickstart_model), "cpu", 256, dtype="bfloat16", max_num_seqs=2, engine_args={"quantization": _INT8}
    )
    torch.manual_seed(0)
    pool = await EnginePool.start(options, [None])
    try:
        for number in (1, 2):
            model = AutoModelForCausalLM.from_pretrained(quickstart_model, dtype=torch.float32)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.02 * number * torch.randn_like(parameter))
            save_file(dict(model.state_dict()), tmp_path / f"{number}.safetensors")
            names: list[list[Any]] = [[name, 0] for name in model.state_dict()]
            serial, _ = await pool.load(number, {"files": [str(tmp_path / f"{number}.safetensors")], "tensors": names})
            found = await asyncio.wait_for(pool.measure(canary_of(model)), 120)
            assert found.within(canary_of(model), pool.loads.precision), found
            assert not found.within(Canary((), 1e-3, 1e-2, 1.0), pool.loads.precision), "it is not float32"
            pool.loads.pass_canary(serial)
            pool.loads.trust(number)
            with torch.no_grad():
                model.model.layers[0].mlp.down_proj.weight.mul_(10.0)
            assert not (await pool.measure(canary_of(model))).within(canary_of(model), pool.loads.precision)
            [made] = await asyncio.wait_for(pool.generate(_TOKENS, SamplingParams(max_tokens=8, ignore_eos=True)), 120)
            assert [(span.version, span.precision) for span in made.version_spans] == [(number, _INT8)]
    finally:
        for engine in pool.engines:
            engine.close()


def canary_of(model: torch.nn.Module) -> Canary:
    """Makes a canary of this model. Engines that quantize may differ four times as much as others."""
    ids = torch.tensor([_TOKENS])
    with torch.no_grad():
        logs = torch.log_softmax(model(ids).logits[0, :-1], -1)
    values = logs.gather(1, ids[0, 1:, None])[:, 0].tolist()
    return Canary((Probe(tuple(_TOKENS), tuple(values)),), 0.05, 0.5, 4.0)


@pytest.mark.parametrize(
    ("arguments", "precision"),
    [
        ({}, "bfloat16"),
        ({"quantization": "fp8"}, "fp8"),
        ({"kv_cache_dtype": "auto"}, "bfloat16"),
        ({"kv_cache_dtype": "fp8"}, "bfloat16, cache fp8"),
        ({"quantization": "fp8", "kv_cache_dtype": "fp8_e5m2"}, "fp8, cache fp8_e5m2"),
    ],
)
def test_precision_names_weights_and_cache(arguments: dict[str, Any], precision: str) -> None:
    assert EngineOptions("m", "cuda", 8, dtype="bfloat16", engine_args=arguments).precision == precision
