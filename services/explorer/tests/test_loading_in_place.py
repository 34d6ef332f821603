"""Which models get new weights copied over the old ones, on a GPU; that it is right there, the canary says."""

from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from trinity.explorer.engine.worker import loads_in_place

GPU, CPU = torch.device("cuda"), torch.device("cpu")


class Layer(nn.Module):
    def __init__(self, method: Any) -> None:
        super().__init__()
        self.quant_method = method


class MLAAttention(nn.Module):
    pass


class Float8Method:
    pass


def plain() -> list[nn.Module]:
    return [Layer(UnquantizedLinearMethod()), Layer(UnquantizedEmbeddingMethod()), nn.LayerNorm(4)]


def test_a_plain_model_on_a_gpu_does() -> None:
    assert loads_in_place(nn.Sequential(*plain()), GPU)


@pytest.mark.parametrize("extra", [Layer(Float8Method()), MLAAttention()], ids=["quantised", "absorbed"])
def test_a_model_that_computes_with_other_weights_does_not(extra: nn.Module) -> None:
    assert not loads_in_place(nn.Sequential(*plain(), extra), GPU)


def test_a_cpu_engine_does_not_because_it_packs_its_matrices() -> None:
    assert not loads_in_place(nn.Sequential(*plain()), CPU)
