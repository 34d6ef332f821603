"""What a task pipeline may not say, Data-Juicer's operators in it, and what others rely on."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.fakes.data.task_pipeline import KEY, ROWS, checked, config_of, go, problems, write
from trinity.task_pipeline import (
    operator_args,
)
from trinity.task_pipeline import output as outputs
from trinity.task_pipeline import run as pipeline_run
from trinity.task_pipeline.names import OPERATORS, SCORE_OPERATORS

pytestmark = pytest.mark.core

# Checks


@pytest.mark.parametrize(
    ("operator", "place", "said"),
    [
        ({"name": "text_lenght_filter"}, "name", "did you mean 'text_length_filter' or "),
        ({"name": "text_length_filter", "args": {"min_length": 3}}, "args.min_length", "unknown key; did you mean"),
        ({"name": "text_length_filter", "args": {"min_len": -1}}, "args.min_len", "is -1, must be greater"),
        ({"name": "text_length_filter", "args": {"min_len": "few"}}, "args.min_len", "is 'few', must be a whole"),
        ({"name": "text_length_filter", "args": {"min_len": True}}, "args.min_len", "is true, must be a whole number"),
        ({"name": "text_length_filter", "args": {"fields": "q"}}, "args.fields", "is 'q', must be a list"),
        ({"name": "field_filter"}, "args.column", "is required"),
        ({"name": "field_filter", "args": {"column": "c"}}, "args", "value is missing; '==' compares with it"),
        ({"name": "field_filter", "args": {"column": "c", "op": "in", "value": 3}}, "args", "in takes a list"),
        ({"name": "field_filter", "args": {"column": "c", "op": "is"}}, "args.op", "is 'is', must be one of =="),
        ({"name": "field_filter", "args": {"column": "c", "op": "exists", "value": 0}}, "args", "takes true or false"),
        ({"name": "sample"}, "args", "needs either size or ratio"),
        ({"name": "sample", "args": {"size": 2, "ratio": 0.5}}, "args", "needs either size or ratio"),
        ({"name": "near_dedup", "args": {"threshold": 1.5}}, "args.threshold", "is 1.5, must be less than or"),
        ({"name": "difficulty_score", "args": {"low": 1}}, "args", "low and high are bounds of a column; give column"),
        ({"name": "difficulty_score", "args": {"column": "c", "low": 1, "high": 1}}, "args", "must be less than high"),
        ({"name": "difficulty_score", "args": {"column": "c", "levels": ["a"]}}, "args", "needs two at least"),
        ({"name": "difficulty_score", "args": {"levels": ["a", "b"]}}, "args", "levels are values of a column"),
        ({"name": "quality_score"}, "name", "priority_weights gives 'quality' no weight"),
    ],
)  # fmt: skip
def test_operators_are_checked_with_field_value_and_fix(
    tmp_path: Path, operator: dict[str, Any], place: str, said: str
) -> None:
    found = checked(tmp_path, {"operators": [operator], "priority_weights": {"difficulty": 1.0}})
    assert list(found) == [f"{KEY}.operators.0.{place}"]
    assert said in found[f"{KEY}.operators.0.{place}"]


@pytest.mark.parametrize(
    ("pipeline", "place", "said"),
    [
        (
            {"priority_weights": {"dificulty": 1}},
            "priority_weights.dificulty",
            "is no score; did you mean 'difficulty'?",
        ),
        (
            {"priority_weights": {"x": 1}},
            "priority_weights.x",
            "known: difficulty, diversity, quality, usage_frequency",
        ),
        ({"top_k": 0}, "top_k", "is 0, which keeps no row; -1 keeps all"),
        ({"min_score": 0.5}, "min_score", "is 0.5, but priority_weights has no score to compare with it"),
        ({"output": "x.csv"}, "output", "is 'x.csv', must end in .jsonl or .parquet, or in neither for a folder"),
        (
            {"operators": [{"name": "quality_score"}] * 2, "priority_weights": {"quality": 1}},
            "operators.1.name",
            "is 'quality_score', which another operator is already",
        ),
    ],
)
def test_the_rest_is_checked_with_field_value_and_fix(
    tmp_path: Path, pipeline: dict[str, Any], place: str, said: str
) -> None:
    found = checked(tmp_path, pipeline)
    assert list(found) == [f"{KEY}.{place}"]
    assert said in found[f"{KEY}.{place}"]


def test_a_pipeline_that_cannot_be_is_refused_before_any_file_is_read(tmp_path: Path) -> None:
    config = config_of(tmp_path, "none", None)
    section = type(config.data_processor).model_validate({"task_pipeline": {"top_k": 0}})
    assert list(problems(config.model_copy(update={"data_processor": section}))) == [f"{KEY}.top_k"]


# data-juicer

FAKE = {
    "data_juicer/__init__.py": "",
    "data_juicer/core/__init__.py": "",
    "data_juicer/core/data.py": "NestedDataset = lambda d: d\n",
    "data_juicer/utils/__init__.py": "",
    "data_juicer/utils/lazy_loader.py": (
        "class LazyLoader:\n"
        "    @classmethod\n    def _install_package(cls, spec, pip_args=None):\n        print('INSTALLED', spec)\n"
    ),
    "data_juicer/ops/filter/llm_difficulty_score_filter.py": "",
    "data_juicer/ops/mapper/upper_mapper.py": "",
    "data_juicer/ops/mapper/needy_mapper.py": "",
    "data_juicer/ops/__init__.py": (
        "from data_juicer.utils.lazy_loader import LazyLoader\n"
        "class Op:\n    def __init__(self, text_key, num_proc, **args):\n        self.key, self.args = text_key, args\n"
        "class Hard(Op):\n    def run(self, data):\n"
        "        data = data.map(lambda r: {'__dj__stats__': {'llm_difficulty_score': len(r[self.key]) / 10}})\n"
        "        return data.filter(lambda r: r['__dj__stats__']['llm_difficulty_score'] >= self.args['min_score'])\n"
        "class Upper(Op):\n    def run(self, data):\n"
        "        return data.map(lambda r: {self.key: r[self.key].upper()})\n"
        "class Needy(Op):\n    def run(self, data):\n        LazyLoader._install_package('torch')\n"
        "class OPERATORS:\n    modules = {'llm_difficulty_score_filter': Hard, 'upper_mapper': Upper,\n"
        "               'needy_mapper': Needy}\n"
    ),
}  # fmt: skip

JUICE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from trinity.data.datasets import DatasetError
from trinity.task_pipeline import data_juicer
from trinity.task_pipeline.base import Context, Candidate
from trinity.task_pipeline.scores import SCORES
candidates = [Candidate(number, {"q": text, "a": number}) for number, text in enumerate(("a", "abcdefgh", "abcd"))]
candidates[1].row["x"] = 1
one, two = Context(fields=("q",)), Context(fields=("q", "a"))
left = data_juicer.apply("llm_difficulty_score_filter", {"min_score": 0.4}, candidates, one)
said = []
for name, context in (("upper_mapper", two), ("needy_mapper", one)):
    try:
        data_juicer.apply(name, {}, candidates, context)
    except DatasetError as error:
        said.append(error.message)
print(json.dumps({
    "known": data_juicer.known(),
    "left": [[candidate.number, candidate.row] for candidate in left],
    "difficulty": SCORES["difficulty"]().values(left, one),
    "upper": [candidate.row for candidate in data_juicer.apply("upper_mapper", {}, candidates, one)],
    "said": said,
}))
"""


