"""`trinity check --deep` reads every row: what is wrong in one of them is said before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from trinity.cli.main import app

pytestmark = pytest.mark.core

GOOD = {"question": "1+1", "answer": "2", "easy": 0.5, "how": "math_workflow", "judge": "accuracy_reward"}


def check(folder: Path, wrong: dict[str, Any], offline: bool, **taskset: Any) -> tuple[int, str]:
    """Exit code and standard error for a dataset whose third row is changed."""
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")
    rows = [GOOD, GOOD, {**GOOD, **wrong}, GOOD]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"prompt_key": "question", "response_key": "answer", **taskset.pop("format", {})}
    dataset = {"name": "rows", "path": str(folder / "rows.jsonl"), "format": columns, **taskset}
    config: dict[str, Any] = {
        "checkpoint_root_dir": str(folder / "jobs"),
        "model": {"model_path": str(folder / "model"), "max_model_len": 64},
        "algorithm": {"algorithm_type": "sft" if offline else "grpo", "repeat_times": 4},
        "buffer": {"batch_size": 2, "explorer_input": {"taskset": dataset}},
    }
    if offline:
        config |= {"mode": "train"}
        config["buffer"] = {"train_batch_size": 2, "trainer_input": {"experience_buffer": dataset}}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    done = CliRunner().invoke(app, ["check", "--deep", str(folder / "run.yaml")])
    return done.exit_code, done.stderr


@pytest.mark.parametrize(
    ("wrong", "offline", "taskset", "said"),
    [
        ({"answer": 2}, True, {}, "row 2: 'answer' is 2, must be text"),
        ({"easy": "x"}, False, {"data_selector": {"selector_type": "offline_easy2hard", "feature_keys": ["easy"]}},
         "row 2: 'easy' is 'x', must be a number"),
        ({"how": "maths"}, False, {"format": {"workflow_key": "how"}}, "row 2: 'how' is 'maths', which is none of"),
        ({"judge": "x"}, False, {"format": {"reward_fn_key": "judge"}}, "row 2: 'judge' is 'x', which is none of"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_named(tmp_path: Path, wrong: Any, offline: bool, taskset: Any, said: str) -> None:
    code, error = check(tmp_path, wrong, offline, **taskset)
    assert code == 2
    assert said in error
    assert not (tmp_path / "jobs").exists()


@pytest.mark.parametrize("offline", [True, False])
def test_good_rows_are_taken(tmp_path: Path, offline: bool) -> None:
    selector = {"selector_type": "offline_easy2hard", "feature_keys": ["easy"]}
    code, error = check(
        tmp_path, {}, offline, format={} if offline else {"workflow_key": "how"}, data_selector=selector
    )
    assert code == 0, error
