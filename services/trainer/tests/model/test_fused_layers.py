"""Fused layers: what is known is replaced, and computes the same."""

import gc
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import structlog
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from support.fakes.models.compiled import kernels_on_cpu
from trinity.trainer.model import fused, kernels, logprobs
from trinity.trainer.model.checkpointing import RECOMPUTE, Checkpointing, recompute_activations
from trinity.trainer.model.fused import fuse, is_lean
from trinity.trainer.model.kernels import Kernel

pytestmark = pytest.mark.core

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
# What of each is known; a norm of Gemma's adds one to its weight, and its gate is GELU.
KNOWN = {
    "qwen2": {"norms": 9, "gates": 4, "rotations": 1},
    "qwen3": {"norms": 17, "gates": 4, "rotations": 1},
    "llama": {"norms": 9, "gates": 4, "rotations": 1},
    "gemma": {"norms": 0, "gates": 0, "rotations": 1},
}


def causal_model(shape: str):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    config = AutoConfig.for_model(shape, **SIZES)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()


def learnt(model: nn.Module) -> dict[str, torch.Tensor]:
    """Logits, and the gradients of a mix of them."""
    ids = torch.arange(1, 25).view(2, 12)
    logits = model(input_ids=ids, use_cache=False).logits
    (logits * torch.linspace(-1, 1, logits.numel()).view(logits.shape)).sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return {"logits": logits.detach(), **found}


@pytest.mark.parametrize("recompute", [False, "mlp", True])
@pytest.mark.parametrize("shape", KNOWN)
def test_outputs_and_gradients_are_the_same(shape: str, recompute: Checkpointing) -> None:
    expected = learnt(causal_model(shape))
    model = causal_model(shape)
    assert fuse(model) == KNOWN[shape]
    recompute_activations(model, recompute)
    for name, value in learnt(model).items():
        torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("recompute", ["mlp", True])
def test_some_layers_alone_recompute(recompute: Checkpointing) -> None:
    expected = learnt(causal_model("qwen2"))
    model = causal_model("qwen2")
    recompute_activations(model, recompute, 1)
    for name, value in learnt(model).items():
        torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-5, msg=name)
    marked = [[getattr(part, RECOMPUTE, False) for part in (layer, layer.mlp)] for layer in model.model.layers]
    assert marked == [[recompute is True, True], *[[False, False]] * (len(marked) - 1)]
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [part[0] for part in marked]


@pytest.mark.parametrize(("shape", "lean"), [*((shape, shape != "gemma") for shape in KNOWN), ("qwen2_moe", False)])
def test_layers_are_lean_where_all_of_them_are_known(shape: str, lean: bool) -> None:
    model = causal_model(shape)
    found = fuse(model)
    assert is_lean(model, found) == lean
    assert not is_lean(model, {**found, "norms": 8})
    if shape == "qwen2_moe":
        assert (found["norms"], found["gates"]) == (9, 4)  # of shared experts: the others keep more


