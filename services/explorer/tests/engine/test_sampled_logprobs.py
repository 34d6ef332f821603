"""Log-probabilities of sampled tokens, as vLLM's workers compute them here."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from trinity.explorer.engine import sampled_logprobs
from trinity.explorer.engine.sampled_logprobs import sampled_logprobs as logprobs_of

pytestmark = pytest.mark.core


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_they_are_those_of_log_softmax(dtype: torch.dtype, rows: int) -> None:
    logits = 30 * torch.randn(rows, 1000, generator=torch.manual_seed(rows))
    logits[:, 500:700] = -torch.inf  # as top-k and top-p leave it
    logits = logits.to(dtype)
    ids = torch.randint(0, 500, (rows,))
    expected = torch.log_softmax(logits.double(), -1).gather(1, ids[:, None])
    found = logprobs_of(logits, ids)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-6)


INTERPRETED = """
import torch
from trinity.explorer.engine import sampled_logprobs_kernels as kernels

kernels._PART = 128
logits = 30 * torch.randn(5, 1000, generator=torch.manual_seed(0))
logits[:, 300:700] = -torch.inf
logits[4] = -torch.inf
logits[4, 3] = -200.0
ids = torch.tensor([0, 127, 128, 999, 3])
for dtype in (torch.float32, torch.bfloat16):
    given = logits.to(dtype)
    expected = torch.log_softmax(given.double(), -1).gather(1, ids[:, None])
    torch.testing.assert_close(kernels.of_rows(given, ids).double(), expected, atol=1e-5, rtol=1e-6)
assert kernels.of_rows(logits[:0], ids[:0]).shape == (0, 1)
"""


def test_the_gpu_kernels_give_the_same() -> None:
    """On the CPU, interpreted. A part of a row may be excluded, and all but one token of a row."""
    pytest.importorskip("triton")
    command, given = [sys.executable, "-c", INTERPRETED], {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_only_requests_for_the_sampled_token_alone_use_the_fast_path() -> None:
    asked: list[Any] = []
    scores = sampled_logprobs._instead_of_scores(lambda *given, **named: asked.append((given, named)))
    logits, ids = torch.randn(2, 8), torch.tensor([1, 7])
    found = scores(logits, 0, ids, None, logprob_token_ids_state=None, max_per_req_token_ids=0)
    assert (found.logprob_token_ids.tolist(), found.selected_token_ranks.tolist()) == ([[1], [7]], [0, 0])
    assert not asked
    for other in ({"num_logprobs": 3}, {"max_per_req_token_ids": 2}, {"logits_mode": True}):
        scores(logits, other.pop("num_logprobs", 0), ids, None, **other)
    assert len(asked) == 3

    ranked: list[int] = []
    gather = sampled_logprobs._in_place_of(lambda logprobs, count, token_ids: ranked.append(count))
    assert gather(torch.log_softmax(logits, -1), 0, ids).logprobs.shape == (2, 1)
    gather(logits, 5, ids)
    assert ranked == [5]


def test_each_token_of_a_draft_has_its_requests_temperature_on_a_cpu() -> None:
    expand = sampled_logprobs.without_kernel(None)
    temperatures, ends = torch.tensor([0.7, -1.0, 0.3]), torch.tensor([2, 2, 5], dtype=torch.int32)
    assert expand(temperatures, ends, 5, replace_from=-1, replace_to=1).tolist() == pytest.approx([0.7] * 2 + [0.3] * 3)
    top_k = expand(torch.tensor([4, 5, 6], dtype=torch.int32), ends, 5)
    assert (top_k.tolist(), top_k.dtype) == ([4, 4, 6, 6, 6], torch.int32)
