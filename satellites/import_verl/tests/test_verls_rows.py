"""A veRL script and its parquet, without other changes: prompts, reference answers, and a scorer for each row."""

from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import yaml
from typer.testing import CliRunner

from support.fakes.models.tokenizer_folder import make_tokenizer_folder
from trinity.cli.main import app
from trinity.config import load, make_plan
from trinity.config.names import DATA_SOURCES, REWARD_FUNCTIONS
from trinity.data.experience import TaskKind
from trinity.data.prompts import prompt_messages, reference_answers
from trinity.data.task_source import TaskSource
from trinity.plugins.environments import built_in_scorers
from trinity.sdk.scoring import ScoreItem, results

pytestmark = pytest.mark.core

CASES = Path(__file__).parents[3] / "tests/support/cases"
ROW = pyarrow.parquet.read_table(CASES / "datasets/verl/train.parquet").to_pylist()[0]
TESTS = '{"inputs": ["1\\n"], "outputs": ["1\\n"]}'


def row(source: str, truth: Any) -> dict[str, Any]:
    return {**ROW, "data_source": source, "reward_model": {"style": "rule", "ground_truth": truth}}


def imported(folder: Path, rows: list[dict[str, Any]] | None, *options: str) -> Path:
    """The YAML of the script, with the folder as the home and a model in it."""
    (folder / "data/gsm8k").mkdir(parents=True)
    file, script = folder / "data/gsm8k/train.parquet", CASES / "import_verl/gsm8k_grpo.sh"
    if rows is None:
        file.write_bytes((CASES / "datasets/verl/train.parquet").read_bytes())
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    text = script.read_text().replace("$HOME", str(folder)).replace("$@", " ".join(options))
    (folder / "run.sh").write_text(text)
    done = CliRunner().invoke(app, ["import-verl", str(folder / "run.sh"), "-o", str(folder / "run.yaml")])
    assert done.exit_code == 0, done.output
    make_tokenizer_folder(folder / "model")
    return folder / "run.yaml"


def deep(config: Path) -> tuple[int, str]:
    folder = config.parent
    given = [f"model.model_path={folder / 'model'}", f"checkpoint_root_dir={folder / 'jobs'}"]
    done = CliRunner().invoke(app, ["check", "--deep", str(config), *given])
    return done.exit_code, done.output


def test_the_parquet_runs_from_script_and_file(tmp_path: Path) -> None:
    config = imported(tmp_path, None)
    code, said = deep(config)
    assert code == 0, said
    plan = make_plan(load(config))
    source = TaskSource.open("r", plan, plan.tasksets[0], TaskKind.TRAIN)
    task = source.train_task(3, 1, 0)
    form = task.format
    (asked,) = prompt_messages(task.raw[form["prompt_key"]])
    assert asked["role"] == "user" and task.raw["extra_info"]["question"] in asked["content"]
    (truth,) = reference_answers(task.raw[form["response_key"]])
    assert truth == task.raw["reward_model"]["ground_truth"]
    scorer = built_in_scorers()[task.reward_function]
    replies = [ScoreItem("", text, truth, task.raw) for text in (f"so\n#### {truth}", f"#### 1{truth}", "")]
    assert [result.reward for result in results(scorer, replies, {})] == [1.0, 0.0, 0.0]


def test_each_row_of_a_mixed_file_has_its_scorer(tmp_path: Path) -> None:
    sources = ["lighteval/MATH", "aime_2024", "math_dapo", "numina_cn_k12", "openai/gsm8k", "codecontests"]
    rows = [row(source, TESTS if source == "codecontests" else r"\frac{1}{2}") for source in sources]
    config = imported(tmp_path, rows * 3, "data.shuffle=False")
    code, said = deep(config)
    assert code == 0 and "could not score" not in said, said
    plan = make_plan(load(config))
    source = TaskSource.open("r", plan, plan.tasksets[0], TaskKind.TRAIN)
    tasks = [source.train_task(position, 1, 0) for position in range(len(rows))]
    assert [task.reward_function for task in tasks] == [
        "math_boxed_reward", "math_dapo_reward", "math_dapo_reward", "accuracy_reward", "accuracy_reward", "code_tests"
    ]  # fmt: skip
    assert [task.raw["reward_model.ground_truth"] for task in tasks[-2:]] == [r"\frac{1}{2}", TESTS]
    assert set(DATA_SOURCES.values()) <= set(REWARD_FUNCTIONS)


def test_sources_without_a_scorer_are_named_with_the_fix(tmp_path: Path) -> None:
    rows = [row("openai/gsm8k", "1"), row("searchR1_nq", "x"), row("my/qa", "y")]
    code, said = deep(imported(tmp_path, rows))
    assert code == 2
    assert "row 1: 'data_source' is 'searchR1_nq' (other rows: 'my/qa'); known:" in said
    assert "register a reward function of that name" in said and "remove format.reward_fn_key" in said


def test_several_right_answers_and_images(tmp_path: Path) -> None:
    rows = [row("openai/gsm8k", ["1", "one"]), row("openai/gsm8k", ["2"])] * 8
    config = imported(tmp_path, rows)
    assert deep(config)[0] == 0
    (other := tmp_path / "other").mkdir()
    made = yaml.safe_load(imported(other, rows, "data.image_key=images").read_text())
    (taskset,) = made["buffer"]["explorer_input"]["tasksets"]
    assert (taskset["format"]["image_key"], taskset["default_workflow_type"]) == ("images", "simple_mm_workflow")


def test_a_scripts_own_reward_function_is_asked_for(tmp_path: Path) -> None:
    given = ("custom_reward_function.path=r.py", "custom_reward_function.name=mine")
    config = imported(tmp_path, None, *given)
    made = yaml.safe_load(config.read_text())["buffer"]["explorer_input"]
    assert made["default_reward_fn_type"] == "mine" and "reward_fn_key" not in made["tasksets"][0]["format"]
    code, said = deep(config)
    assert code == 2 and "'mine'" in said


@pytest.mark.parametrize(
    ("file", "other", "whole"),
    [
        ("train.parquet", "train.jsonl", False),
        ("train.parquet", "train-small.parquet", False),
        ("train-00000-of-00002.parquet", "train-00001-of-00002.parquet", False),
        ("train[1].parquet", "train[1].jsonl", False),
        ("train.parquet", "test.parquet", True),
        ("train.parquet", "train_small.parquet", True),
    ],
)
def test_one_file_of_the_script_stays_that_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, other: str, whole: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (file, other):
        (tmp_path / name).touch()
    (tmp_path / "run.sh").write_text(f"python3 -m verl.trainer.main_ppo 'data.train_files=\"./{file}\"' a.b=1\n")
    done = CliRunner().invoke(app, ["import-verl", "run.sh", "-o", "run.yaml"])
    assert done.exit_code == 0, done.output
    (taskset,) = yaml.safe_load((tmp_path / "run.yaml").read_text())["buffer"]["explorer_input"]["tasksets"]
    assert (taskset["path"], "split" in taskset) == ((".", True) if whole else (f"./{file}", False))