def test_operators_of_data_juicer_filter_edit_and_score(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    for name, text in FAKE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    done = subprocess.run([sys.executable, "-c", JUICE, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "INSTALLED" not in done.stdout
    found = json.loads(done.stdout)
    assert found["known"] == ["llm_difficulty_score_filter", "needy_mapper", "upper_mapper"]
    assert found["left"] == [[1, {"q": "abcdefgh", "a": 1, "x": 1}], [2, {"q": "abcd", "a": 2}]]
    assert found["difficulty"] == [0.8, 0.4]
    assert [row["q"] for row in found["upper"]] == ["A", "ABCDEFGH", "ABCD"]
    assert "x" not in found["upper"][0]
    assert "upper_mapper edits the text, which is joined from several columns; give text_key" in found["said"][0]
    assert "needy_mapper failed: ImportError: package 'torch' is not installed" in found["said"][1]


def test_without_data_juicer_its_operators_are_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    juicer = pipeline_run.data_juicer
    monkeypatch.setattr(juicer, "is_installed", lambda: False)
    said = checked(tmp_path, {"operators": [{"name": "perplexity_filter"}]})[f"{KEY}.operators.0.name"]
    assert "is 'perplexity_filter', which is not registered; did you mean " in said
    assert "known: alphanumeric_filter, difficulty_score, " in said
    assert said.endswith("; an operator of data-juicer needs `pip install py-data-juicer ray`")
    monkeypatch.setattr(juicer, "is_installed", lambda: True)
    monkeypatch.setattr(juicer, "known", lambda: ["perplexity_filter"])
    assert checked(tmp_path, {"operators": [{"name": "perplexity_filter", "args": {"lang": "en"}}]}) == {}
    said = checked(tmp_path, {"operators": [{"name": "perplexty_filter"}]})[f"{KEY}.operators.0.name"]
    assert "did you mean 'perplexity_filter'" in said and said.endswith("; and those of data-juicer")


# What others rely on


def test_importing_brings_nothing_heavy() -> None:
    code = (
        "import sys, trinity.task_pipeline\n"
        "assert not {'numpy', 'pyarrow', 'datasets', 'data_juicer', 'torch'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_every_operator_and_argument_is_documented_and_the_example_is_right(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs/task_pipeline.md").read_text()
    example = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert checked(tmp_path, example["data_processor"]["task_pipeline"]) == {}
    assert set(operator_args()) == {*OPERATORS, *SCORE_OPERATORS}
    for name, args in operator_args().items():
        assert f"`{name}`" in text
        for argument in args:
            assert f"`{argument}`" in text, f"{name}: {argument}"


def test_a_manifest_names_the_rows_that_were_taken(tmp_path: Path) -> None:
    config = config_of(tmp_path, write(tmp_path / "t.jsonl", ROWS), {"priority_weights": {"difficulty": 1}, "top_k": 2})
    manifest = outputs.read_manifest(go(config).tasksets[0].output)
    assert manifest is not None
    assert manifest.rows == [0, 2] and [one["rows"] for one in manifest.inputs] == [6]
    assert manifest.pipeline["top_k"] == 2
