"""The same global batch, split in every way, gives the same step; N steps + kill + M steps are N + M steps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.training import make_model, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

Found = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Plain torch, the whole batch at once."""
    import torch
    from transformers import AutoModelForCausalLM

    from support.training import fixed_batch

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, weight_decay=0.0)
    norms = []
    for step in (1, 2):
        batch = fixed_batch(step)
        loss = torch.zeros(())
        tokens = sum(int(s.mask.sum()) for s in batch.sequences)
        for s in batch.sequences:
            ids = torch.tensor(s.token_ids, dtype=torch.long)[None]
            logs = torch.log_softmax(policy(ids).logits[0, :-1], -1)
            new = logs.gather(1, ids[0, 1:, None])[s.prompt_length - 1 :, 0]
            ratio = (new - torch.tensor(s.old_logprobs)).clamp(-20, 20).exp()
            term = torch.maximum(-s.advantage * ratio, -s.advantage * ratio.clamp(0.8, 1.2))
            if s.advantage < 0:
                term = torch.minimum(term, torch.tensor(-s.advantage * 3.0))
            loss = loss + (term * torch.tensor(s.mask, dtype=torch.float32)).sum() / tokens
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)))
        optimizer.step()
    return {"norms": norms, **{name: value.detach().numpy() for name, value in policy.named_parameters()}}


def assert_same(found: Found, reference: Found) -> None:
    names = set(reference) - {"norms", "metrics"}
    assert set(found) - {"metrics"} == names
    for name in names:
        # Adam divides by the gradient's size, so a rounding difference of a tiny gradient shows in full.
        np.testing.assert_allclose(found[name], reference[name], atol=2e-3, err_msg=name)
        assert np.abs(found[name] - reference[name]).mean() < 2e-5, name


@pytest.mark.parametrize(
    ("ranks", "zero", "budget"),
    [(1, 0, 10_000), (1, 3, 24), (2, 0, 64), (2, 2, 24)],
)
def test_any_split_is_the_plain_step(
    ranks: int, zero: int, budget: int, model: Path, reference: Found, tmp_path: Path
) -> None:
    found = run_ranks(tmp_path, model, ranks=ranks, zero=zero, steps=2, trainer={"max_token_len_per_gpu": budget})
    assert_same(found, reference)
    np.testing.assert_allclose([m["grad_norm"] for m in found["metrics"]], reference["norms"], rtol=1e-3)


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
