"""What the YAML may say of experience operators, and what the docs say of them."""

import inspect
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.fakes.data.operators import PLACE, experience, group_of, run
from trinity.buffer.operators import OPERATORS
from trinity.buffer.operators.built_in import OPERATIONS
from trinity.buffer.operators.pipeline import Pipeline
from trinity.config import names
from trinity.config.schema.pipeline import OperatorConfig
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core

# What the YAML may say


def test_lib_config_knows_every_operator_with_its_arguments() -> None:
    found = {name: inspect.signature(kind).parameters.values() for name, kind in OPERATORS.items()}
    args = {name: {one.name: [] if one.default == () else one.default for one in ones} for name, ones in found.items()}
    assert args == names.EXPERIENCE_OPERATORS
    assert set(OPERATIONS) == set(names.SHAPING_OPERATIONS)


CHECKED = "import sys, trinity.config.names\nassert not {'torch', 'numpy', 'trinity.buffer'} & {*sys.modules}"


def test_lib_config_stays_light() -> None:
    assert subprocess.run([sys.executable, "-c", CHECKED], timeout=60, check=False).returncode == 0


SHAPE = {"stats_key": "a"}
MISSHAPEN: list[Any] = [
    SHAPE,
    ["a"],
    [{}],
    [SHAPE, {**SHAPE, "op_type": "add"}],
    [{**SHAPE, "wieght": 1}],
    [{**SHAPE, "weight": "1"}],
    [{**SHAPE, "op_type": "DIV", "weight": 0}],
]


@pytest.mark.parametrize(
    ("name", "args", "key", "said"),
    [
        ("reward_fliter", {}, "name", "is 'reward_fliter', which is not registered; known: DAPODynamic"),
        ("reward_filter", {"treshold": 1}, "args.treshold", "is 1, but reward_filter has no such argument; known: thr"),
        ("mask_response_truncated", {"x": 1}, "args.x", "no such argument; known: none"),
        ("reward_filter", {"threshold": "1e-3"}, "args.threshold", "is '1e-3', must be a number"),
        ("reward_filter", {"threshold": True}, "args.threshold", "is True, must be a number"),
        ("reward_filter", {"threshold": math.nan}, "args.threshold", "is nan, must be a number"),
        ("reward_filter", {"threshold": None}, "args.threshold", "is None, must be a number"),
        ("pass_rate_calculator", {"threshold": "x"}, "args.threshold", "is 'x', must be a number or null"),
        ("raft_filter", {"k": 0}, "args.k", "is 0, must be a whole number >= 1"),
        ("RAFT_filter", {"k": 1.5}, "args.k", "is 1.5, must be a whole number >= 1"),
        ("multi_step_padding", {"max_steps": -1}, "args.max_steps", "is -1, must be a whole number >= 0"),
        ("overlong_reward_shaping", {"penalty_factor": -1}, "args.penalty_factor", "is -1, must be a number >= 0"),
        (
            "overlong_reward_shaping",
            {"cache_length": 0},
            "args.cache_length",
            "is 0, must be a whole number >= 1 or null",
        ),
        (
            "overlong_reward_shaping",
            {"max_response_length": 5, "cache_length": 6},
            "args.cache_length",
            "is 6, more than max_response_length = 5",
        ),
        ("dapo_dynamic_sampling", {"metric_key": 1}, "args.metric_key", "is 1, must be text"),
        ("invalid_reward_filter", {"required_metrics": "a"}, "args.required_metrics", "must be a list of names of"),
        (
            "invalid_reward_filter",
            {"required_metrics": [1]},
            "args.required_metrics",
            "is [1], must be a list of names",
        ),
        *(
            (
                "reward_shaping_mapper",
                {"reward_shaping_configs": one},
                "args.reward_shaping_configs",
                "a list of {stats_key",
            )
            for one in MISSHAPEN
        ),
        ("data_juicer", {}, "args.operators", "is missing; give Data-Juicer's operators here, or config_path"),
        ("data_juicer", {"operators": ["text_length_filter"]}, "args.operators", "each one name with its arguments"),
    ],
)
def test_what_cannot_be_is_said_with_its_place(name: str, args: dict[str, Any], key: str, said: str) -> None:
    configs = [OperatorConfig(name="reward_filter"), OperatorConfig(name=name, args=args)]
    with pytest.raises(InvalidInput) as refused:
        Pipeline(configs)
    assert refused.value.field == f"{PLACE}.1.{key}"
    assert said in str(refused.value)
    (problem,) = names.experience_operator_problems(configs)
    assert str(refused.value) == str(problem)


@pytest.mark.parametrize("name", [name for name in OPERATORS if name != "data_juicer"])
def test_every_operator_runs_as_it_is_and_with_its_defaults_written_out(name: str) -> None:
    group = group_of(*(experience(i % 2, i, metrics={"accuracy": float(i % 2)}) for i in range(4)))
    plain, written = run(group, name), run(group, name, **names.EXPERIENCE_OPERATORS[name])
    assert [(d.index, d.reward, d.masked) for d in plain.drafts] == [
        (d.index, d.reward, d.masked) for d in written.drafts
    ]


def test_the_table_of_the_docs_has_every_operator_with_its_defaults() -> None:
    text = (Path(__file__).parents[3] / "docs/operators.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| `")}
    for name, args in names.EXPERIENCE_OPERATORS.items():
        row = next(line for cell, line in rows.items() if f"`{name}`" in cell)
        for argument, default in args.items():
            assert f"`{argument}: {json.dumps(default)}`" in row, (name, argument)
