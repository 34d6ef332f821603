"""The choice of the attention kernel on a GPU, with stand-in kernels that need no GPU."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import structlog
import torch

from trinity.trainer.model import shared_attention, varlen

pytestmark = pytest.mark.core

HEADS, KEY_HEADS, WIDTH = 4, 2, 8


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, window: int | None) -> torch.Tensor:
    lengths = tuple(ends.diff().tolist())
    before = None if window is None else window + 1
    return shared_attention.one_by_one(q[None], k[None], v[None], lengths, None, 0.0, before)[0]


class FlashAttn4:
    """What the package gives, and what it was asked."""

    def __init__(self, window: int | None) -> None:
        self.window, self.asked = window, []  # type: ignore[var-annotated]
        self.factor, self.gradient, self.error = 1.0, 1.0, None  # type: ignore[var-annotated]
        self.only_with_gradients = False

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> Any:
        self.asked.append(given)
        if self.error is not None:
            raise self.error
        if torch.is_grad_enabled():
            k.register_hook(lambda gradient: gradient * self.gradient)
        elif self.only_with_gradients:
            raise RuntimeError("no such variant")
        return plain(q, k, v, given["cu_seqlens_q"], self.window) * self.factor, None


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """PyTorch's kernel, which has no CPU's; how many key heads it was given."""
    seen: list[int] = []

    def kernel(q, k, v, ends, longest, scaling, window):  # type: ignore[no-untyped-def]
        seen.append(k.shape[1])
        return plain(q, k, v, ends, window)

    monkeypatch.setattr(varlen, "pytorch", kernel)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    varlen._fastest.cache_clear()
    varlen._flash_attn_4.cache_clear()
    yield seen
    varlen._fastest.cache_clear()
    varlen._flash_attn_4.cache_clear()


@pytest.fixture(params=[None, 40], ids=["all before", "a window"])
def package(request: pytest.FixtureRequest, torchs: list[int], monkeypatch: pytest.MonkeyPatch) -> FlashAttn4:
    package, cute, made = ModuleType("flash_attn"), ModuleType("flash_attn.cute"), FlashAttn4(request.param)
    cute.flash_attn_varlen_func = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    monkeypatch.setattr(varlen, "_fault_elsewhere", lambda *_: None)  # another process has no stand-in
    return made


@pytest.fixture
def installed(tmp_path: Path, torchs: list[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """A package on disk, for other processes too: its function's body, where q, k and v are given."""

    def install(body: str) -> None:
        cute = tmp_path / "flash_attn/cute"
        cute.mkdir(parents=True)
        (tmp_path / "flash_attn/__init__.py").touch()
        (cute / "__init__.py").write_text(
            f"import ctypes, os, time\n\ndef flash_attn_varlen_func(q, k, v, **given):\n    {body}\n"
        )

    monkeypatch.delitem(sys.modules, "flash_attn")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    yield install
    for name in ("flash_attn", "flash_attn.cute"):
        sys.modules.pop(name, None)


def chosen(window: int | None = None) -> tuple[Any, dict[str, Any]]:
    with structlog.testing.capture_logs() as said:
        kernel = varlen.kernel_for(torch.zeros(3, HEADS, WIDTH), torch.zeros(3, KEY_HEADS, WIDTH), window)
    return kernel, next((line for line in said if line["event"] == "trainer.attention.kernel"), {})


def test_flash_attention_4_is_taken_where_it_is_right(package: FlashAttn4) -> None:
    kernel, said = chosen(package.window)
    assert kernel is varlen.flash_attention_4
    assert (said["kernel"], said["not_by"]) == ("FlashAttention 4", {})
    asked, again = package.asked
    assert list(asked) == list(again)
    assert (asked["causal"], asked["window_size"]) == (
        (True, (None, None)) if package.window is None else (False, (40, 0))
    )
    assert asked["max_seqlen_q"] == asked["max_seqlen_k"] == 700
    assert asked["cu_seqlens_k"].tolist() == [0, 3, 133, 134, 834]
    assert chosen(package.window) == (kernel, {})  # tried once


@pytest.mark.parametrize("change", [{"factor": 1.1}, {"factor": float("nan")}, {"gradient": 0.5}], ids=str)
def test_not_where_its_output_or_a_gradient_is_another(package: FlashAttn4, change: dict[str, float]) -> None:
    vars(package).update(change)
    kernel, said = chosen(package.window)
    assert kernel is varlen.pytorch
    named = "dk differs by" if "gradient" in change else "output without gradients differs by"
    assert named in said["not_by"]["FlashAttention 4"]


def test_not_where_its_compiler_refuses(package: FlashAttn4) -> None:
    package.error = AssertionError("Unsupported compute capability")
    kernel, said = chosen(package.window)
    assert kernel is varlen.pytorch
    assert "Unsupported compute capability" in said["not_by"]["FlashAttention 4"]


def test_not_where_it_cannot_look_without_learning(package: FlashAttn4) -> None:
    package.only_with_gradients = True
    kernel, said = chosen(package.window)
    assert kernel is varlen.pytorch
    assert "no such variant" in said["not_by"]["FlashAttention 4"]


def test_memory_that_runs_out_says_nothing_of_a_kernel(package: FlashAttn4) -> None:
    package.error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        chosen(package.window)
    package.error = None
    assert chosen(package.window)[0] is varlen.flash_attention_4


def test_not_where_it_is_not_installed(torchs: list[int]) -> None:
    kernel, said = chosen()
    assert kernel is varlen.pytorch
    assert "flash_attn" in said["not_by"]["FlashAttention 4"]
    assert torchs == [HEADS, HEADS, KEY_HEADS, KEY_HEADS]  # first the right answer, from key heads that are repeated


def test_key_heads_are_repeated_where_pytorch_does_not_share_them(
    torchs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = varlen.pytorch

    def refuses(q, k, v, *others):  # type: ignore[no-untyped-def]
        if q.shape != k.shape:
            raise ValueError("Expect number of query heads to be those of keys")
        return shared(q, k, v, *others)

    monkeypatch.setattr(varlen, "pytorch", refuses)
    kernel, said = chosen()
    assert kernel is varlen.pytorch_repeating
    assert "those of keys" in said["not_by"]["PyTorch"]
    q, k = torch.randn(5, HEADS, WIDTH), torch.randn(5, KEY_HEADS, WIDTH)
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    torch.testing.assert_close(kernel(q, k, k, ends, 3, None, None), plain(q, k, k, ends, None))


def test_a_fault_of_the_device_ends_another_process(installed: Callable[[str], None]) -> None:
    installed("ctypes.string_at(0)")
    kernel, said = chosen()
    assert kernel is varlen.pytorch
    assert "its trial ended with exit code -11" in said["not_by"]["FlashAttention 4"]


def test_a_trial_without_an_end_is_stopped(installed: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "_TRIAL_SECONDS", 0.5)
    installed("time.sleep(600)")
    kernel, said = chosen()
    assert kernel is varlen.pytorch
    assert "did not end within 0.5 s" in said["not_by"]["FlashAttention 4"]


def test_what_another_process_survives_is_compared_here(installed: Callable[[str], None]) -> None:
    installed("return q * 1.0 + k.sum() * 0 + v.sum() * 0")
    kernel, said = chosen()
    assert kernel is varlen.pytorch
    assert "output without gradients differs by" in said["not_by"]["FlashAttention 4"]


def test_the_trial_is_not_part_of_the_layer_around_it(package: FlashAttn4) -> None:
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor), lambda kept: kept):
        chosen(package.window)
    assert saved == []
