"""Packed sequences see only themselves: the same log-probabilities and gradients as padded ones."""

from typing import Any

import numpy as np
import pytest
import structlog
import torch

from trinity.runtime.errors import InvalidInput
from trinity.trainer.data.batch import TrainSequence
from trinity.trainer.data.microbatch import collate
from trinity.trainer.model import attention, shared_attention
from trinity.trainer.model.attention import Packing, packed_attention
from trinity.trainer.model.policy import PolicyModel, pack
from trinity.trainer.model.sequence_parallel import SequenceGroup

pytestmark = pytest.mark.core

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "one key head": {"model_type": "llama", "num_key_value_heads": 1},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "sliding window": {"model_type": "mistral", "sliding_window": 5},
    "some layers with a window": {
        "model_type": "qwen2", "sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1,
    },
    "experts": {
        "model_type": "qwen3_moe", "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}  # fmt: skip


def causal_model(shape: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    values = {**SIZES, "model_type": shape, **SHAPES[shape]}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def sequences() -> list[TrainSequence]:
    rng = np.random.default_rng(0)
    made = []
    for prompt, response in [(3, 7), (1, 1), (9, 12), (2, 0), (5, 4)]:
        tokens = rng.integers(0, 61, prompt + response).astype(np.int32)
        nothing = np.zeros(response, np.float32)
        made.append(TrainSequence(tokens, prompt, nothing, nothing == 0, group=0, temperature=0.5 + rng.random()))
    return made


def learnt(policy: PolicyModel, packed: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities and entropies, and the gradients of a mix of both."""
    logprobs, entropy = policy(collate(sequences(), 0, packed))
    weights = torch.linspace(-1, 1, logprobs.numel()).view(logprobs.shape)
    ((logprobs * weights).sum() + 0.1 * (entropy * weights).sum()).backward()
    found = {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}
    policy.zero_grad()
    return torch.stack([logprobs, entropy]).detach(), found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_and_padded_are_the_same(shape: str, checkpointing: bool) -> None:
    model = causal_model(shape).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = PolicyModel(model, 4)
    padded, padded_gradients = learnt(policy, packed=False)
    assert pack(model, None)
    packed, packed_gradients = learnt(policy, packed=True)
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-5)
    for name, gradient in padded_gradients.items():
        torch.testing.assert_close(packed_gradients[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


def test_the_log_probabilities_are_those_of_each_sequence_alone() -> None:
    model = causal_model("qwen2").eval()
    expected = []
    for s in sequences():
        ids = torch.tensor(s.token_ids, dtype=torch.long)[None]
        logs = torch.log_softmax(model(ids).logits[0, :-1] / s.temperature, -1)
        expected.append(logs.gather(1, ids[0, 1:, None])[s.prompt_length - 1 :, 0])
    assert pack(model, None)
    logprobs, _ = PolicyModel(model, 4)(collate(sequences(), 0, packed=True))
    for row, values in zip(logprobs, expected, strict=True):
        torch.testing.assert_close(row[: len(values)], values, atol=1e-5, rtol=1e-5)
        assert not row[len(values) :].any()


def test_a_packed_row_has_no_padding() -> None:
    micro = collate(sequences(), 0, packed=True)
    assert micro.input_ids.shape == (1, sum(s.length for s in sequences()))
    assert micro.position_ids.tolist() == [[i for s in sequences() for i in range(s.length)]]


def test_models_whose_attention_cannot_be_replaced_stay_padded() -> None:
    from transformers import (
        GPTJConfig,
        GPTJForCausalLM,
        MambaConfig,
        MambaForCausalLM,
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
    )

    small = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1}
    with structlog.testing.capture_logs() as said:
        assert not pack(MambaForCausalLM(MambaConfig(**small)), None)
    assert [entry["event"] for entry in said] == ["trainer.model.padded"]
    assert not pack(GPTJForCausalLM(GPTJConfig(vocab_size=61, n_embd=32, n_layer=1, n_head=2, rotary_dim=4)), None)
    mixed = Qwen3NextConfig(**SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    assert pack(Qwen3NextForCausalLM(mixed), None)
    with pytest.raises(InvalidInput, match=r"ulysses_sequence_parallel_size.*MambaForCausalLM"):
        pack(MambaForCausalLM(MambaConfig(**small)), SequenceGroup(0, 2, None))
    with pytest.raises(InvalidInput, match=r"ulysses_sequence_parallel_size: is 2, and layers carry a state"):
        pack(Qwen3NextForCausalLM(mixed), SequenceGroup(0, 2, None))


def test_what_a_model_adds_to_its_attention_is_refused() -> None:
    states = torch.zeros(1, 2, 3, 4)
    packing = Packing(torch.tensor([0, 3]), (3,))
    with pytest.raises(InvalidInput, match=r"use_remove_padding.*position_bias.*false"):
        packed_attention(torch.nn.Identity(), states, states, states, None, packing=packing, position_bias=states)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("cap", "sunk"), [(2.0, False), (None, True), (2.0, True)])
def test_capped_scores_and_sinks_are_those_of_their_formulas(cap: float | None, sunk: bool, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 9, heads, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    sinks = torch.randn(4, generator=generator, dtype=torch.float64) if sunk else None
    packing = Packing(torch.tensor([0, 4, 9]), (4, 5))
    flipped = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    found, _ = packed_attention(torch.nn.Identity(), *flipped, None, packing=packing, scaling=0.7,
                                sliding_window=window, softcap=cap, s_aux=sinks)  # fmt: skip
    for token, begin in [(0, 0), (3, 0), (4, 4), (8, 4)]:
        begin = begin if window is None else max(begin, token + 1 - window)
        for head in range(4):
            scores = k[0, begin : token + 1, head // 2] @ q[0, token, head] * 0.7
            scores = scores if cap is None else cap * torch.tanh(scores / cap)
            weights = scores.exp() / (scores.exp().sum() + (0 if sinks is None else sinks[head].exp()))
            torch.testing.assert_close(found[0, token, head], weights @ v[0, begin : token + 1, head // 2])


@pytest.mark.parametrize("window", [None, 3])
def test_the_kernel_of_gpus_gets_what_each_sequence_needs(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernel written out here: what a GPU's takes, [T, heads, width], and where sequences end."""
    heads = []

    def kernel(q, k, v, ends, longest, scaling, before):  # type: ignore[no-untyped-def]
        heads.append((q.shape[1], k.shape[1], v.shape[1]))
        assert before == (None if window is None else window - 1)
        lengths = ends.diff().tolist()
        assert longest == max(lengths)
        return shared_attention.one_by_one(q[None], k[None], v[None], tuple(lengths), scaling, 0.0, window)[0]

    monkeypatch.setattr(attention, "kernel_for", lambda *_: kernel)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 9, count, 8, generator=generator) for count in (4, 2, 2))
    packing = Packing(torch.tensor([0, 4, 9], dtype=torch.int32), (4, 5))
    found = attention._by_kernel(q, k, v, packing, None, window)
    assert heads == [(4, 2, 2)]
    torch.testing.assert_close(found, shared_attention.one_by_one(q, k, v, packing.lengths, None, 0.0, window))
