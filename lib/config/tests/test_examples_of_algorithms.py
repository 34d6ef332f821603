"""examples/algorithms has a YAML for every algorithm, from one template, and each is right."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from trinity.config import load, make_plan
from trinity.config.schema.buffer import FormatConfig
from trinity.data.datasets import reader
from trinity.plugins.declarations import ALGORITHMS

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def maker(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_examples", repository / "examples/algorithms/make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_is_one_for_every_algorithm_and_no_other(repository: Path) -> None:
    assert {path.stem for path in (repository / "examples/algorithms").glob("*.yaml")} == set(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_is_what_the_template_says_and_is_accepted(name: str, repository: Path, maker: ModuleType) -> None:
    file = repository / f"examples/algorithms/{name}.yaml"
    assert file.read_text() == maker.text(name), "run examples/generate.py"
    plan = make_plan(load(file))
    assert plan.algorithm.algorithm_type == name
    assert plan.algorithm.offline == (name in ("sft", "cpt", "dpo"))
    assert plan.groups_per_step == (maker.ROWS if plan.algorithm.offline else maker.GROUPS)


def test_the_rows_it_writes_are_those_that_the_yamls_read(tmp_path: Path, maker: ModuleType) -> None:
    row = {"question": "7+8", "answer": "7+8=15, 0+0+1=1\n#### 15"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    maker.write_data(tmp_path)
    first = {path.stem: json.loads(path.read_text().splitlines()[0]) for path in tmp_path.glob("*.jsonl")}
    pair = reader("pairs", FormatConfig(prompt_key="question"), first["pairs"])(first["pairs"], 0)
    assert json.loads(pair["messages_json"])[-1]["content"] == row["answer"]
    assert "#### 15" not in json.loads(pair["rejected_json"])[-1]["content"]
    assert reader("text", FormatConfig(), first["texts"])(first["texts"], 0)["text"].startswith("7+8\n")
    assert first["teacher"] == row
    told = [json.loads(line) for line in (tmp_path / "told.jsonl").read_text().splitlines()]
    assert told == [row, {**row, "question": "7+8\n\n7+8=15, 0+0+1=1\n#### 15"}], "as the teacher reads it"
