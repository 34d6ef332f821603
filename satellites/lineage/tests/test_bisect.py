"""`trinity bisect`: the first difference of two runs, by what their trainers wrote."""

import base64
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from trinity.lineage.bisect import bisect
from trinity.reading.errors import RunError
from trinity.study.bisect import Difference, compare

pytestmark = pytest.mark.core


def encoded(values: list[float], dtype: str) -> str:
    return base64.b64encode(np.asarray(values, dtype).tobytes()).decode()


def experience(step: int, ordinal: int, rollout: int, **changes: Any) -> dict[str, Any]:
    arrays = {
        "token_ids": encoded(changes.pop("tokens", [5, 6, 7, 8]), "<i4"),
        "mask": encoded(changes.pop("mask", [1, 1]), "u1"),
        "logprobs": encoded(changes.pop("logprobs", [-0.5, -0.25]), "<f4"),
    }
    return {
        "step": step, "task_id": f"sums/0/{ordinal}/{ordinal}", "ordinal": ordinal, "rollout": rollout, "turn": 0,
        "reward": 1.0, "advantage": 0.5, "versions": [[step - 1, 0, 2]], "prompt_tokens": 2, "response_tokens": 2,
        "truncation": "none", "log_sequence": 9, "arrays": arrays, **changes,
    }  # fmt: skip


