"""What the YAML may say of experience operators, and what the docs say of them."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.fakes.data.operators import PLACE, experience, group_of, run
from trinity.buffer.operators.pipeline import Pipeline
from trinity.config import operators
from trinity.config.operators import EXPERIENCE_OPERATORS
from trinity.config.schema.pipeline import OperatorConfig
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core

# What the YAML may say


CHECKED = "import sys, trinity.config.operators\nassert not {'torch', 'numpy', 'trinity.buffer'} & {*sys.modules}"


def test_lib_config_stays_light() -> None:
    assert subprocess.run([sys.executable, "-c", CHECKED], timeout=60, check=False).returncode == 0


SHAPE = {"stats_key": "a"}
NONE = {**SHAPE, "op_type": "DIV", "weight": 0}
CONFIGS = "reward_shaping_configs"


@pytest.mark.parametrize(
    ("name", "args", "key", "said"),
    [
        ("reward_fliter", {}, "name", "is 'reward_fliter', which is not registered; known: DAPODynamic"),
        ("reward_filter", {"treshold": 1}, "args.treshold", "unknown key; did you mean 'threshold'"),
        ("mask_response_truncated", {"x": 1}, "args.x", "unknown key"),
        ("reward_filter", {"threshold": "1e-3"}, "args.threshold", "is '1e-3', must be a number"),
        ("reward_filter", {"threshold": True}, "args.threshold", "is true, must be a number"),
        ("reward_filter", {"threshold": math.nan}, "args.threshold", "is nan, must be a finite number"),
        ("reward_filter", {"threshold": None}, "args.threshold", "is null, must be a number"),
        ("pass_rate_calculator", {"threshold": "x"}, "args.threshold", "is 'x', must be a number or null"),
        ("raft_filter", {"k": 0}, "args.k", "is 0, must be greater than or equal to 1"),
        ("RAFT_filter", {"k": 1.5}, "args.k", "is 1.5, must be a whole number"),
        ("multi_step_padding", {"max_steps": -1}, "args.max_steps", "is -1, must be greater than or equal to 0"),
        ("overlong_reward_shaping", {"penalty_factor": -1}, "args.penalty_factor", "is -1, must be greater than"),
        ("overlong_reward_shaping", {"cache_length": 0}, "args.cache_length", "is 0, must be greater than"),
        (
            "overlong_reward_shaping",
            {"max_response_length": 5, "cache_length": 6},
            "args",
            "must have a cache_length of at most max_response_length = 5",
        ),
        ("dapo_dynamic_sampling", {"metric_key": 1}, "args.metric_key", "is 1, must be text"),
        ("invalid_reward_filter", {"required_metrics": "a"}, "args.required_metrics", "must be a list of texts"),
        ("invalid_reward_filter", {"required_metrics": [1]}, "args.required_metrics.0", "is 1, must be text"),
        ("reward_shaping_mapper", {CONFIGS: SHAPE}, f"args.{CONFIGS}", "must be a list of mappings"),
        ("reward_shaping_mapper", {CONFIGS: ["a"]}, f"args.{CONFIGS}.0", "is 'a', must be a mapping"),
        ("reward_shaping_mapper", {CONFIGS: [{}]}, f"args.{CONFIGS}.0.stats_key", "is required"),
        (
            "reward_shaping_mapper",
            {CONFIGS: [SHAPE, {**SHAPE, "op_type": "add"}]},
            f"args.{CONFIGS}.1.op_type",
            "is 'add', must be one of ADD, SUB, MUL, DIV",
        ),
        ("reward_shaping_mapper", {CONFIGS: [{**SHAPE, "wieght": 1}]}, f"args.{CONFIGS}.0.wieght", "mean 'weight'"),
        ("reward_shaping_mapper", {CONFIGS: [{**SHAPE, "weight": "1"}]}, f"args.{CONFIGS}.0.weight", "is '1', must be"),
        ("reward_shaping_mapper", {CONFIGS: [NONE]}, f"args.{CONFIGS}.0", "must have no weight of 0 for DIV"),
        ("data_juicer", {}, "args", "must have operators, Data-Juicer's, or config_path"),
        ("data_juicer", {"operators": ["text_length_filter"]}, "args.operators.0", "must be a mapping"),
        ("data_juicer", {"operators": [{}]}, "args.operators.0", "must be one name with its arguments"),
    ],
)
def test_what_cannot_be_is_said_with_its_place(name: str, args: dict[str, Any], key: str, said: str) -> None:
    configs = [OperatorConfig(name="reward_filter"), OperatorConfig(name=name, args=args)]
    with pytest.raises(InvalidInput) as refused:
        Pipeline(configs)
    assert refused.value.field == f"{PLACE}.1.{key}"
    assert said in str(refused.value)
    (problem,) = operators.experience_operator_problems(configs)
    assert str(refused.value) == str(problem)


@pytest.mark.parametrize("name", [name for name in EXPERIENCE_OPERATORS if name != "data_juicer"])
def test_every_operator_runs_as_it_is_and_with_its_defaults_written_out(name: str) -> None:
    group = group_of(*(experience(i % 2, i, metrics={"accuracy": float(i % 2)}) for i in range(4)))
    plain, written = run(group, name), run(group, name, **EXPERIENCE_OPERATORS[name]().model_dump())
    assert [(d.index, d.reward, d.masked) for d in plain.drafts] == [
        (d.index, d.reward, d.masked) for d in written.drafts
    ]


def test_the_table_of_the_docs_has_every_operator_with_its_defaults() -> None:
    text = (Path(__file__).parents[3] / "docs/operators.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| `")}
    for name, kind in EXPERIENCE_OPERATORS.items():
        row = next(line for cell, line in rows.items() if f"`{name}`" in cell)
        for argument, field in kind.model_fields.items():
            default = field.get_default(call_default_factory=True)
            assert f"`{argument}: {json.dumps(default)}`" in row, (name, argument)
