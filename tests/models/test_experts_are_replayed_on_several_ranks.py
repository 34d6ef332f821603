"""Ranks that share a batch, a mixture and its optimizer replay recorded experts as one rank does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.families import Family, make_model
from models.test_recorded_experts_are_replayed import MIXTURES

from support.programs.trainer.engine_actions import act

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]

SHAPES = {"qwen3_moe": [(2, 0), (2, 2), (2, 3)]}  # ranks and ZeRO stage; of other families (2, 3)


@pytest.mark.parametrize("family", [pytest.param(one, id=one.kind) for one in MIXTURES])
def test_ranks_replay_as_one_does(family: Family, tmp_path: Path) -> None:
    model = make_model(family, tmp_path / "model", {"vocab_size": 97})
    config = model.config.get_text_config()
    sizes = [config.num_hidden_layers, config.num_experts_per_tok, 4]

    def trained(folder: str, ranks: int, zero: int, replay: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
        algorithm = {"enable_router_replay": replay, "optimizer": {"lr": 1e-4, "weight_decay": 0.0}}
        steps: list[list[Any]] = [["train", step, *sizes] if replay else ["train", step] for step in (1, 2)]
        dumps, found = act(
            tmp_path / folder, tmp_path / "model", [*steps, ["dump", "end"]],
            ranks=ranks, zero=zero, changes={"algorithm": algorithm},
        )  # fmt: skip
        return dumps["end"], found

    alone, metrics = trained("alone", 1, 2)
    _, without = trained("without", 1, 2, replay=False)
    assert metrics["train 1"]["router_replayed"] == 1
    assert "router_replayed" not in without["train 1"]
    assert without["train 2"]["grad_norm"] != pytest.approx(metrics["train 2"]["grad_norm"], rel=1e-3)
    for ranks, zero in SHAPES.get(family.kind, [(2, 3)]):
        found, same = trained(f"{ranks}-{zero}", ranks, zero)
        for step in ("train 1", "train 2"):
            for name, number in metrics[step].items():
                assert same[step][name] == pytest.approx(number, rel=1e-4, abs=1e-6), (ranks, zero, step, name)
        for name, value in alone.items():
            np.testing.assert_allclose(found[name], value, atol=2e-5, err_msg=f"{name} on {ranks} ranks, ZeRO {zero}")
