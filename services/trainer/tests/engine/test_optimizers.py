"""Muon and 8-bit AdamW update as torch's and bitsandbytes' optimizers do, under every sharding, over checkpoints."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.programs.trainer.optimizer_updates import SHAPES, STEPS, VALUES, Module, gradient, updates
from trinity.config.schema.algorithm import OptimizerConfig
from trinity.runtime.errors import InvalidInput
from trinity.trainer.engine.optimizers import make_optimizer

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]

MATRICES = ("wide", "tall", "stack")
Found = dict[str, np.ndarray]


def played(folder: Path, kind: str, ranks: int, zero: int, begin: Path | None = None) -> Found:
    found = updates(folder, kind, ranks, zero, begin)
    assert "refused" not in found, found
    return {name: np.array(values, np.float32) for name, values in found.items()}


def same_bits(found: Found, expected: Found) -> None:
    assert found.keys() == expected.keys() == SHAPES.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value), f"{name} differs by {np.abs(found[name] - value).max()}"


def totals() -> Iterator[dict[str, torch.Tensor]]:
    """The gradient of each step."""
    for step in range(1, STEPS + 1):
        ranks = [gradient(step, rank) for rank in range(4)]
        yield {name: sum(one[name] for one in ranks) for name in SHAPES}


def by_plain_muon() -> Found:
    """Updates by torch's own classes; each matrix of a stack is a parameter."""
    common: dict[str, Any] = {"lr": VALUES["lr"], "weight_decay": VALUES["weight_decay"]}
    held = {name: parameter.detach().clone() for name, parameter in Module().named_parameters()}
    cut = {name: list(held[name]) if held[name].dim() == 3 else [held[name]] for name in MATRICES}
    matrices = [torch.nn.Parameter(one) for parts in cut.values() for one in parts]
    others = {name: torch.nn.Parameter(one) for name, one in held.items() if name not in MATRICES}
    muon = torch.optim.Muon(matrices, momentum=VALUES["momentum"], adjust_lr_fn="match_rms_adamw", **common)
    adamw = torch.optim.AdamW(others.values(), betas=VALUES["betas"], **common)
    for total in totals():
        parts = [one for name in MATRICES for one in (total[name] if total[name].dim() == 3 else [total[name]])]
        for parameter, found in zip([*matrices, *others.values()], [*parts, *map(total.get, others)], strict=True):
            parameter.grad = found.clone()
        muon.step()
        adamw.step()
    return {name: one.flatten().numpy() for name, one in held.items()}


def by_plain_adamw(kind: Any) -> Found:
    module = Module()
    options = {name: value for name, value in VALUES.items() if name != "momentum"}
    optimizer = kind(module.parameters(), **options)
    for total in totals():
        for name, parameter in module.named_parameters():
            parameter.grad = total[name].clone()
        optimizer.step()
    return {name: parameter.detach().flatten().numpy() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize(
    ("shape", "next_shape"), [((1, 0), (2, 3)), ((1, 2), (1, 0)), ((4, 2), (1, 3)), ((2, 3), (4, 1)), ((2, 0), (2, 2))]
)
def test_muon_is_torchs_under_every_sharding_and_over_checkpoints(
    shape: tuple[int, int], next_shape: tuple[int, int], tmp_path: Path
) -> None:
    expected = by_plain_muon()
    same_bits(played(tmp_path / "whole", "muon", *shape), expected)
    same_bits(played(tmp_path / "resumed", "muon", *next_shape, tmp_path / "whole/saved"), expected)


@pytest.mark.parametrize(("ranks", "zero"), [(1, 0), (2, 0), (1, 2), (2, 1), (4, 2), (2, 3)])
def test_8_bit_moments_are_bitsandbytes_and_go_on_from_a_checkpoint(ranks: int, zero: int, tmp_path: Path) -> None:
    optimizers = pytest.importorskip("bitsandbytes.optim")
    found = played(tmp_path / "whole", "adamw_8bit", ranks, zero)
    if zero == 0:  # blocks begin with each parameter; else with a rank's part of all
        same_bits(found, by_plain_adamw(optimizers.AdamW8bit))
    exact = by_plain_adamw(torch.optim.AdamW)
    moved = {
        name: exact[name] - parameter.detach().flatten().numpy() for name, parameter in Module().named_parameters()
    }
    apart = max(float(np.abs(found[name] - exact[name]).mean() / np.abs(moved[name]).mean()) for name in exact)
    assert 1e-5 < apart < 0.02
    same_bits(played(tmp_path / "resumed", "adamw_8bit", ranks, zero, tmp_path / "whole/saved"), found)
    refused = updates(tmp_path / "other", "adamw_8bit", 3 - min(ranks, 2), zero, tmp_path / "whole/saved")["refused"]
    assert f"8-bit states of {ranks} rank(s) under zero_stage {zero}, which {3 - min(ranks, 2)} rank(s)" in refused


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    updates(tmp_path / "muon", "muon", 1, 2)
    refused = updates(tmp_path / "adamw", "adamw", 2, 2, tmp_path / "muon/saved")["refused"]
    assert "has states of muon, but optimizer_type is adamw; set it to muon" in refused


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    config = OptimizerConfig(optimizer_type="adamw_8bit")
    with pytest.raises(InvalidInput, match=r"optimizer_type: is adamw_8bit, which needs bitsandbytes; `pip install"):
        make_optimizer(Module(), config, torch.device("cpu"), offloads=False)
