"""A YAML with load_in_4bit on a machine without bitsandbytes is refused before anything starts."""

import importlib.util
from pathlib import Path

import pytest

from trinity.cli.supervise.checks.adapters import check_lora
from trinity.config import Plan, make_plan
from trinity.config.schema import Config

pytestmark = pytest.mark.core


def plan(model: Path, mode: str) -> Plan:
    given = {"model_path": str(model), "max_model_len": 16, "lora_configs": [{"load_in_4bit": True}]}
    taskset = {"explorer_input": {"taskset": {"name": "t", "path": "d.jsonl"}}}
    return make_plan(
        Config.model_validate({"project": "p", "name": "n", "mode": mode, "model": given, "buffer": taskset})
    )


def test_the_missing_library_is_named_with_its_extra(quickstart_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if "bits" in name else found(name, *rest))
    (problem,) = check_lora(plan(quickstart_model, "both"))
    assert problem.path == "model.lora_configs.0.load_in_4bit"
    assert problem.message == "is true, which needs bitsandbytes; `pip install -e '.[bitsandbytes]'`"
    assert check_lora(plan(quickstart_model, "explore")) == []
