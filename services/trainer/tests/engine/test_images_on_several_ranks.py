"""Batches with images have the same gradient on one rank and on two, of which one may have no image at all."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.fakes.data.vision import KINDS, make_model
from support.programs.trainer.splits import gradients_of

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(400)]

ALONE = {"zero_stage": 0, "use_remove_padding": True, "max_token_len_per_gpu": 10_000}
# One sequence a micro-batch goes to ranks in turn: the second rank gets none with images.
ONE_BY_ONE = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
CASES: dict[str, dict[str, Any]] = {
    **{f"ZeRO {zero}, one by one": {"zero_stage": zero, **ONE_BY_ONE} for zero in (2, 3)},
    "ZeRO 3, padded": {"zero_stage": 3, "max_token_len_per_gpu": 200, "use_remove_padding": False},
    "ZeRO 3, recomputed": {"zero_stage": 3, **ONE_BY_ONE, "gradient_checkpointing": True},
    **{
        f"ZeRO {zero}, both ranks read every sequence, {tokens} tokens": {
            "zero_stage": zero, "ulysses_sequence_parallel_size": 2, "max_token_len_per_gpu": tokens,
        }
        for zero, tokens in ((2, 10_000), (3, 33))
    },
}  # fmt: skip
FROZEN = {"ZeRO 3, the tower frozen": {"zero_stage": 3, **ONE_BY_ONE, "freeze_vision_tower": True}}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model", request.param)


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-6, rtol=1e-4, err_msg=name)


def test_two_ranks_have_the_gradient_of_one(model: Path, tmp_path: Path) -> None:
    alone = gradients_of(tmp_path / "one", model, 1, {"alone": ALONE}, pictures=True)["alone"]
    weights = {name for name in alone if "." in name}  # beside what was recorded of tokens
    assert all(np.abs(alone[name]).max() > 0 for name in weights if not name.endswith("k_proj.bias"))
    together = gradients_of(tmp_path / "two", model, 2, CASES | FROZEN, pictures=True)
    for case in CASES:
        same(together[case], alone)
    # Another gradient is clipped by another factor.
    (frozen,) = (together[case] for case in FROZEN)
    scale = min(1, 0.5 / frozen.pop("grad_norm")) / min(1, 0.5 / alone["grad_norm"])
    learning = {name for name in weights if ".visual." not in name}
    assert learning == {name for name in frozen if "." in name}
    same({name: frozen[name] / scale for name in learning}, {name: alone[name] for name in learning})


LORA = {"lora_rank": 3, "lora_alpha": 6, "target_modules": ".*(visual.*|_proj)"}


@pytest.mark.parametrize(
    ("changes", "learns"),
    [
        # B is 0 at the start, so that A has no gradient yet.
        ({"model": {"lora_configs": [LORA]}}, ["visual.merger", ".language_model.", "lora_B"]),
        ({"algorithm": {"algorithm_type": "ppo"}}, ["critic.head.weight"]),
    ],
    ids=["adapters", "critic"],
)
@pytest.mark.parametrize("model", KINDS[-1:], indirect=True)
def test_adapters_and_a_critic_on_two_ranks_have_the_gradient_of_one(
    changes: dict[str, Any], learns: list[str], model: Path, tmp_path: Path
) -> None:
    alone = gradients_of(tmp_path / "one", model, 1, {"alone": ALONE}, pictures=True, changes=changes)["alone"]
    assert all(any(part in name and np.abs(value).max() > 0 for name, value in alone.items()) for part in learns)
    case = "ZeRO 3, one by one"
    together = gradients_of(tmp_path / "two", model, 2, {case: CASES[case]}, pictures=True, changes=changes)
    same(together[case], alone)