@pytest.mark.parametrize("fused_layers", [False, True])
def test_of_an_mlp_alone_the_input_is_kept(fused_layers: bool) -> None:
    """The tensors between its three projections are as wide as nothing else."""

    def kept(recompute: Checkpointing) -> int:
        model = causal_model("qwen2")
        if fused_layers:
            fuse(model)
        recompute_activations(model, recompute)
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            model(input_ids=torch.arange(1, 25).view(2, 12), use_cache=False)
        return len({tensor.data_ptr() for tensor in saved if tensor.numel() == 24 * SIZES["intermediate_size"]})

    assert kept("mlp") == kept(True) == 0 < kept(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_of_a_gate_is_not_kept(dtype: torch.dtype) -> None:
    mlp = causal_model("qwen2").model.layers[0].mlp.to(dtype)
    products: list[weakref.ref] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = function(*args, **(kwargs or {}))
            if function is torch.ops.aten.mul.Tensor and result.shape == (6, 48):
                products.append(weakref.ref(result))
            return result

    def kept() -> int:
        products.clear()
        with Watching():
            result = mlp(torch.ones(1, 6, 32, dtype=dtype, requires_grad=True))
        gc.collect()
        alive = sum(product() is not None for product in products)
        result.sum().backward()
        return alive

    fuse(mlp)
    assert kept() == 0 and len(products) == 1
    setattr(mlp, RECOMPUTE, True)  # where the whole layer is recomputed, which needs it then
    assert kept() == 1


@pytest.mark.parametrize(
    "kernel",
    [fused._NORM, fused._GATE, *logprobs._FUSED_FOLDS, *logprobs._FUSED_SLOPES],
    ids=lambda k: f"{k.plain.__name__}-{len(k._varying)}",
)
def test_what_becomes_a_kernel_is_one_graph_for_all_lengths(kernel: Kernel) -> None:
    """As on a GPU, but for the last step, which needs one."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):  # type: ignore[no-untyped-def]
        graphs.append(graph)
        return graph.forward

    fresh = Kernel(kernel.plain, kernel._varying or None)
    with kernels_on_cpu(backend):
        for length in (5, 7, 9):
            expected = kernel.plain(*arguments(kernel, length))
            torch.testing.assert_close(fresh(*arguments(kernel, length)), expected)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("choice", "large_enough", "compiles", "expected"),
    [(None, 10**9, True, False), (None, 100, True, True), (True, 10**9, True, True), (True, 100, False, False),
     (None, 100, False, False), (False, 100, True, False)],
)  # fmt: skip
def test_small_models_do_without(
    choice: bool | None, large_enough: int, compiles: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "_LARGE_ENOUGH", large_enough)
    monkeypatch.setattr(fused, "can_compile", lambda: compiles)
    assert fused.wants_kernels(causal_model("qwen2"), choice) is expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_where_nothing_can_be_compiled_the_log_says_why() -> None:
    with structlog.testing.capture_logs() as logs:
        assert kernels.can_compile.__wrapped__() is False
    assert [line["event"] for line in logs] == ["trainer.kernels.not_compiled"]


def test_on_a_cpu_the_compiler_is_not_loaded() -> None:
    code = "import sys, trinity.trainer.model.policy; assert not [m for m in sys.modules if 'torch._inductor' in m]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_heads_are_rotated_as_they_lie_in_memory() -> None:
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb as given

    plain = given._kernel.plain if isinstance(given, fused._Rotation) else given
    q, k = torch.randn(2, 5, 4, 6).transpose(1, 2), torch.randn(2, 5, 2, 6).transpose(1, 2)
    cos, sin = torch.randn(2, 5, 6), torch.randn(2, 5, 6)
    for made, expected in zip(fused._Rotation(plain)(q, k, cos, sin), plain(q, k, cos, sin), strict=True):
        assert torch.equal(made, expected)
        assert made.transpose(1, 2).is_contiguous()
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    for made, expected in zip(fused._Rotation(plain)(q, k, cos, sin, 2), plain(q, k, cos, sin, 2), strict=True):
        assert torch.equal(made, expected)


@pytest.mark.parametrize("parameters", ["x, cos, sin", "q, k, v, cos, sin", "q, k, cos, sin"])
def test_a_rotation_of_other_tensors_stays(parameters: str) -> None:
    home = SimpleNamespace(apply_rotary_pos_emb=eval(f"lambda {parameters}: None"))
    assert fused._fuse_rotation(home) == 0
    assert not isinstance(home.apply_rotary_pos_emb, fused._Rotation)


@pytest.mark.parametrize("recompute", ["mlp", True])
def test_experts_that_are_shared_are_recomputed_too(recompute: Checkpointing) -> None:
    """An MLP within an MLP: it keeps nothing of its own beyond the layer."""
    torch.manual_seed(0)
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
               "shared_expert_intermediate_size": 40}  # fmt: skip
    config = AutoConfig.for_model("qwen2_moe", **SIZES, **experts)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()
    assert fuse(model)["gates"] == 4
    recompute_activations(model, recompute)
    shared = [layer.mlp.shared_expert for layer in model.model.layers]
    assert all(getattr(mlp, RECOMPUTE) for mlp in shared)


def arguments(kernel: Kernel, length: int) -> list:  # type: ignore[type-arg]
    generator = torch.Generator().manual_seed(length)
    rows = torch.randn(length, 16, generator=generator)
    column = torch.rand(length, generator=generator)
    if kernel is fused._NORM:
        return [rows, torch.ones(16), 1e-6]
    if kernel is fused._GATE:
        return [rows, rows + 1]
    where, here = torch.arange(length)[:, None], column > 0.5
    rest = (column, column, column, column)
    if kernel in logprobs._FUSED_FOLDS:
        return [rows, column, here, where, *rest]
    return [rows, column, here, where, column, column, column, None, torch.bfloat16]
