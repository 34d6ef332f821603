"""`trinity serve --adapter NAME=FOLDER`: what is taken, and what is refused before an engine starts."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trinity.cli.supervise.checks.adapters import served_adapters
from trinity.config import Plan, make_plan
from trinity.config.schema import Config
from trinity.modes.serve import _unmerged
from trinity.reading.errors import RunError

pytestmark = pytest.mark.core


def plan(model: Path, **of_model: object) -> Plan:
    given = {"model_path": str(model), "max_prompt_tokens": 8, "max_response_tokens": 8, **of_model}
    return make_plan(Config.model_validate({"project": "p", "name": "sums", "mode": "serve", "model": given}))


def adapters(folder: Path, rank: int = 4, columns: int = 128) -> Path:
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    made = {name.format("A"): torch.zeros(rank, columns), name.format("B"): torch.zeros(128, rank)}
    save_file(made, folder / "adapter_model.safetensors")
    return folder


def test_folders_are_named(quickstart_model: Path, tmp_path: Path) -> None:
    one, two = adapters(tmp_path / "one"), adapters(tmp_path / "a=b", rank=300)
    assert served_adapters([f"mine={one}", f"other={two}"], plan(quickstart_model)) == {"mine": one, "other": two}
    assert served_adapters([], plan(tmp_path / "nothing")) == {}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("{good}", "give NAME=FOLDER"),
        ("={good}", "give NAME=FOLDER"),
        ("mine=", "give NAME=FOLDER"),
        ("sums={good}", "'sums' names another model of this endpoint"),
        ("first={good}", "'first' names another model of this endpoint"),
        ("mine={good}/nothing", "adapter_config.json: cannot be read"),
        ("mine={narrow}", r"has .*q_proj.lora_A.weight \[4, 64\]; rank 4 .* needs it \[4, 128\]"),
        ("mine={large}", "rank 600, and vLLM computes unmerged ones up to 512; merge them"),
    ],
)
def test_what_an_engine_could_not_hold_is_refused(
    entry: str, words: str, quickstart_model: Path, tmp_path: Path
) -> None:
    good = adapters(tmp_path / "good")
    given = entry.format(
        good=good, narrow=adapters(tmp_path / "narrow", columns=64), large=adapters(tmp_path / "large", rank=600)
    )
    with pytest.raises(RunError, match=f"--adapter .*{words}"):
        served_adapters([f"first={good}", given], plan(quickstart_model))


def test_a_live_runs_adapters_are_held_beside_the_others(quickstart_model: Path) -> None:
    unmerged = _unmerged(plan(quickstart_model, lora_configs=[{"lora_rank": 8}]))
    assert unmerged.config.model.lora is not None and not unmerged.config.model.lora.merged
    with pytest.raises(RunError, match="the live run trains the whole model"):
        _unmerged(plan(quickstart_model))
