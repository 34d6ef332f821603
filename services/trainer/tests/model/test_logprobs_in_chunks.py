"""Chunked log-probabilities and entropy: the same as the plain ones, without their memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from trinity.trainer.model.logprobs import _FUSED_FOLDS, _kernel, _slices, chunked_logprobs

pytestmark = pytest.mark.core


def inputs(seed: int, tokens: int, width: int, vocabulary: int, dtype: torch.dtype):  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    temperatures = torch.rand(tokens, generator=generator) + 0.5
    return hidden, weight, targets, temperatures


@given(seed=st.integers(0, 1000), tokens=st.integers(0, 30), chunk=st.integers(1, 40), fused=st.booleans())
@settings(max_examples=60, deadline=None)
def test_values_and_gradients_are_the_plain_ones(seed: int, tokens: int, chunk: int, fused: bool) -> None:
    hidden, weight, targets, temperatures = inputs(seed, tokens, 8, 17, torch.float32)
    found = chunked_logprobs(hidden, weight, targets, temperatures, chunk, fused=fused)
    logs = torch.log_softmax((hidden @ weight.T) / temperatures[:, None], -1)
    expected = logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    generator = torch.Generator().manual_seed(seed + 1)
    mix = [torch.randn(tokens, generator=generator) for _ in range(2)]
    grads = torch.autograd.grad(sum((v * m).sum() for v, m in zip(found, mix, strict=True)), (hidden, weight))
    plain = torch.autograd.grad(sum((v * m).sum() for v, m in zip(expected, mix, strict=True)), (hidden, weight))
    for one, other in zip(grads, plain, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@given(seed=st.integers(0, 1000), tokens=st.integers(0, 30), chunk=st.integers(1, 40), fused=st.booleans(),
       k=st.integers(1, 17), cap=st.sampled_from([None, 3.0]))  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_further_tokens_of_a_place_are_as_the_plain_ones(
    seed: int, tokens: int, chunk: int, fused: bool, k: int, cap: float | None
) -> None:
    """The target is sometimes among them."""
    hidden, weight, targets, temperatures = inputs(seed, tokens, 8, 17, torch.float32)
    generator = torch.Generator().manual_seed(seed + 1)
    others = torch.rand(tokens, 17, generator=generator).argsort(-1)[:, :k]
    found = chunked_logprobs(hidden, weight, targets, temperatures, chunk, fused=fused, cap=cap, others=others)
    logits = hidden @ weight.T
    logits = logits if cap is None else cap * (logits / cap).tanh()
    logs = torch.log_softmax(logits / temperatures[:, None], -1)
    expected = logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1), logs.gather(1, others)
    mix = [torch.randn(one.shape, generator=generator) for one in expected]
    for parts in ([0, 1, 2], [2], [0, 2], [1]):
        sums = [sum((found[i] * mix[i]).sum() for i in parts), sum((expected[i] * mix[i]).sum() for i in parts)]
        ours, plain = (torch.autograd.grad(one, (hidden, weight), retain_graph=True) for one in sums)
        for one, other in zip((*found, *ours), (*expected, *plain), strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


class _Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation made."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.Tensor):
                self.size = max(self.size, item.numel() * item.element_size())
        return result


@pytest.mark.parametrize(("entropy_gradient", "k"), [(False, 0), (True, 0), (False, 8)])
def test_no_tensor_of_tokens_by_vocabulary_exists(entropy_gradient: bool, k: int) -> None:
    tokens, vocabulary, chunk = 512, 20_000, 64
    hidden, weight, targets, temperatures = inputs(0, tokens, 16, vocabulary, torch.float32)
    with _Largest() as largest:
        others = torch.arange(k).repeat(tokens, 1) if k else None
        logprobs, entropy, *top = chunked_logprobs(hidden, weight, targets, temperatures, chunk, others=others)
        (sum(one.sum() for one in (logprobs, *top)) + (entropy.sum() if entropy_gradient else 0)).backward()
    assert chunk * vocabulary * 4 / 2 <= largest.size <= chunk * vocabulary * 4 < tokens * vocabulary * 4 / 4


@pytest.mark.parametrize(
    ("tokens", "widths"), [(100, {1000}), (512, {1000}), (513, {512, 488}), (3000, {128, 104}), (10**6, {1})]
)
def test_slices_have_few_widths_and_only_the_last_another_kernel(tokens: int, widths: set[int]) -> None:
    weight = torch.empty(1000, 1)
    parts = list(_slices(tokens, weight, 512))
    assert {part.stop - part.start for part in parts} == widths
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])] and parts[-1].stop == 1000
    others = [part for part in parts if _kernel(_FUSED_FOLDS, part, weight) is _FUSED_FOLDS[1]]
    assert others == ([parts[-1]] if len(widths) == 2 else [])


def test_bfloat16_hidden_states_give_float32_results() -> None:
    hidden, weight, targets, temperatures = inputs(0, 50, 32, 100, torch.bfloat16)
    logprobs, entropy = chunked_logprobs(hidden, weight, targets, temperatures, 16)
    assert (logprobs.dtype, entropy.dtype) == (torch.float32, torch.float32)
    logs = torch.log_softmax((hidden.float() @ weight.float().T) / temperatures[:, None], -1)
    torch.testing.assert_close(logprobs, logs.gather(1, targets[:, None])[:, 0], atol=0.1, rtol=0.02)
    logprobs.sum().backward()
    assert torch.isfinite(weight.grad).all()


@pytest.mark.parametrize("chunk", [1, 16, 1000])
def test_logits_in_float32_are_exact_where_the_model_is_in_bfloat16(chunk: int) -> None:
    hidden, weight, targets, temperatures = inputs(0, 50, 32, 300, torch.bfloat16)
    logprobs, entropy = chunked_logprobs(hidden, weight, targets, temperatures, chunk, in_float32=True)
    logs = torch.log_softmax((hidden.float() @ weight.float().T) / temperatures[:, None], -1)
    torch.testing.assert_close(logprobs, logs.gather(1, targets[:, None])[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, -(logs.exp() * logs).sum(-1), atol=1e-5, rtol=1e-5)
    mix = torch.linspace(-1, 1, 50)
    found = torch.autograd.grad((logprobs * mix).sum(), (hidden, weight))
    for one, other in zip(found, torch.autograd.grad((logs.gather(1, targets[:, None])[:, 0] * mix).sum(),
                                                     (hidden, weight)), strict=True):  # fmt: skip
        torch.testing.assert_close(one, other, atol=0.05, rtol=0.02)


def test_without_a_gradient_for_the_entropy_none_is_computed() -> None:
    hidden, weight, targets, temperatures = inputs(0, 20, 8, 300, torch.float32)
    counts = []
    for wants in (True, False):
        logprobs, entropy = chunked_logprobs(hidden, weight, targets, temperatures, 16)
        loss = logprobs.sum() + (entropy if wants else entropy.detach()).sum()
        with _Count() as count:
            loss.backward()
        counts.append(count.elements)
    assert counts[1] < 0.8 * counts[0]


class _Count(TorchDispatchMode):
    """Elements that all operations together wrote."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements += result.numel()
        return result


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, targets, temperatures = inputs(0, 20, 8, 300, torch.float32)
    logprobs, _ = chunked_logprobs(hidden, weight.detach(), targets, temperatures, 16)
    logprobs.sum().backward()
    assert hidden.grad is not None
