"""Prefixes that are laid out once: the same states and gradients as with each sequence alone, in float64."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import rms_norm

from trinity.data.routes import Routes
from trinity.runtime.errors import InvalidInput
from trinity.trainer.data.batch import TrainSequence
from trinity.trainer.data.microbatch import Limit, MicroBatch, MicroBatchPlanner, collate, plan_micro_batches
from trinity.trainer.data.shared_prefixes import path_to, row_of, token_count, trees_of, units_of
from trinity.trainer.model import shared_attention
from trinity.trainer.model.attention import check_shared_prompts
from trinity.trainer.model.policy import PolicyModel, pack
from trinity.trainer.model.shared_attention import Ends, Kernel, one_by_one
from trinity.trainer.model.varlen import flash_attention_4
from trinity.trainer.process.ranks import Ranks

pytestmark = pytest.mark.core

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
# A tree: the length of a piece of tokens, and the trees that continue it. Sequences end where nothing continues.
Tree = tuple[int, list[Any]]
PIECES = st.integers(1, 24)
TREES: st.SearchStrategy[list[Tree]] = st.lists(
    st.recursive(
        st.tuples(PIECES, st.just([])),
        lambda inner: st.tuples(PIECES, st.lists(inner, max_size=4)),
        max_leaves=12,
    ),
    min_size=1,
    max_size=3,
)
DEEP: Tree = (20, [(9, []), (15, [(6, []), (6, []), (12, [(7, []), (9, [])])]), (10, [(4, []), (3, [])])])


def prompt_with(length: int, responses: list[int]) -> Tree:
    return length, [(response, []) for response in responses]


def of_trees(trees: list[Tree], seed: int = 0, more: bool = False) -> list[TrainSequence]:
    """In random order. A prompt ends anywhere. more: some begin others, some are there twice, at two temperatures."""
    rng = np.random.default_rng(seed)
    made: list[TrainSequence] = []

    def add(tree: Tree, before: np.ndarray, group: int) -> None:
        tokens = np.concatenate([before, rng.integers(0, 61, tree[0])]).astype(np.int32)
        for inner in tree[1]:
            add(inner, tokens, group)
        if not tree[1] or (more and rng.random() < 0.2):
            prompt = int(rng.integers(1, len(tokens) + 1))
            nothing = np.zeros(len(tokens) - prompt, np.float32)
            temperature = float(rng.choice([1.0, 0.5])) if more else 1.0
            one = TrainSequence(tokens, prompt, nothing, nothing == 0, group=group, temperature=temperature)
            made.extend([one] * (1 + (more and rng.random() < 0.1)))

    for group, tree in enumerate(trees):
        add(tree, np.zeros(0, np.int32), group)
    return [made[index] for index in rng.permutation(len(made))]


def shared(sequences: list[TrainSequence]) -> MicroBatch:
    return collate(sequences, 0, packed=True, units=[len(sequences)])


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
    """States that predict [B, R, H], and the gradients of a sum with a different weight for each value."""
    micro, states = policy.hidden(micro)
    states = micro.spread(states)
    weights = torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view(states.shape)
    body = [parameter for name, parameter in policy.named_parameters() if "lm_head" not in name]
    return [states.detach(), *torch.autograd.grad((states * weights).sum(), body)]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        largest = float(other.detach().abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-9 * max(largest, 1e-6))


@settings(deadline=None, max_examples=30)
@given(trees=TREES, seed=st.integers(0, 99))
def test_states_and_gradients_are_those_of_each_sequence_alone(
    policy: PolicyModel, trees: list[Tree], seed: int
) -> None:
    sequences = of_trees(trees, seed, more=True)
    micro, alone = shared(sequences), collate(sequences, 0, packed=True)
    for name in ("targets", "token_temperatures"):
        assert torch.equal(micro.spread(getattr(micro, name)), alone.spread(getattr(alone, name)))
    assert_equal(learnt(policy, micro), learnt(policy, alone))


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_deep_tree_is_exact_and_its_parts_predict_the_same(policy: PolicyModel, parts: int) -> None:
    sequences = of_trees([DEEP])
    micro, alone = shared(sequences), collate(sequences, 0, packed=True)
    assert micro.shared is not None
    assert len(micro.shared.levels) == 3
    assert micro.distinct is not None
    assert len(micro.targets) < len(micro.flat_indices) == len(alone.targets)
    assert_equal(learnt(policy, micro), learnt(policy, alone))
    found = sum(part.spread(part.targets) for part in (micro.part(index, parts) for index in range(parts)))
    assert torch.equal(found, alone.spread(alone.targets))


def test_a_prefix_is_read_once() -> None:
    sequences = of_trees([prompt_with(20, [3, 4, 5]), prompt_with(7, [4])], seed=1)
    micro = shared(sequences)
    assert micro.shared is not None
    assert micro.input_ids.shape == (1, 20 + 3 + 4 + 5 + 7 + 4)
    assert sorted(micro.lengths) == [3, 4, 5, 11, 20]
    assert micro.boundaries.diff().tolist() == list(micro.lengths)
    (level,) = micro.shared.levels
    assert level.reader_ends.tolist() == [0, 12]
    assert level.read_ends.tolist() == [0, 20]
    assert isinstance(level.readers, slice)
    ids, positions = micro.input_ids[0], micro.position_ids[0]
    for first, end in pairwise(micro.boundaries.tolist()):
        begins_at = int(positions[first])
        assert positions[first:end].tolist() == list(range(begins_at, begins_at + end - first))
    assert {tuple(ids[level.read].tolist())} == {tuple(s.token_ids[:20].tolist()) for s in sequences if s.length > 20}


def test_turns_that_begin_with_earlier_turns_are_one_segment() -> None:
    (whole,), five = of_trees([(60, [])]), np.zeros(5, np.float32)
    turns = [TrainSequence(whole.token_ids[:end], end - 5, five, five == 0, group=0) for end in (20, 40, 60)]
    micro = shared(turns)
    assert micro.lengths == (60,)
    assert micro.shared is None
    assert micro.predicting.tolist() == [*range(14, 19), *range(34, 39), *range(54, 59)]


def test_an_episode_of_very_many_turns_is_laid_out() -> None:
    """A template that changes former turns: each turn shares only the turns before it."""
    begun, turns, zeros = np.zeros(10, np.int32), [], np.zeros(30, np.float32)
    for turn in range(600):
        tokens = np.concatenate([begun, np.full(30, 5000 + turn, np.int32)])
        turns.append(TrainSequence(tokens, len(begun), zeros, zeros == 0, group=0))
        begun = np.concatenate([begun, np.full(10, 100 + turn, np.int32)])
    trees = trees_of(turns)
    assert sorted(member for tree in trees for member in tree.members) == list(range(600))
    assert any(len(tree.members) > 10 for tree in trees), "the last turns share most of the episode"
    assert sum(row_of(turns, [600]).lengths) == sum(tree.root.tokens for tree in trees)


@pytest.mark.parametrize(
    ("prefix", "rest", "shares"), [(7, 9, False), (8, 9, True), (9, 200, False), (60, 200, True), (300, 2999, False)]
)
def test_prefixes_are_shared_where_that_saves_a_tenth(prefix: int, rest: int, shares: bool) -> None:
    sequences, limit = of_trees([prompt_with(prefix, [rest, rest])], 1), Limit(10_000, packed=True, share_prefixes=True)
    planner = MicroBatchPlanner(limit, 0, Ranks(0, 1, 0, ""), 1, torch.device("cpu"))
    ((indices, micro),) = planner.micro_batches(sequences)
    assert sorted(indices) == [0, 1]
    assert micro.input_ids.numel() == prefix * (1 if shares else 2) + 2 * rest
    assert (micro.shared is not None) == shares


def test_a_long_prefix_of_many_groups_does_not_hide_the_prompts() -> None:
    """A short text before all prompts is not worth a level, the prompts are."""
    sequences = of_trees([(12, [prompt_with(100, [200] * 3), prompt_with(100, [200] * 4)])], 2)
    assert sorted(len(tree.members) for tree in trees_of(sequences)) == [3, 4]


def test_recorded_experts_are_shared_within_prompts() -> None:
    sequences = [replace(s, prompt_length=20) for s in of_trees([(40, [(20, []), (20, [])])], 1)]
    assert token_count(sequences) == 80
    routes = Routes.of(np.zeros((59, 1, 1), np.uint8))
    assert token_count([replace(s, routes=routes) for s in sequences]) == 100


@settings(deadline=None)
@given(trees=TREES, ranks=st.integers(1, 4), tokens=st.integers(8, 200))
def test_every_sequence_is_planned_once_within_the_limit(trees: list[Tree], ranks: int, tokens: int) -> None:
    sequences = of_trees(trees, more=True)
    units = list(units_of(sequences, tokens, ranks))
    assert sorted(index for unit, _ in units for index in unit) == list(range(len(sequences)))
    for unit, size in units:
        assert size == token_count([sequences[index] for index in unit])
        assert len(unit) == 1 or size <= tokens
    limit = Limit(tokens, packed=True, share_prefixes=True)
    plans = plan_micro_batches([size for _, size in units], ranks, limit)
    for batch in (batch for of_rank in plans for batch in of_rank):
        members = [sequences[index] for unit in batch for index in units[unit][0]]
        micro = collate(members, 0, packed=True, units=[len(units[unit][0]) for unit in batch])
        assert micro.input_ids.numel() == (sum(units[unit][1] for unit in batch) or 2)


@pytest.mark.parametrize(("tokens", "ranks", "parts"), [(10_000, 1, [8]), (10_000, 4, [2] * 4), (130, 1, [2, 3, 3])])
def test_a_prompt_is_read_again_only_where_it_must_be(tokens: int, ranks: int, parts: list[int]) -> None:
    sequences = of_trees([prompt_with(100, [10] * 8)], seed=5)
    assert len(sequences) == 8
    assert sorted(len(unit) for unit, _ in units_of(sequences, tokens, ranks)) == parts


def test_a_tree_is_divided_between_its_branches() -> None:
    branch = (30, [(20, []), (20, []), (20, [])])
    sequences = [s for s in of_trees([(40, [branch, branch])], seed=3) if s.length == 90]
    units = list(units_of(sequences, 160, 1))
    assert [size for _, size in units] == [40 + 30 + 60] * 2


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
@example(trees=[DEEP, DEEP], seed=0)
def test_calls_of_a_kernel_are_joined_exactly(trees: list[Tree], seed: int) -> None:
    micro = shared(of_trees(trees, seed, more=True))
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
    plain = one_by_one(q[None], k[None], v[None], micro.lengths, 0.3, 0.0, None, micro.shared.parents)[0]
    found = [joined, *torch.autograd.grad(joined, (q, k, v), weights)]
    assert_equal(found, [plain, *torch.autograd.grad(plain, (q, k, v), weights)])


@pytest.mark.parametrize("window", [None, 5, 30, 200])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_windows_caps_and_sinks_see_the_whole_path(window: int | None, cap: float | None, with_sinks: bool) -> None:
    micro = shared(of_trees([DEEP, (11, [])]))
    assert micro.shared is not None
    total, sinks = micro.input_ids.numel(), torch.tensor([0.3, -0.2]) if with_sinks else None
    q, k, v = (torch.randn(1, total, 2, 8, dtype=torch.float64) for _ in range(3))
    found = one_by_one(q, k, v, micro.lengths, None, 0.0, window, micro.shared.parents, cap, sinks)
    parts = torch.arange(total).split(list(micro.lengths))
    for segment, own in enumerate(parts):
        path = torch.cat([parts[one] for one in path_to(segment, micro.shared.parents)])
        of_path = q[:, path], k[:, path], v[:, path]
        alone = one_by_one(*of_path, (len(path),), None, 0.0, window, None, cap, sinks)
        torch.testing.assert_close(found[:, own], alone[:, -len(own) :], atol=1e-12, rtol=0)


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
    micro = shared(of_trees([prompt_with(9, [4, 5])], 1))
    assert micro.shared is not None
    q = torch.randn(micro.input_ids.numel(), 2, 16)
    plain = one_by_one(q[None], q[None], q[None], micro.lengths, None, 0.0, None, micro.shared.parents)
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
    reads_images = SimpleNamespace(config=SimpleNamespace(get_text_config=dict), reads_images=True)
    with pytest.raises(InvalidInput, match=r"shared_prompts.*the model reads images"):
        check_shared_prompts(reads_images, True, 5)
