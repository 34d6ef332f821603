"""On one rank under ZeRO 2 OneRankUpdate makes the updates that DeepSpeed's optimizer would make."""

from pathlib import Path
from typing import Any

import pytest
import torch

from support.fakes.models.compiled import kernels_on_cpu
from support.programs.trainer.many_shares import norms_of
from support.programs.trainer.one_rank import STEPS, Found, updates
from trinity.trainer.engine import gradients as gradient_updates
from trinity.trainer.model.kernels import Kernel

pytestmark = [pytest.mark.core, pytest.mark.timeout(200)]


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return updates(tmp_path_factory.mktemp("one_rank"), request.param)


@pytest.mark.parametrize("way", ["short", "short, then deepspeed", "deepspeed, then short"])
def test_norms_and_weights_are_deepspeeds(way: str, found: Found) -> None:
    """Also of several micro-batches, after what was not finite, dropped or abandoned, and over a checkpoint."""
    expected, ours = found["deepspeed"], found[way]
    assert not any(expected["short"]) and any(ours["short"])
    assert expected["norms"] == pytest.approx(ours["norms"], rel=1e-5)
    assert max(ours["norms"]) > 0.2 > min(ours["norms"]), "some updates are clipped"
    assert ours["weights"] == pytest.approx(expected["weights"], abs=1e-6)
    assert ours["count"] == STEPS
    assert ours["bad"] in ("nan", "inf")


def test_parameters_without_a_gradient_only_decay(found: Found) -> None:
    assert found["short"]["weights"][:7] == pytest.approx([(1 - 1e-3) ** STEPS] * 7, abs=4e-3)


def test_an_update_is_the_one_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(50, generator=generator), torch.randn(4, 50, generator=generator)
    group = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.2}
    expected = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([expected], **group)
    master, mean, square, weight = start.clone(), torch.zeros(50), torch.zeros(50), torch.zeros(50).bfloat16()
    update: Any = gradient_updates.OneRankUpdate.__new__(gradient_updates.OneRankUpdate)
    update._grad_clip, state = 0.0, {"step": torch.zeros(())}
    for gradient in gradients:
        expected.grad = gradient.clone()
        optimizer.step()
        gradient_updates._adamw(master, weight, mean, square, gradient, update._numbers(group, state, 1.0))
    torch.testing.assert_close(master, expected.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(weight, master.bfloat16())


def test_an_update_becomes_one_kernel_that_writes_in_place() -> None:
    """Of all lengths: as on a GPU, but for the last step, which needs one."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):  # type: ignore[no-untyped-def]
        graphs.append(graph)
        return graph.forward

    generator = torch.Generator().manual_seed(0)
    flat = [torch.rand(30, generator=generator) for _ in range(4)]
    master, weight, mean, square = (tensor.clone() for tensor in flat)
    gradients, numbers = torch.randn(30, generator=generator), torch.rand(8, generator=generator)
    fresh = Kernel(gradient_updates._adamw)
    with kernels_on_cpu(backend), torch.no_grad():
        for part in (slice(0, 7), slice(7, 12), slice(12, 30)):
            fresh(*(tensor[part] for tensor in flat), gradients[part], numbers)
    gradient_updates._adamw(master, weight, mean, square, gradients, numbers)
    torch.testing.assert_close(flat, [master, weight, mean, square])
    assert len(graphs) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_many_elements_is_exact(dtype: torch.dtype) -> None:
    gradients = [torch.rand(size, generator=torch.Generator().manual_seed(size)).to(dtype) for size in (3_000_000, 7)]
    expected = float(torch.cat(gradients).double().norm())
    assert gradient_updates._norm(gradients) == pytest.approx(expected, rel=1e-7)


def test_chunks_follow_memory_and_not_the_order_of_the_model() -> None:
    flat = torch.arange(20.0)
    first, second, apart = (torch.nn.Parameter(flat[begin:end]) for begin, end in ((0, 4), (4, 10), (12, 20)))
    found = gradient_updates._chunks(flat, [apart, second, first])
    assert [(begin, [len(parameter) for parameter in chunk]) for begin, chunk in found] == [(0, [4, 6]), (12, [8])]


def test_two_ranks_reduce_their_gradients(tmp_path: Path) -> None:
    """Each has other inputs; OneRankUpdate would take each rank's gradient for all."""
    found = norms_of(tmp_path, 2, [0.5, 0.5])
    assert found["2"]["shares"] == pytest.approx(found["0"]["shares"], rel=1e-2)
