"""`trinity init`: a YAML of one's own model and data, that loads, from options alone or with guessed columns."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from trinity.cli.main import app
from trinity.cli.supervise.checks.preflight import check_stages
from trinity.config import load
from trinity.own_data import init

pytestmark = pytest.mark.core


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(init, "check", lambda config, deep: 0)
    Path("a model").mkdir()
    Path("a model/config.json").write_text("{}")
    rows = [{"id": n, "problem": f"{n}+1", "solution": str(n + 1)} for n in range(5)]
    Path("sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def _init(*options: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["init", "--model", "a model", "--data", "sums.jsonl", *options])
    return done.exit_code, done.output


@pytest.mark.parametrize(("options", "answer"), [((), "solution"), (("--answer", "id"), "id")])
def test_the_written_yaml_names_model_data_and_columns(folder: Path, options: tuple[str, ...], answer: str) -> None:
    code, output = _init(*options, "--gpus", "0")
    assert code == 0
    assert 'problem: "0+1"' in output
    loaded = load(Path("run.yaml"), [])
    taskset = loaded.buffer.explorer_input.taskset
    assert (loaded.model.model_path, loaded.buffer.batch_size) == ("a model", 5)
    assert (taskset.path, taskset.format.prompt_key, taskset.format.response_key) == ("sums.jsonl", "problem", answer)


def test_gpus_are_written(folder: Path) -> None:
    assert _init("--gpus", "4")[0] == 0
    assert load(Path("run.yaml"), []).cluster.gpu_per_node == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--prompt", "text"), "--prompt text: is no column of the data, which has id, problem, solution"),
        (("--model", "no model"), "give a model folder or a hub name (owner/name); relative paths start in /"),
        (("--data", "none.jsonl"), "none.jsonl"),
        (("--data", ""), "--data is missing, and there is no terminal to ask at"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(folder: Path, options: tuple[str, ...], said: str) -> None:
    code, output = _init(*options)
    assert code == 2
    assert said in " ".join(output.split())
    assert not Path("run.yaml").exists()


def test_a_guess_that_is_a_part_of_the_prompt_is_refused_at_a_terminal_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("sums.jsonl").write_text('{"instruction": "Add.", "input": "1+1", "output": "2"}')
    monkeypatch.setattr(init, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    monkeypatch.setattr("builtins.input", lambda question: "")  # takes the default
    code, output = _init()
    assert code == 2 and "instruction and input belong together" in " ".join(output.split())


def test_a_yaml_is_not_written_over(folder: Path) -> None:
    Path("run.yaml").write_text("mine")
    assert _init()[0] == 2
    assert Path("run.yaml").read_text() == "mine"


def test_a_yaml_that_fails_its_check_stays_and_the_way_on_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("sums.jsonl").write_text('{"problem": "1+1", "solution": "2"}\n{"problem": "1+2", "solution": null}')
    monkeypatch.setattr(init, "check", lambda config, deep: check_stages(load(config, []), str(config)))
    code, output = _init()
    assert code == 2 and Path("run.yaml").exists()
    said = (
        r"run.yaml: buffer.* row 1: 'solution' is None, .* run.yaml stays: change it and check it again, or remove it"
    )
    assert re.search(said, " ".join(output.split()))


def test_a_column_of_no_known_name_must_be_given(folder: Path) -> None:
    Path("sums.jsonl").write_text('{"a": "1+1", "b": "2"}')
    code, output = _init()
    assert code == 2
    assert "no column of a, b has a well-known name for right answers; give --answer" in " ".join(output.split())
