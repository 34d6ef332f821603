"""Router replay is for models whose gates are known; others are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from trinity.config.checks.sections import check
from trinity.config.experts import Mixture, mixture_of
from trinity.config.schema import Config

pytestmark = pytest.mark.core

EXPERTS = {"num_hidden_layers": 3, "num_experts_per_tok": 2}


def model(folder: Path, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def said(path: str, on: bool = True, **changes: Any) -> list[tuple[str, str]]:
    tasks = {"taskset": {"path": "/t", "default_workflow_type": "simple_workflow"}}
    values = {
        "model": {"model_path": path},
        "algorithm": {"repeat_times": 4, "enable_router_replay": on},
        "buffer": {"batch_size": 4, "total_steps": 2, "explorer_input": tasks},
    }
    config = Config.model_validate({**values, **changes})
    return [(problem.path, problem.message) for problem in check(config, plugins_loaded=False)]


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3"])
def test_known_gates_are_taken(kind: str, tmp_path: Path) -> None:
    assert said(model(tmp_path, model_type=kind)) == []


def test_a_model_elsewhere_is_left_to_the_trainer() -> None:
    assert said("some/hub-name") == []


@pytest.mark.parametrize("kind", ["llama4_text", "qwen2"])
def test_another_family_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    ((path, message),) = said(model(tmp_path, model_type="outer", text_config={"model_type": kind}))
    assert path == "algorithm.enable_router_replay"
    assert f"a model of type {kind} is not replayed" in message
    assert said(str(tmp_path), on=False) == []


def test_it_does_not_go_with_reproducible_runs(tmp_path: Path) -> None:
    ((path, message),) = said(model(tmp_path, model_type="qwen3_moe"), reproducible=True)
    assert path == "algorithm.enable_router_replay"
    assert "prefix cache" in message


@pytest.mark.parametrize("name", ["num_experts", "n_routed_experts", "num_local_experts"])
def test_sizes_of_a_mixture(name: str, tmp_path: Path) -> None:
    assert mixture_of(model(tmp_path, **EXPERTS, **{name: 8})) == Mixture(3, 2, 8)
    assert mixture_of(model(tmp_path, text_config={**EXPERTS, name: 8})) == Mixture(3, 2, 8)
    assert mixture_of(model(tmp_path, **EXPERTS, **{name: "8"})) is None
    assert mixture_of(model(tmp_path, **EXPERTS)) is None
