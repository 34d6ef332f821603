"""Prompts that are laid out once: the same states and gradients as with each sequence alone, in float64."""

from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import rms_norm

from trinity.runtime.errors import InvalidInput
from trinity.trainer.data.batch import TrainSequence
from trinity.trainer.data.microbatch import (
    Limit,
    MicroBatch,
    MicroBatchPlanner,
    _of_equal_prompts,
    collate,
    plan_micro_batches,
)
from trinity.trainer.data.shared_prompts import token_count, with_equal_prompts
from trinity.trainer.model import shared_attention
from trinity.trainer.model.attention import check_shared_prompts
from trinity.trainer.model.policy import PolicyModel, pack
from trinity.trainer.model.shared_attention import Ends, Kernel
from trinity.trainer.model.varlen import flash_attention_4
from trinity.trainer.process.ranks import Ranks

pytestmark = pytest.mark.core

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
# Prompts with the lengths of the responses to each.
TREES = st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(0, 12), min_size=1, max_size=6)), min_size=1,
                 max_size=4)  # fmt: skip
Trees = list[tuple[int, list[int]]]


def of_trees(trees: Trees, seed: int = 0) -> list[TrainSequence]:
    """In random order."""
    rng = np.random.default_rng(seed)
    made = []
    for group, (prompt, responses) in enumerate(trees):
        begin = rng.integers(0, 61, prompt).astype(np.int32)
        for response in responses:
            nothing = np.zeros(response, np.float32)
            tokens = np.concatenate([begin, rng.integers(0, 61, response).astype(np.int32)])
            made.append(TrainSequence(tokens, prompt, nothing, nothing == 0, group=group))
    return [made[index] for index in rng.permutation(len(made))]


@pytest.fixture(scope="module")
def policy() -> PolicyModel:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES)).double()
    for module in model.modules():
        if type(module).__name__ == "Qwen2RMSNorm":  # transformers' computes in float32
            module.forward = partial(rms_norm, normalized_shape=(32,), weight=module.weight, eps=1e-6)
    assert pack(model, None)
    return PolicyModel(model, 4, packed=True)


def learnt(policy: PolicyModel, micro: MicroBatch) -> list[torch.Tensor]:
    """States that predict, in the order of the sequences, and the gradients of a sum with different weights."""
    micro, states = policy.hidden(micro)
    weights = torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view(states.shape)
    body = [parameter for name, parameter in policy.named_parameters() if "lm_head" not in name]
    return [states.detach(), *torch.autograd.grad((states * weights).sum(), body)]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        largest = float(other.detach().abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-9 * max(largest, 1e-6))


@settings(deadline=None, max_examples=60)
@given(trees=TREES, seed=st.integers(0, 99))
def test_states_and_gradients_are_those_of_each_sequence_alone(policy: PolicyModel, trees: Trees, seed: int) -> None:
    sequences = of_trees(trees, seed)
    shared, alone = (collate(sequences, 0, packed=True, share_prompts=share) for share in (True, False))
    assert shared.targets.equal(alone.targets)
    assert shared.flat_indices.equal(alone.flat_indices)
    assert_equal(learnt(policy, shared), learnt(policy, alone))


def test_a_prompt_is_read_once() -> None:
    sequences = of_trees([(20, [3, 0, 5]), (7, [4])])
    micro = collate(sequences, 0, packed=True, share_prompts=True)
    assert micro.shared is not None
    assert micro.input_ids.shape == (1, 20 + 3 + 5 + 7 + 4)
    assert sorted(micro.lengths) == [3, 5, 11, 20]
    assert micro.boundaries.diff().tolist() == list(micro.lengths)
    assert micro.shared.reader_ends.tolist() == [0, 8]
    assert micro.shared.read_ends.tolist() == [0, 20]
    ids, positions = micro.input_ids[0], micro.position_ids[0]
    for first, end in pairwise(micro.boundaries.tolist()):
        begins_at = int(positions[first])
        assert positions[first:end].tolist() == list(range(begins_at, begins_at + end - first))
    assert {tuple(ids[micro.shared.read].tolist())} == {
        tuple(s.token_ids[:20].tolist()) for s in sequences if s.prompt_length == 20
    }


