"""Ranks that read weights sharded by ZeRO-3, and compare them with those DeepSpeed gathers."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from trinity.config.schema.algorithm import OptimizerConfig
from trinity.config.schema.trainer import TrainerConfig
from trinity.trainer.engine import deepspeed
from trinity.trainer.engine.weights import PolicyWeights
from trinity.trainer.process.ranks import Ranks

# The dtype, the most elements of a parameter that DeepSpeed keeps whole, and True if only adapters are read.
CASES = [(torch.float32, 50, False), (torch.bfloat16, 50, True), (torch.bfloat16, 0, False)]


class Model(nn.Module):
    """Odd sizes, smaller than the number of ranks and larger than a bucket; two names of one parameter."""

    def __init__(self, adapters: bool) -> None:
        super().__init__()
        self.model = SimpleNamespace(_weight_conversions=[], config=None)  # as one of transformers without experts
        self.embedding = nn.Embedding(101, 37)
        self.layers = nn.ModuleList(nn.Linear(37, size) for size in (53, 37, 1, 37 * 9))
        self.scalars = nn.ParameterList(torch.randn(size) for size in (1, 2, 5, 640))
        self.head = nn.Linear(37, 101, bias=False)
        self.head.weight = self.embedding.weight
        self.adapters = adapters
        for name, parameter in self.named_parameters():
            parameter.requires_grad = not adapters or "layers" in name

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[1](self.embedding(ids)) + self.scalars[0] + self.scalars[1].sum() + self.scalars[2].sum()
        rest = self.layers[0](hidden).sum() + self.layers[2](hidden).sum() + self.layers[3](hidden).sum()
        return self.head(hidden).float().square().mean() + rest.float() * 1e-3 + self.scalars[3].float().mean()

    def weights(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.named_parameters() if not self.adapters or p.requires_grad]


def read_by_rank(rank: int, ranks: int, port: int, folder: str) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    for case, (dtype, persist, adapters) in enumerate(CASES):
        compare(ranks, dtype, persist, adapters)
        Path(folder, f"{case}-{rank}").touch()
    torch.distributed.destroy_process_group()


def compare(ranks: int, dtype: torch.dtype, persist: int, adapters: bool) -> None:
    torch.manual_seed(0)
    module = Model(adapters).to(dtype)
    begun = {name: parameter.detach().clone() for name, parameter in module.weights()}
    trainer = TrainerConfig.model_validate({"deepspeed": {"zero_stage": 3, "dtype": str(dtype).removeprefix("torch.")}})
    model = with_threshold(
        persist,
        lambda: deepspeed.DeepSpeedModel(module, OptimizerConfig(lr=1e-2), trainer, dtype, torch.device("cpu"), 1.0),
    )
    assert_read(model, ranks, dtype, begun)
    for _ in range(2):
        model.backward(model(torch.arange(30).view(2, 15)))
        assert model.step(1e-2, torch.tensor(True)) is not None
        found = {name: tensor.clone() for name, tensor in weights_of(model, ranks, dtype, 0.02).read()}
        assert statuses(model) == ({"AVAILABLE", "NOT_AVAILABLE"} if persist else {"NOT_AVAILABLE"})
        expected = by_deepspeed(model)  # also splits whole parameters
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert not any(torch.equal(found[name], begun[name]) for name in begun)
        assert_read(model, ranks, dtype, expected)


def with_threshold(persist: int, make: Any) -> Any:
    """DeepSpeed keeps parameters up to this many elements whole."""
    config = deepspeed.deepspeed_config

    def changed(*args: Any) -> dict[str, Any]:
        made = config(*args)
        made["zero_optimization"]["stage3_param_persistence_threshold"] = persist
        return made

    deepspeed.deepspeed_config = changed
    try:
        return make()
    finally:
        deepspeed.deepspeed_config = config


def statuses(model: Any) -> set[str]:
    return {parameter.ds_status.name for _, parameter in model.module.weights()}


def weights_of(model: Any, ranks: int, dtype: torch.dtype, bucket_mib: float) -> PolicyWeights:
    plan: Any = SimpleNamespace(config=SimpleNamespace(synchronizer=SimpleNamespace(bucket_mib=bucket_mib)))
    return PolicyWeights(model, plan, Ranks(0, ranks, 0), dtype, torch.device("cpu"))


def by_deepspeed(model: Any) -> dict[str, torch.Tensor]:
    weights = model.module.weights()
    with model.gathered([parameter for _, parameter in weights], None):
        return {name: parameter.data.clone() for name, parameter in weights}


def assert_read(model: Any, ranks: int, dtype: torch.dtype, expected: dict[str, torch.Tensor]) -> None:
    """Gathers repeatedly, in buckets of any size, without changing the model."""
    before = [(p.ds_status, p.data_ptr()) for _, p in model.module.weights()]
    for mib in (0.001, 0.02, 1.0):
        weights = weights_of(model, ranks, dtype, mib)
        names = []
        for (name, tensor), info in zip(weights.read(), weights.layout(), strict=True):
            names.append(name)
            assert (name, tuple(tensor.shape), tensor.dtype) == (info.name, info.shape, dtype)
            assert torch.equal(tensor, expected[name]) and tensor.is_contiguous(), name
        assert names == list(expected)
    assert before == [(p.ds_status, p.data_ptr()) for _, p in model.module.weights()]
