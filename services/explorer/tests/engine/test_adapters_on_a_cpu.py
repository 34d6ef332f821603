"""The products of adapters on a CPU are those of plain loops, and a token without an adapter gets none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, PretrainedConfig, Qwen2Config
from vllm.lora.punica_wrapper import punica_cpu as vllms

from trinity.explorer.engine import worker  # noqa: F401 (installs the functions)
from trinity.explorer.engine.start import config_of
from trinity.explorer.types import EngineOptions
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core

punica_cpu: Any = vllms
SLOTS, RANK, WIDE, OUT = 3, 4, 10, 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [{0: 5}, {-1: 4}, {2: 1, 0: 3, -1: 2, 1: 1}, {-1: 3, 2: 3}])
def test_each_token_gets_the_product_of_its_adapter(lengths: dict[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(SLOTS, 1, RANK, WIDE).to(dtype), torch.randn(SLOTS, 1, OUT, RANK).to(dtype)
    order = [index for index, length in lengths.items() for _ in range(length)]
    order += [0] if len(lengths) > 2 else []  # a second run of an adapter
    x, before = torch.randn(len(order), WIDE).to(dtype), torch.randn(len(order), OUT + 5).to(dtype)
    indices, counts = torch.unique_consecutive(torch.tensor(order), return_counts=True)
    runs: list[Any] = [counts.cumsum(0) - counts, counts, indices, len(indices), int(counts.max()), len(order)]

    buffer, found = torch.zeros(len(order), RANK), before.clone()
    punica_cpu.sgmv_shrink(x, a, buffer, *runs, 0.5)
    punica_cpu.sgmv_expand_slice(buffer, b, found, *runs, 2, OUT, True)
    expected = before.clone().float()
    for token, index in enumerate(order):
        if index >= 0:
            expected[token, 2 : 2 + OUT] += 0.5 * (b[index, 0].float() @ (a[index, 0].float() @ x[token].float()))
    torch.testing.assert_close(found.float(), expected, atol=1e-5 if dtype is torch.float32 else 0.2, rtol=1e-2)
    assert torch.equal(found[:, OUT + 2 :], before[:, OUT + 2 :])

    of_tokens, decoded = torch.zeros(len(order), RANK), before.clone()
    punica_cpu.bgmv_shrink(x, a, of_tokens, torch.tensor(order), 0.5)
    punica_cpu.bgmv_expand(of_tokens, b, decoded, torch.tensor(order), True)
    assert torch.allclose(of_tokens, buffer, atol=1e-5)
    assert torch.allclose(decoded[:, :OUT] - before[:, :OUT], found[:, 2 : 2 + OUT] - before[:, 2 : 2 + OUT], atol=0.1)


@pytest.mark.parametrize(
    ("config", "takes_adapters"),
    [
        (GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, architectures=["GPT2LMHeadModel"]), False),
        (
            Qwen2Config(
                num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=2,
                num_key_value_heads=2, vocab_size=64, architectures=["Qwen2ForCausalLM"],
            ),
            True,
        ),
    ],
    ids=["gpt2", "qwen2"],
)  # fmt: skip
def test_a_model_that_vllm_adapts_only_merged_is_refused(
    config: PretrainedConfig, takes_adapters: bool, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    options = EngineOptions(str(tmp_path), "cpu", 32, adapters=2, adapter_rank=4)
    if takes_adapters:
        assert config_of(options).lora_config.max_loras == 2
        return
    with pytest.raises(InvalidInput, match=r"0.merged: is false, .* for GPT2LMHeadModel; set it to true"):
        config_of(options)
