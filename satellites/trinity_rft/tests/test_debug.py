"""`trinity debug`: which task it makes of its options, what it shows, what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trinity.compat_rft.debug import debug
from trinity.compat_rft.debug.text import render, spans
from trinity.config import Config, ConfigError, Plan, make_plan
from trinity.config.load import parse
from trinity.reading.errors import RunError

pytestmark = pytest.mark.core

YAML = """
name: fresh
model: {model_path: m, max_prompt_tokens: 8, max_response_tokens: 8}
algorithm: {repeat_times: 2}
buffer:
  batch_size: 2
  explorer_input:
    taskset:
      name: sums
      path: "DATA"
      format: {prompt_key: question, response_key: answer}
      data_selector: {selector_type: shuffle, seed: 1}
"""


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    rows = [{"question": f"{number}+1", "answer": str(number + 1)} for number in range(3)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return make_plan(parse(YAML.replace("DATA", str(tmp_path))))


def test_task_is_the_row_of_that_number_though_rows_are_shuffled(plan: Plan) -> None:
    for number in range(3):
        task = debug.task_of(plan, "x.yaml", number)
        assert task.raw == {"question": f"{number}+1", "answer": str(number + 1)}
        assert (task.task_id, task.row, task.repeat_times) == (f"sums/{number}", number, 2)
    with pytest.raises(RunError, match="--task 3: 'sums' has the rows 0 to 2"):
        debug.task_of(plan, "x.yaml", 3)


def test_a_prompt_needs_no_data(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").unlink()
    task = debug.task_of(plan, "x.yaml", 0, "5+5", "10")
    assert task.raw == {"question": "5+5", "answer": "10"}
    with pytest.raises(ConfigError):
        debug.task_of(plan, "x.yaml", 0)


def test_a_row_that_no_workflow_can_read_is_refused_by_its_place(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": null, "answer": "1"}\n')
    with pytest.raises(ConfigError) as refused:
        debug.task_of(plan, "x.yaml", 0)
    assert "buffer.explorer_input.taskset" in str(refused.value.problems[0])


@pytest.mark.parametrize(
    ("mask", "text"),
    [([1, 1], "all"), ([0, 0], "none"), ([], "none"), ([1, 0, 0, 1, 1], "0-1 3-5"), ([0, 1, 1, 0], "1-3")],
)
def test_trained_tokens_are_stretches(mask: list[int], text: str) -> None:
    assert spans(mask) == text


def experience(**changes: Any) -> dict[str, Any]:
    made = {
        "rollout": 0, "step": 0, "prompt": "1+1", "response": "2\x1b[2J", "prompt_tokens": 3, "response_tokens": 2,
        "reward": 1.0, "metrics": {"accuracy": 1.0}, "truncation": "none", "info": {}, "token_ids": [1, 2, 3, 4, 5],
        "mask": [1, 0], "logprobs": [-0.5, -9.0],
    }  # fmt: skip
    return {**made, **changes}


def test_what_was_made_is_shown_whole_and_one_prompt_once(plan: Plan) -> None:
    made = [experience(), experience(rollout=1, reward=0.0, mask=[0, 0], metrics={"format": 0.25})]
    text = render(debug.task_of(plan, "x.yaml", 0), {"seconds": 0.5, "failure": None, "experiences": made})
    assert "mean reward" in text and "0.500" in text
    assert "-0.500 / -0.500" in text, "log-probabilities of the trained tokens alone"
    assert text.count("#0 prompt") == 1 and "#1 prompt" not in text and "#1 response: 2 tokens" in text
    assert "\x1b" not in text and "accuracy" in text and "0.250" in text


def test_a_failed_attempt_says_its_cause(plan: Plan) -> None:
    failure = {"cause": "timeout", "error": "TimeoutError: too long"}
    text = render(debug.task_of(plan, "x.yaml", 0), {"seconds": 2.0, "failure": failure, "experiences": []})
    assert "timeout" in text and "TimeoutError: too long" in text


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--module", "inference_model"], "with --watch it stays up"),
        (["--module", "viewer"], "`trinity ui`"),
        (["--module", "other"], "the one there is is workflow"),
        (["--enable-profiling"], "py-spy"),
        (["--port", "8502"], "Trinity-RFT's viewer"),
        (["--output-file", "a.html"], "--output-dir"),
        (["--watch", "none.py"], "none.py is no Python file"),
        ([], "no YAML"),
    ],
)
def test_what_it_does_not_do_is_one_sentence(options: list[str], sentence: str) -> None:
    done = CliRunner().invoke(debug.app, options)
    assert done.exit_code == 2 and sentence in done.output and done.output.count("\n") == 1


def test_a_result_is_not_overwritten_if_so_asked(tmp_path: Path) -> None:
    (tmp_path / "debug.json").write_text("{}")
    done = CliRunner().invoke(debug.app, ["x.yaml", "--output-dir", str(tmp_path), "--disable-overwrite"])
    assert done.exit_code == 2 and "debug.json is there already" in done.output


def test_a_folder_that_cannot_be_made_is_said_before_an_engine_starts(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(stage: Config) -> None:
        raise RunError("the engine starts", 7)

    monkeypatch.setattr(debug, "Workbench", started)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "run.yaml").write_text(YAML.replace("DATA", str(tmp_path)))
    # The engine of `debug` opens no endpoint, so it needs no keys.
    given = [str(tmp_path / "run.yaml"), f"model.model_path={tmp_path}/model", "explorer.listen_address=0.0.0.0"]
    done = CliRunner().invoke(debug.app, [*given, "--output-dir", "/proc/nope"])
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (1, "trinity: /proc/nope: No such file or directory")
    done = CliRunner().invoke(debug.app, [*given, "--output-dir", str(tmp_path / "new")])
    assert done.exit_code == 7, done.output
    assert list((tmp_path / "new").iterdir()) == []


def test_a_change_of_a_file_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a")
    before = debug.changes([tmp_path])
    assert debug.changes([tmp_path]) == before
    (tmp_path / "a.py").write_text("ab")
    assert debug.changes([tmp_path]) != before
