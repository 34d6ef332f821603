"""Prefixes that are computed once for their group: the same gradients and token values, however a batch is split."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.programs.trainer.splits import gradients_of
from support.programs.trainer.training import make_model

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(400)]

ALONE = {"zero_stage": 0, "max_token_len_per_gpu": 10_000}
CASES: dict[str, dict[str, Any]] = {
    "all at once": {"zero_stage": 0, "max_token_len_per_gpu": 10_000},
    "ZeRO 2, groups in parts": {"zero_stage": 2, "max_token_len_per_gpu": 50, "gradient_checkpointing": True},
    "ZeRO 3": {"zero_stage": 3, "max_token_len_per_gpu": 64},
}
SHARED = {
    f"ZeRO {zero}, both ranks read every sequence": {"zero_stage": zero, "ulysses_sequence_parallel_size": 2}
    for zero in (0, 3)
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_is_the_same_as_with_each_sequence_alone(ranks: int, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    cases = CASES if ranks == 1 else CASES | SHARED
    alone = gradients_of(tmp_path / "alone", model, 1, {"alone": ALONE}, trees=True)["alone"]
    found = gradients_of(
        tmp_path / "shared", model, ranks, {name: case | {"shared_prompts": True} for name, case in cases.items()},
        trees=True,
    )  # fmt: skip
    for case, values in found.items():
        assert set(values) == set(alone)
        for name, expected in alone.items():
            np.testing.assert_allclose(values[name], expected, atol=1e-6, rtol=1e-4, err_msg=f"{case}: {name}")
