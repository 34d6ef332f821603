"""`trinity results`: curves and peaks of many runs in one table, for any content of their files."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trinity.cli.main import app
from trinity.inspect.results import as_csv, markdown, points_csv
from trinity.reading.errors import RunError
from trinity.study.results import METRICS, Curve, collect

pytestmark = pytest.mark.core


def write(job: Path, *lines: Any) -> Path:
    file = job / "monitor/explorer.jsonl"
    file.parent.mkdir(parents=True)
    texts = [line if isinstance(line, str) else json.dumps({"time": 0.0, **line}) for line in lines]
    file.write_text("\n".join(texts) + "\n")
    return job


def evaluation(step: int, **values: float) -> dict[str, Any]:
    return {"step": step, **{f"eval/test/{name}/mean@1": value for name, value in values.items()}}


def test_versions_that_played_against_older_ones_are_rated(tmp_path: Path) -> None:
    job = write(
        tmp_path / "nim",
        evaluation(0, score_against_0=0.5),
        evaluation(10, score_against_0=0.75),
        evaluation(20, score_against_0=0.9, score_against_10=0.75),
    )
    (curve,) = [one for one in collect([job], METRICS) if one.metric == "rating"]
    assert [step for step, _ in curve.points] == [0, 10, 20]
    assert [round(value) for _, value in curve.points] == [0, 185, 370]
    assert collect([job], ("rating",)) == [curve]
    with pytest.raises(RunError, match="no evaluation of rating"):
        collect([write(tmp_path / "first", evaluation(0, score_against_0=0.5))], ("rating",))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(
        tmp_path / "ALFWORLD/grpo",
        evaluation(0, success=0.1, steps=24),
        evaluation(60, success=0.4, steps=15),
        {"step": 61, "rollout/reward/mean": 0.5, "eval/test/success/std@1": 3},
        evaluation(120, success=0.3, steps=20),
    )
    write(
        tmp_path / "ALFWORLD/r3l/rft",
        {"step": 1, "rollout/second_improve/mean": 0.25},
        {"step": 2, "rollout/second_improve/mean": 0.5},
        {"step": 2, "eval/aime/24/accuracy/mean@8": 0.7},
    )
    return tmp_path


def test_every_run_and_stage_has_its_curves_with_their_peaks(root: Path) -> None:
    curves = collect([root], METRICS)
    found = {(c.run, c.taskset, c.metric): (c.peak, c.points[0], c.points[-1]) for c in curves}
    assert found == {
        ("ALFWORLD/grpo", "test", "success"): ((60, 0.4), (0, 0.1), (120, 0.3)),
        ("ALFWORLD/grpo", "test", "steps"): ((60, 15.0), (0, 24.0), (120, 20.0)),
        ("ALFWORLD/r3l/rft", "aime/24", "accuracy@8"): ((2, 0.7), (2, 0.7), (2, 0.7)),
        ("ALFWORLD/r3l/rft", "rollout", "second_improve"): ((2, 0.5), (1, 0.25), (2, 0.5)),
    }


def test_a_step_evaluated_again_after_a_crash_counts_once_and_broken_lines_do_not(tmp_path: Path) -> None:
    job = write(
        tmp_path / "job",
        evaluation(10, success=0.9),
        '{"step": 20, "eval/te',
        "[1, 2]",
        '{"step": "x"}',
        "",
        {"step": 15, "eval/test/success/mean@1": None},
        evaluation(10, success=0.2),
    )
    (curve,) = collect([job], METRICS)
    assert (curve.run, curve.points) == ("job", ((10, 0.2),))


def test_the_earliest_of_equal_peaks_counts() -> None:
    assert Curve("r", "t", "success", ((0, 0.5), (10, 0.7), (20, 0.7))).peak == (10, 0.7)


def test_the_table_is_markdown_and_csv(root: Path) -> None:
    curves = collect([root], METRICS)
    lines = markdown(curves).splitlines()
    assert [cell.strip() for cell in lines[0].split("|")[1:4]] == ["run", "taskset", "metric"]
    assert set(lines[1]) == {"|", "-"}
    assert len({len(line) for line in lines}) == 1
    found = list(csv.DictReader(io.StringIO(as_csv(curves))))
    success = next(row for row in found if row["metric"] == "success")
    assert (success["peak"], success["at step"], success["last"], success["evaluations"]) == ("0.4", "60", "0.3", "3")
    points = list(csv.DictReader(io.StringIO(points_csv(curves))))
    assert {"run": "ALFWORLD/grpo", "taskset": "test", "metric": "steps", "step": "60", "value": "15.0"} in points
    assert len(points) == sum(len(curve.points) for curve in curves)


def test_names_cannot_break_the_table(tmp_path: Path) -> None:
    write(tmp_path / "job", {"step": 1, "eval/a|b\x1b[31m/success/mean@1": 0.5})
    text = markdown(collect([tmp_path], METRICS))
    assert "\x1b" not in text
    assert "a\\|b" in text


def test_nothing_to_show_is_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no folder"):
        collect([tmp_path / "none"], METRICS)
    write(tmp_path / "job", {"step": 1, "rollout/reward/mean": 1.0})
    with pytest.raises(RunError, match=r"no evaluation of success, accuracy, .* --metric chooses others"):
        collect([tmp_path], METRICS)


def test_runs_of_several_folders_have_different_names(root: Path, tmp_path: Path) -> None:
    first, second = root / "ALFWORLD/r3l", write(tmp_path / "other/rft", evaluation(1, success=0.5)).parent
    names = [str(first / "rft"), str(first / "rft"), str(second / "rft")]
    assert [one.run for one in collect([first, second, second / "rft"], METRICS)] == names


def test_a_folder_without_evaluations_is_named(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = write(tmp_path / "empty", {"step": 1, "rollout/reward/mean": 1.0})
    collect([empty, root / "ALFWORLD", root / "ALFWORLD/grpo"], ["success"])
    assert capsys.readouterr().err == f"trinity: no evaluation of success below {empty}; --metric chooses others\n"


def test_the_command_prints_and_writes(root: Path, tmp_path: Path) -> None:
    out = {name: tmp_path / name for name in ("table.md", "table.csv", "curves.csv")}
    arguments = ["--metric", "steps", "--markdown", str(out["table.md"]), "--csv", str(out["table.csv"])]
    done = CliRunner().invoke(app, ["results", str(root), *arguments, "--curves", str(out["curves.csv"])])
    assert done.exit_code == 0, done.output
    assert "ALFWORLD/grpo" in done.output
    assert "success" not in done.output
    assert out["table.md"].read_text().strip() == done.output.strip()
    assert out["table.csv"].read_text().startswith("run,taskset,metric,first,peak,at step")
    assert out["curves.csv"].read_text().count("steps") == 3
    refused = CliRunner().invoke(app, ["results", str(root), "--csv", str(tmp_path / "no/such/folder.csv")])
    assert refused.exit_code == 2


def test_without_folders_it_looks_where_runs_are(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(root))
    done = CliRunner().invoke(app, ["results"])
    assert done.exit_code == 0, done.output
    assert "ALFWORLD/grpo" in done.output


def test_json_has_every_point_and_the_peak(root: Path) -> None:
    told = CliRunner().invoke(app, ["results", str(root), "--metric", "success", "--json"])
    (curve,) = [one for one in json.loads(told.stdout) if one["metric"] == "success"]
    assert (curve["points"], curve["peak"]) == ([[0, 0.1], [60, 0.4], [120, 0.3]], [60, 0.4])


def test_values_that_are_not_finite_are_no_points(tmp_path: Path) -> None:
    values = [float("nan"), 0.3, float("inf"), 0.7, float("-inf")]
    write(tmp_path / "job", *(evaluation(step, success=value) for step, value in enumerate(values)))
    (curve,) = collect([tmp_path], METRICS)
    assert (curve.points, curve.peak) == (((1, 0.3), (3, 0.7)), (3, 0.7))