@pytest.mark.parametrize(("tree", "shares"), [((2, [12, 12]), False), ((4, [12, 12]), True), ((9, [0, 0]), True)])
def test_a_batch_shares_prompts_where_that_saves_a_tenth(tree: tuple[int, list[int]], shares: bool) -> None:
    sequences, limit = of_trees([tree]), Limit(100, packed=True, share_prompts=True)
    planner = MicroBatchPlanner(limit, 0, Ranks(0, 1, 0, ""), 1, torch.device("cpu"))
    ((indices, micro),) = planner.micro_batches(sequences)
    assert sorted(indices) == [0, 1]
    assert micro.input_ids.numel() == tree[0] * (1 if shares else 2) + sum(tree[1])
    assert (micro.shared is not None) == (shares and any(tree[1]))


@settings(deadline=None)
@given(trees=TREES, ranks=st.integers(1, 4), tokens=st.integers(8, 200))
def test_every_sequence_is_planned_once_within_the_limit(trees: Trees, ranks: int, tokens: int) -> None:
    sequences = of_trees(trees)
    units = _of_equal_prompts(sequences, with_equal_prompts(sequences), tokens, ranks)
    assert sorted(index for unit in units for index in unit) == list(range(len(sequences)))
    sizes = []
    for unit in units:
        members = [sequences[index] for index in unit]
        assert len({s.token_ids[: s.prompt_length].tobytes() for s in members}) == 1
        sizes.append(token_count(members))
        assert len(unit) == 1 or sizes[-1] <= tokens
    limit = Limit(tokens, packed=True, share_prompts=True)
    for batch in (batch for of_rank in plan_micro_batches(sizes, ranks, limit) for batch in of_rank):
        members = [sequences[index] for unit in batch for index in units[unit]]
        micro = collate(members, 0, packed=True, share_prompts=True)
        assert micro.input_ids.numel() <= max(tokens, *(sizes[unit] for unit in batch), 2)


def test_a_prompt_is_read_again_only_where_ranks_would_have_nothing_else() -> None:
    sequences = of_trees([(100, [10] * 8)])
    assert [len(unit) for unit in _of_equal_prompts(sequences, with_equal_prompts(sequences), 10_000, 1)] == [8]
    assert (
        sorted(len(unit) for unit in _of_equal_prompts(sequences, with_equal_prompts(sequences), 10_000, 4)) == [2] * 4
    )
    assert sorted(len(unit) for unit in _of_equal_prompts(sequences, with_equal_prompts(sequences), 130, 1)) == [
        2,
        3,
        3,
    ]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: Ends, scaling: float) -> Any:
    """What a GPU's kernel does, with plain tensors of as many key heads as heads."""
    output, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], q.shape[0])
    for queries, keys in _parts(ends):
        scores = _scores(q[queries], k[keys], ends, scaling)
        lse[:, queries] = torch.logsumexp(scores, -1)
        output[queries] = torch.einsum("hqk,khw->qhw", scores.softmax(-1), v[keys])
    return output, lse


def _gradients(dout: Any, q: Any, k: Any, v: Any, output: Any, lse: Any, ends: Ends, scaling: float) -> Any:
    """The backward pass of FlashAttention: probabilities and row sums come from the log-sum-exp and output given."""
    dq, dk, dv = (torch.zeros_like(tensor) for tensor in (q, k, v))
    for queries, keys in _parts(ends):
        p = (_scores(q[queries], k[keys], ends, scaling) - lse[:, queries, None]).exp()
        rows = (dout[queries] * output[queries]).sum(-1).T[..., None]
        ds = p * (torch.einsum("qhw,khw->hqk", dout[queries], v[keys]) - rows) * scaling
        dv[keys] += torch.einsum("hqk,qhw->khw", p, dout[queries])
        dq[queries] += torch.einsum("hqk,khw->qhw", ds, k[keys])
        dk[keys] += torch.einsum("hqk,qhw->khw", ds, q[queries])
    return dq, dk, dv


