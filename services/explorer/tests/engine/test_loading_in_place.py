"""Which models get new weights copied over the old ones, on a GPU, and how; that it is right, the canary says.

And what a worker replaces in vLLM for reproducible runs.
"""

from collections.abc import Generator, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers import layernorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from trinity.explorer.engine.worker import (
    TrinityTransferEngine,
    UpdateInfo,
    WorkerExtension,
    loads_in_place,
    norm_row_by_row,
)
from trinity.weights.collective import GroupBroken

pytestmark = pytest.mark.core

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


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.loads = 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loads += 1
        for _, tensor in weights:
            self.weight.data.copy_(tensor)


class Receives(TrinityTransferEngine):
    """Has `versions` sent to it, one an update; None: the group breaks."""

    in_place = True

    def __init__(self, model: Model, versions: list[torch.Tensor | None]) -> None:
        load = SimpleNamespace(load_format="auto")
        everything: Any = SimpleNamespace(parallel_config=None, model_config=None, load_config=load)
        super().__init__(everything, everything, CPU, model)
        self._versions = iter(versions)

    def _received(self, update: UpdateInfo) -> Generator[list[tuple[str, torch.Tensor]]]:
        version = next(self._versions)
        if version is None:
            raise GroupBroken("gone")
        yield [("weight", version)]


class Worker(WorkerExtension):
    """As vLLM's own: an update is under way from its start to its end, or to a failure."""

    def __init__(self, engine: Receives) -> None:
        self.weight_transfer_engine = engine
        self._weight_update_active = False

    def start_weight_update(self) -> None:
        assert not self._weight_update_active
        self.weight_transfer_engine.start_weight_update()
        self._weight_update_active = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        try:
            self.weight_transfer_engine.receive_weights(UpdateInfo(**update_info))
        except BaseException:
            self._weight_update_active = False
            raise

    def finish_weight_update(self) -> None:
        self.weight_transfer_engine.finish_weight_update()
        self._weight_update_active = False


def test_what_a_group_sends_is_loaded_by_the_model_once_and_then_by_its_copies() -> None:
    versions = [torch.tensor([float(number), 7.0]) for number in range(1, 5)]
    model = Model()
    worker = Worker(Receives(model, [versions[0], versions[1], None, versions[2], versions[3]]))
    update = {"epoch": 1, "bucket_bytes": 8, "tensors": [["weight", "F32", [2], 8]]}
    for version in versions[:2]:
        worker.load_version(update)
        assert torch.equal(model.weight, version)
    with pytest.raises(GroupBroken):
        worker.load_version(update)
    worker.abandon_weight_update()
    for version in versions[2:]:
        worker.load_version(update)
        assert torch.equal(model.weight, version)
    assert model.loads == 1


def test_a_residual_is_added_outside_the_kernel_whose_sums_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.26's kernel with a residual has blocks of another size from 256 tokens on."""

    def of_rows(
        input: torch.Tensor, weight: torch.Tensor | None, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert residual is None
        return nn.functional.rms_norm(input, input.shape[-1:], weight, eps)

    monkeypatch.setattr(layernorm, "rms_norm_batch_invariant", of_rows)
    norm_row_by_row()
    hidden, residual = torch.randn(2, 300, 64, generator=torch.manual_seed(0)).unbind()
    weight = torch.rand(64)
    normed, added = layernorm.rms_norm_batch_invariant(hidden, weight, 1e-5, residual=residual)
    assert torch.equal(added, hidden + residual)
    assert torch.equal(normed, of_rows(hidden + residual, weight, 1e-5))
    assert torch.equal(layernorm.rms_norm_batch_invariant(hidden, weight, 1e-5), of_rows(hidden, weight, 1e-5))
