"""Models of known shapes without weights, and plans of runs with them, to test choices by size."""

from types import SimpleNamespace
from typing import Any

import torch

from support.programs.trainer.training import BASE
from trinity.config import Plan, make_plan
from trinity.config.schema import Config

GIB = 2**30
QWEN = {  # hidden, layers, intermediate, vocabulary, of Qwen2.5
    "0.5B": (896, 24, 4864, 151_936),
    "1.5B": (1536, 28, 8960, 151_936),
    "7B": (3584, 28, 18944, 152_064),
}


def plan_of(trainer: dict[str, Any] | None = None, length: int = 2048) -> Plan:
    values = {**BASE, "model": {"model_path": "/models/x", "max_model_len": length, "max_prompt_tokens": 1}}
    return make_plan(Config.model_validate({**values, "trainer": trainer or {}}))


def model_of(size: str, packed: bool = True, lean: bool = True) -> Any:
    hidden, layers, inner, vocabulary = QWEN[size]
    shape = SimpleNamespace(hidden_size=hidden, num_hidden_layers=layers, intermediate_size=inner)
    count = layers * (3 * hidden * inner + 3 * hidden * hidden) + vocabulary * hidden
    weights = [torch.nn.Parameter(torch.empty(count, device="meta"))]
    config = SimpleNamespace(get_text_config=lambda: shape)
    return SimpleNamespace(
        packed=packed,
        lean=lean,
        group=None,
        parameters=lambda: weights,
        modules=lambda: (),
        model=SimpleNamespace(config=config),
    )
