"""Layers that carry a state give in packed rows what they give one sequence at a time: in float64, to 1e-9.

transformers computes parts of them in float32 in any case; here float32 means float64, in both.
"""

from pathlib import Path

import pytest
import torch
from models.families import FAMILIES, Family, make_model
from models.test_families_compute_as_transformers import by_policy, cases, gradients, plainly, sequences

from trinity.config.schema.model import ModelConfig
from trinity.runtime.errors import InvalidInput
from trinity.trainer.model.attention import check_sequence_parallel, check_shared_prompts
from trinity.trainer.model.policy import PolicyModel, load_policy
from trinity.trainer.model.recurrent import rows_of
from trinity.trainer.model.vision import freeze_all_but_text

WITH_STATE = [one for one in FAMILIES if one.kind in (
    "qwen3_next", "qwen3_5", "qwen3_5_moe", "granitemoehybrid", "kimi_linear"
)]  # fmt: skip


@pytest.fixture(autouse=True)
def only_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("float32", "float"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def policy_of(folder: Path, packed: bool) -> PolicyModel:
    policy = load_policy(ModelConfig(model_path=str(folder)), torch.float64, 64, packed=packed).eval()
    freeze_all_but_text(policy.model)
    policy.model.set_experts_implementation("eager")  # the grouped matrix products know no float64
    assert policy.packed == packed
    return policy


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("family", cases(WITH_STATE))
def test_packed_rows_are_exact(family: Family, share: bool, tmp_path: Path) -> None:
    plain = make_model(family, tmp_path).double().eval()
    plain.set_attn_implementation("eager")
    plain.set_experts_implementation("eager")
    policy = policy_of(tmp_path, packed=True)
    check_shared_prompts(policy.model, True, 200)
    batch = sequences(branched=share, longest=150)  # beyond a chunk of 64 tokens
    expected, found = plainly(plain, batch), by_policy(policy, batch, packed=True, units=[len(batch)] if share else [])
    assert found.dtype is torch.float64
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
    slopes = gradients(plain, expected)
    own = {name.removeprefix("model."): slope for name, slope in gradients(policy, found).items()}
    assert own.keys() == slopes.keys()
    for name, slope in slopes.items():
        torch.testing.assert_close(own[name], slope, atol=1e-9 * float(1 + slope.abs().max()), rtol=0)


@pytest.mark.parametrize("family", cases(WITH_STATE))
def test_ranks_that_share_sequences_are_refused(family: Family, tmp_path: Path) -> None:
    make_model(family, tmp_path)
    policy = policy_of(tmp_path, packed=False)
    with pytest.raises(InvalidInput, match="ulysses_sequence_parallel_size: is 2, and layers carry a state"):
        check_sequence_parallel(policy.model, 2)


@pytest.mark.core
def test_rows_read_each_sequence_and_keep_each_token_once() -> None:
    lengths, parents = (3, 9, 2, 1, 4), (None, None, None, 2, 3)  # the last two continue what is before them
    rows = rows_of(lengths, parents, torch.device("cpu"))
    read = [places[: int(own.nonzero().max()) + 1].tolist() for call, kept in zip(rows.places, rows.own, strict=True)
            for places, own in zip(call, kept, strict=True)]  # fmt: skip
    expected = [[0, 1, 2], list(range(3, 12)), [12, 13], [12, 13, 14], list(range(12, 19))]
    assert sorted(read) == sorted(expected)
    kept = torch.cat([places[own] for places, own in zip(rows.places, rows.own, strict=True)])
    assert kept[rows.order].tolist() == list(range(sum(lengths)))
    for places, own in zip(rows.places, rows.own, strict=True):
        assert places.shape[1] < 2 * min(int(row.nonzero().max()) + 1 for row in own), "padding at most doubles a row"
