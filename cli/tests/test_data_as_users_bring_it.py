"""`trinity check --deep` checks data and plugins that users bring, from their paths only."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from support.fakes.models.tokenizer_folder import make_tokenizer_folder
from trinity.cli.main import app

pytestmark = pytest.mark.core

CASES = Path(__file__).parents[2] / "tests/support/cases"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer_folder(folder)
    return folder


def check(folder: Path, model: Path, buffer: dict[str, Any], *more: str, **config: Any) -> tuple[int, str]:
    written = {
        "checkpoint_root_dir": str(folder / "jobs"),
        "model": {"model_path": str(model), "max_prompt_tokens": 256, "max_response_tokens": 64},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
        "buffer": {"batch_size": 2, "train_batch_size": 8, **buffer},
        **config,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(written))
    done = CliRunner().invoke(app, ["check", "--deep", str(folder / "run.yaml"), *more])
    return done.exit_code, done.output


def sums(path: Path, **columns: str) -> dict[str, Any]:
    form = {"prompt_key": "question", "response_key": "answer", **columns}
    return {"name": "sums", "path": str(path), "format": form, "default_reward_fn_type": "accuracy_reward"}


@pytest.mark.parametrize("name", ["jsonlines", "jsonlines/train.json", "csv", "csv/train.csv", "saved"])
@pytest.mark.parametrize("place", ["tasksets", "eval_tasksets", "sft"])
def test_a_path_is_enough(name: str, place: str, tmp_path: Path, model: Path) -> None:
    taskset = sums(CASES / "datasets" / name)
    if place == "sft":
        dataset = {key: taskset[key] for key in ("name", "path", "format")}
        code, said = check(
            tmp_path, model, {"trainer_input": {"experience_buffer": dataset}}, mode="train",
            algorithm={"algorithm_type": "sft"},
        )  # fmt: skip
    else:
        given = {"tasksets": [sums(CASES / "datasets/csv")], place: [taskset]}
        code, said = check(tmp_path, model, {"explorer_input": given})
    assert code == 0 and "model and data are there" in said, said


@pytest.mark.parametrize("place", ["tasksets", "eval_tasksets", "experience_buffer"])
def test_a_pointer_in_place_of_the_data_is_named(place: str, tmp_path: Path, model: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train-00000-of-00001.parquet").write_text(POINTER)
    taskset = sums(tmp_path / "data")
    if place == "experience_buffer":
        del taskset["default_reward_fn_type"]
        buffer: dict[str, Any] = {"trainer_input": {place: taskset}}
        code, said = check(tmp_path, model, buffer, mode="train", algorithm={"algorithm_type": "sft"})
    else:
        given = {"tasksets": [sums(CASES / "datasets/csv")], place: [taskset]}
        code, said = check(tmp_path, model, {"explorer_input": given})
    assert code == 2
    assert "train-00000-of-00001.parquet: is a Git LFS pointer, not the data; run `git lfs pull`" in said


def test_a_reward_of_verls_form_gives_its_score() -> None:
    code = (
        "import sys\nfrom trinity import plugins\nfrom trinity.sdk.scoring import ScoreItem, results\n"
        "plugins.load(sys.argv[1:])\n"
        "items = [ScoreItem('', text, '43') for text in ('so 43', 'so 44')]\n"
        "found = results(plugins.REWARD_FUNCTIONS['verldict'], items, {})\n"
        "print([one.reward for one in found], [sorted(one.metrics) for one in found])"
    )
    command = [sys.executable, "-c", code, str(CASES / "plugins/verldict")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[1.0, -1.0] [['acc', 'score'], ['acc', 'score']]", done.stderr