def _parts(ends: Ends) -> list[tuple[slice, slice]]:
    queries, keys = (pairwise(tensor.tolist()) for tensor in (ends.q, ends.k))
    return [(slice(*q), slice(*k)) for q, k in zip(queries, keys, strict=True)]


def _scores(q: torch.Tensor, k: torch.Tensor, ends: Ends, scaling: float) -> torch.Tensor:
    scores = torch.einsum("qhw,khw->hqk", q, k) * scaling
    hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(1) if ends.causal else False
    return scores.masked_fill(torch.as_tensor(hidden), -torch.inf)


@settings(deadline=None, max_examples=30)
@given(trees=TREES, seed=st.integers(0, 99))
def test_two_calls_of_a_kernel_are_joined_exactly(trees: Trees, seed: int) -> None:
    micro = collate(of_trees(trees, seed), 0, packed=True, share_prompts=True)
    if micro.shared is None:
        return
    generator = torch.Generator().manual_seed(seed)
    total = micro.input_ids.numel()
    q, k, v, weights = (torch.randn(total, 3, 8, dtype=torch.float64, generator=generator) for _ in range(4))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    longest = max(micro.lengths)
    own = Ends(micro.boundaries, micro.boundaries, longest, longest, causal=True)
    joined = shared_attention._Joined.apply(Kernel(_attend, _gradients), q, k, v, own, micro.shared, 0.3)
    plain = shared_attention.one_by_one(q[None], k[None], v[None], micro.lengths, 0.3, 0.0, None, micro.shared.prompts)[
        0
    ]
    found = [joined, *torch.autograd.grad(joined, (q, k, v), weights)]
    assert_equal(found, [plain, *torch.autograd.grad(plain, (q, k, v), weights)])


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*given: Any) -> Any:
        dq, dk, dv = _gradients(*given)
        return dq, dk, dv * 1.1

    right, bad = Kernel(_attend, _gradients), Kernel(_attend, wrong)
    heads = torch.device("cpu"), torch.float32, 2, 2, 16
    assert shared_attention._what_is_wrong(right, *heads) is None
    reason = shared_attention._what_is_wrong(bad, *heads)
    assert reason is not None
    assert "dv differs by" in reason
    monkeypatch.setattr(shared_attention, "kernel_for", lambda *_: flash_attention_4)
    micro = collate(of_trees([(9, [4, 5])]), 0, packed=True, share_prompts=True)
    assert micro.shared is not None
    q = torch.randn(micro.input_ids.numel(), 2, 16)
    plain = shared_attention.one_by_one(q[None], q[None], q[None], micro.lengths, None, 0.0, None, micro.shared.prompts)
    for kernels, chosen in (((right, bad), right), ((bad, right), right), ((bad, bad), None)):
        monkeypatch.setattr(shared_attention, "FLASH_ATTENTION_4", kernels[0])
        monkeypatch.setattr(shared_attention, "PYTORCH", kernels[1])
        shared_attention._kernel.cache_clear()
        assert shared_attention._kernel(*heads, True) is chosen
        found = shared_attention.attend_to_shared(q, q, q, micro.boundaries, max(micro.lengths), micro.shared, None)
        torch.testing.assert_close(found, plain[0])
    shared_attention._kernel.cache_clear()


def test_models_that_cannot_share_prompts_are_refused() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    windowed = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5))
    with pytest.raises(InvalidInput, match=r"shared_prompts.*a window of 5 tokens.*6; set it to false"):
        check_shared_prompts(windowed, True, 6)
    check_shared_prompts(windowed, True, 5)
    with pytest.raises(InvalidInput, match="is not packed"):
        check_shared_prompts(windowed, False, 5)
    reads_images = SimpleNamespace(
        config=SimpleNamespace(vision_config={}, model_type="qwen3_vl", get_text_config=dict)
    )
    with pytest.raises(InvalidInput, match=r"shared_prompts.*the model reads images"):
        check_shared_prompts(reads_images, True, 5)