class Run:
    """A stage folder of two steps with two tasks of two rollouts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.experiences = {
            (step, ordinal, rollout): experience(step, ordinal, rollout)
            for step in (1, 2) for ordinal in (2 * step, 2 * step + 1) for rollout in (0, 1)
        }  # fmt: skip
        self.metrics: dict[int, dict[str, Any]] = {
            step: {"actor/pg_loss": step / 3, "time/step": 1.0} for step in (1, 2)
        }
        self.weights = np.arange(6, dtype=np.float32)

    def write(self) -> Path:
        for name in ("buffer", "monitor", "weights/v2"):
            (self.folder / name).mkdir(parents=True)
        lines = [json.dumps(line) for line in self.experiences.values()]
        (self.folder / "buffer/experience_buffer.jsonl").write_text("\n".join([*lines, '{"step": 2, "cut']))
        steps = [json.dumps({"step": step, **metrics}) for step, metrics in self.metrics.items()]
        (self.folder / "monitor/trainer.jsonl").write_text("\n".join(steps) + "\n")
        save_file(
            {"bias": np.zeros(2, np.float32), "weight": self.weights}, self.folder / "weights/v2/part.safetensors"
        )
        return self.folder


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return Run(tmp_path / "a").write()


@pytest.fixture
def b(tmp_path: Path) -> Run:
    return Run(tmp_path / "b")


def difference(a: Path, b: Run) -> Difference | None:
    return compare(a, b.write())[1]


def test_equal_runs(a: Path, b: Run, capsys: pytest.CaptureFixture[str]) -> None:
    b.metrics[2]["time/step"] = 2.0
    b.experiences[1, 2, 0]["log_sequence"] = 17
    b.experiences = dict(reversed(b.experiences.items()))
    assert bisect(a, b.write()) == 0
    assert capsys.readouterr().out == "equal, bit for bit: 2 steps, 1 to 2\n"


@pytest.mark.parametrize(
    ("changes", "where", "values"),
    [
        ({"tokens": [5, 6, 7, 9]}, "token 3, token_ids", (8, 9)),
        ({"tokens": [5, 6, 7]}, "token 3, token_ids", (8, None)),
        ({"logprobs": [-0.5, np.nextafter(np.float32(-0.25), np.float32(0))]}, "token 3, logprobs", None),
        ({"mask": [0, 1]}, "token 2, mask", (1, 0)),
        ({"reward": np.nextafter(1.0, 2.0)}, "reward", (1.0, 1.0000000000000002)),
        ({"advantage": 0.75}, "advantage", (0.5, 0.75)),
        ({"versions": [[0, 0, 2]]}, "versions", ([1], [0])),
        ({"tokens": [5, 6, 8], "versions": [[1, 0, 1]]}, "token 2, token_ids", (7, 8)),
    ],
)
def test_the_token_is_named(
    a: Path, b: Run, changes: dict[str, Any], where: str, values: tuple[Any, Any] | None
) -> None:
    b.experiences[2, 5, 1] = experience(2, 5, 1, **changes)
    b.metrics[2]["actor/pg_loss"] = 7.0  # follows from it
    found = difference(a, b)
    assert found is not None
    assert (found.step, found.where) == (2, f"task sums/0/5/5, rollout 1, turn 0, {where}")
    assert values is None or (found.a, found.b) == values


def test_the_first_step_is_named(a: Path, b: Run) -> None:
    for step, ordinal in ((2, 4), (1, 3)):
        b.experiences[step, ordinal, 0]["reward"] = 0.0
    found = difference(a, b)
    assert found == Difference(1, "task sums/0/3/3, rollout 0, turn 0, reward", 1.0, 0.0)


def test_a_rollout_that_one_run_lacks(a: Path, b: Run) -> None:
    del b.experiences[2, 4, 1]
    assert difference(a, b) == Difference(2, "task sums/0/4/4, rollout 1, turn 0", "there", None)


def test_metrics_and_then_weights(a: Path, b: Run, tmp_path: Path) -> None:
    b.weights[4] = 7.0
    assert difference(a, b) == Difference(2, "weight weight, element 4", 4.0, 7.0)
    b.folder = tmp_path / "c"
    b.metrics[2]["actor/pg_loss"] = 0.5
    assert difference(a, b) == Difference(2, "actor/pg_loss", 2 / 3, 0.5)


def test_runs_of_different_lengths(a: Path, b: Run) -> None:
    del b.metrics[2]
    assert difference(a, b) == Difference(1, "the last step", 2, 1)


def test_the_command_says_step_and_values(a: Path, b: Run, capsys: pytest.CaptureFixture[str]) -> None:
    b.experiences[1, 2, 0]["reward"] = 0.0
    assert bisect(a, b.write(), as_json=True) == 1
    assert json.loads(capsys.readouterr().out) == {
        "steps": [1, 2],
        "difference": {"step": 1, "where": "task sums/0/2/2, rollout 0, turn 0, reward", "a": 1.0, "b": 0.0},
    }
    assert bisect(a, b.folder) == 1
    assert capsys.readouterr().out.startswith("step 1: task sums/0/2/2, rollout 0, turn 0, reward is 1.0 in ")


def test_values_cannot_command_the_terminal(a: Path, b: Run, capsys: pytest.CaptureFixture[str]) -> None:
    b.experiences[1, 2, 0]["reward"] = "\x1b[2J\ud800"
    assert bisect(a, b.write()) == 1
    assert "\\x1b[2J\\ud800 in " in capsys.readouterr().out


def test_bytes_left_over_are_no_element(a: Path, b: Run) -> None:
    header = json.dumps({"weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 7]}}).encode()
    file = b.write() / "weights/v2/part.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(7))
    found = compare(a, b.folder)[1]
    assert found is not None and found.where == "weight bias"
    for folder in (a, b.folder):
        size = 7 if folder == b.folder else 8
        header = json.dumps({"weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, size]}}).encode()
        raw = len(header).to_bytes(8, "little") + header + bytes(size)
        (folder / "weights/v2/part.safetensors").write_bytes(raw)
    assert compare(a, b.folder)[1] == Difference(2, "weight weight, element 1", 0.0, None)


def test_json_has_null_for_a_weight_that_is_not_finite(a: Path, b: Run, capsys: pytest.CaptureFixture[str]) -> None:
    b.weights[4] = np.nan
    assert bisect(a, b.write(), as_json=True) == 1
    text = capsys.readouterr().out
    assert "NaN" not in text
    assert json.loads(text)["difference"] == {"step": 2, "where": "weight weight, element 4", "a": 4.0, "b": None}


@pytest.mark.parametrize(
    "damage",
    [
        {"arrays": {"mask": "?"}}, {"arrays": [1]}, {"versions": [1]}, {"versions": [[]]}, {"versions": [{}]},
        {"versions": 7}, {"ordinal": math.inf}, {"turn": None}, {"prompt_tokens": math.nan},
    ],
)  # fmt: skip
def test_a_damaged_line_names_its_file(damage: dict[str, Any], a: Path, b: Run) -> None:
    b.experiences[1, 2, 0] |= damage
    with pytest.raises(RunError, match=r"experience_buffer.jsonl: a line of step 1 cannot be read"):
        compare(a, b.write())


def test_folders_without_steps_are_refused(a: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no folder .*nothing; give the folder of a stage"):
        compare(a, tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"empty has no trained step"):
        compare(a, tmp_path / "empty")


def test_the_folder_of_a_job_with_stages_names_theirs(a: Path, tmp_path: Path) -> None:
    Run(tmp_path / "job" / "rft").write()
    with pytest.raises(RunError, match=r"job has stages; give the folder of one: .*job/rft$"):
        compare(a, tmp_path / "job")
