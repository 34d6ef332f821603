"""The same global batch, split in every way, has the same gradient and says the same of its tokens;
N steps + kill + M steps are N + M steps.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.programs.trainer.splits import gradients_of
from support.programs.trainer.training import make_model, run_ranks

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(400)]

Found = dict[str, Any]

ROWS = {"1 x 16": 16, "4 x 4": 4, "16 x 1": 1}
CASES = (
    {
        f"ZeRO {zero}, {split}, {'packed' if packed else 'padded'}": {
            "zero_stage": zero,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": rows,
            "use_remove_padding": packed,
        }
        for zero in (0, 2, 3)
        for split, rows in ROWS.items()
        for packed in (True, False)
        if packed or rows == 4
    }
    | {
        f"ZeRO {zero}, {tokens} tokens, {'packed' if packed else 'padded'}": {
            "zero_stage": zero,
            "max_token_len_per_gpu": tokens,
            "use_remove_padding": packed,
        }
        for zero, tokens, packed in [(0, 10_000, True), (1, 64, True), (2, 40, False)]
    }
    | {
        "ZeRO 2, 40 tokens, checkpointing": {
            "zero_stage": 2,
            "max_token_len_per_gpu": 40,
            "gradient_checkpointing": True,
        }
    }
)
SHARED = {
    f"ZeRO {zero}, both ranks read every sequence": {"zero_stage": zero, "ulysses_sequence_parallel_size": 2}
    for zero in (0, 3)
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model: Path) -> Found:
    """Gradients of plain torch, the whole batch at once, clipped at a norm of 0.5; and values of its tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    from support.programs.trainer.training import fixed_batch

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    batch = fixed_batch(1)
    loss = torch.zeros(())
    tokens = sum(int(s.mask.sum()) for s in batch.sequences)
    values: dict[str, list[np.ndarray]] = {"logprobs": [], "entropy": [], "clipped": []}
    for s in batch.sequences:
        ids = torch.tensor(s.token_ids, dtype=torch.long)[None]
        logs = torch.log_softmax(policy(ids).logits[0, :-1], -1)
        new = logs.gather(1, ids[0, 1:, None])[s.prompt_length - 1 :, 0]
        ratio = (new - torch.tensor(s.old_logprobs)).clamp(-20, 20).exp()
        term = torch.maximum(-s.advantage * ratio, -s.advantage * ratio.clamp(0.8, 1.2))
        above, below = (ratio > 1.2).numpy(), (ratio < 0.8).numpy()
        clipped = above & (s.advantage > 0) | below & (s.advantage < 0)
        if s.advantage < 0:
            term = torch.minimum(term, torch.tensor(-s.advantage * 3.0))
            clipped |= (ratio > 3.0).numpy()
        values["logprobs"].append(new.detach().numpy())
        values["entropy"].append(-(logs.exp() * logs).sum(-1)[s.prompt_length - 1 :].detach().numpy())
        values["clipped"].append((clipped & s.mask).astype(np.float32))
        loss = loss + (term * torch.tensor(s.mask, dtype=torch.float32)).sum() / tokens
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5))
    gradients = {name: value.grad.numpy() for name, value in policy.named_parameters() if value.grad is not None}
    found = {name: np.concatenate(parts) for name, parts in values.items()}
    assert 0 < found["clipped"].sum() < len(found["clipped"])
    return {"grad_norm": norm, **gradients, **found}


@pytest.fixture(scope="module")
def on_one_rank(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    return gradients_of(tmp_path_factory.mktemp("one"), model, 1, CASES)


@pytest.fixture(scope="module")
def on_two_ranks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    return gradients_of(tmp_path_factory.mktemp("two"), model, 2, CASES | SHARED)


def assert_same(found: Found, reference: Found) -> None:
    assert set(found) == set(reference)
    for name, expected in reference.items():
        np.testing.assert_allclose(found[name], expected, atol=1e-6, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_one_rank_has_the_plain_gradient(case: str, on_one_rank: dict[str, Found], reference: Found) -> None:
    assert_same(on_one_rank[case], reference)


def test_one_head_of_keys_serves_two_ranks(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", key_heads=1)
    split = {"zero_stage": 2, "max_token_len_per_gpu": 41}
    alone = gradients_of(tmp_path / "one", model, 1, {"alone": split})
    shared = gradients_of(tmp_path / "two", model, 2, {"shared": {**split, "ulysses_sequence_parallel_size": 2}})
    assert_same(shared["shared"], alone["alone"])


@pytest.mark.parametrize("case", CASES | SHARED)
def test_two_ranks_have_the_plain_gradient(case: str, on_two_ranks: dict[str, Found], reference: Found) -> None:
    assert_same(on_two_ranks[case], reference)


def test_killed_and_resumed_is_bitwise_the_same_on_one_rank(model: Path, tmp_path: Path) -> None:
    through = run_ranks(tmp_path / "a", model, ranks=1, zero=2, steps=4)
    run_ranks(tmp_path / "b", model, ranks=1, zero=2, steps=4, save_at=2, die_after=3)
    resumed = run_ranks(tmp_path / "c", model, ranks=1, zero=2, steps=4, load=str(tmp_path / "b/saved"))
    for name in set(through) - {"metrics"}:
        assert np.array_equal(through[name], resumed[name]), name
    assert through["metrics"][2:] == resumed["metrics"]


def test_sharded_states_come_back_on_two_ranks(model: Path, tmp_path: Path) -> None:
    through = run_ranks(tmp_path / "a", model, ranks=2, zero=3, steps=3, save_at=2)
    resumed = run_ranks(tmp_path / "b", model, ranks=2, zero=3, steps=3, load=str(tmp_path / "a/saved"))
    for name in set(through) - {"metrics"}:
        np.testing.assert_allclose(through[name], resumed[name], atol=1e-6, err_msg=name)


def test_equal_rewards_change_nothing_and_make_no_nan(model: Path, tmp_path: Path) -> None:
    once = run_ranks(tmp_path / "a", model, ranks=1, zero=0, steps=1, rewards="equal")
    none = run_ranks(tmp_path / "b", model, ranks=1, zero=0, steps=0)
    for name in set(none) - {"metrics"}:
        assert np.array_equal(once[name], none[name]), name
    assert all(np.isfinite(value) for value in once["metrics"][0].values())
