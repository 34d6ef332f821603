"""`trinity export`: the files hold what ledger and job folder hold, and docs/export.md is true of them."""

import contextlib
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
from pyarrow import parquet

from support.fakes.pages.recorded_run import GROUPS, ROLLOUTS, STEPS, FakeBuffer, dead_letter, ledger, make_job
from trinity.reading.errors import RunError
from trinity.reading.reader import JobStage, find_job_stage
from trinity.ui import export as export_module
from trinity.ui.export import TABLES, TOKENS, export

pytestmark = pytest.mark.core


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobStage:
    """A stage whose buffer is a fake: three steps; dropped, cut, dead tasks; half a surrogate pair."""
    found = ledger(dropped={2: [101]}, cut={3: [103]})
    buffer = FakeBuffer(found, [dead_letter(102, "no scorer")])

    @contextlib.asynccontextmanager
    async def answered(job_stage: JobStage) -> AsyncIterator[Any]:
        yield type("Reader", (), {"buffer": buffer})()

    monkeypatch.setattr(export_module, "any_buffer", answered)
    return find_job_stage(job=make_job(tmp_path / "job", lambda row: row.update(response="half \ud800")))


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = parquet.read_table(folder / f"{name}.parquet").to_pylist()
    return found


def test_the_files_hold_what_the_run_holds(stage: JobStage, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    text = export(stage, folder, tokens=True)
    assert re.search(rf"samples.parquet +{STEPS * GROUPS * ROLLOUTS}\b", text)
    assert [row["step"] for row in rows(folder, "steps")] == [1, 2, 3]
    assert [row["dropped"] for row in rows(folder, "steps")] == [0, 1, 0]
    assert [row["cut"] for row in rows(folder, "steps")] == [0, 0, 1]
    assert rows(folder, "cut") == [{"step": 3, "ordinal": 103, "task_id": "sums/0/103"}]
    assert [row["ordinal"] for row in rows(folder, "groups")] == list(range(1, STEPS * GROUPS + 1))
    assert rows(folder, "dropped") == [
        {"step": 2, "ordinal": 101, "log_sequence": 101, "reason": "stale", "response_tokens": 0}
    ]
    assert [row["cause"] for row in rows(folder, "dead_letters")] == ["no scorer"]
    sample = next(row for row in rows(folder, "samples") if (row["step"], row["index"]) == (2, 1))
    assert (sample["ordinal"], sample["rollout"], sample["response"]) == (5, 1, "half ?")
    assert sample["versions"] == [[1, 0, 2], [2, 2, 4]]
    assert sample["metrics"] == [("accuracy", 1.0)]
    assert sample["token_ids"] == [1, 2, 10, 11, 12, 13]
    assert sample["mask"] == [1, 1, 1, 0]
    assert sample["logprobs"] == pytest.approx([-0.05, -0.5, -2.0, -9.0])
    assert sample["new_logprobs"] == pytest.approx([-0.05, -0.2, -2.1, -9.3])
    assert (sample["entropy"], sample["clipped"]) == ([0.0625, 1.0, 2.0, 4.0], [0, 1, 0, 0])
    assert sample["proximal_logprobs"] is None, "not zero: the step made one update"
    waited = [row["value"] for row in rows(folder, "metrics") if row["name"] == "time/wait"]
    assert waited == [2.0] * STEPS
    assert list(tmp_path.glob(".trinity-export-*")) == []


def test_many_rows_are_written_part_by_part(stage: JobStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "_ROWS", 5)
    export(stage, tmp_path / "out")
    samples = parquet.ParquetFile(tmp_path / "out/samples.parquet")
    assert samples.metadata.num_rows == STEPS * GROUPS * ROLLOUTS
    assert samples.metadata.num_row_groups == 5
    assert "token_ids" not in samples.schema_arrow.names


def test_a_run_without_experiences_has_the_rest(stage: JobStage, tmp_path: Path) -> None:
    (stage.folder / "buffer/experience_buffer.jsonl").unlink()
    export(stage, tmp_path / "out")
    assert rows(tmp_path / "out", "samples") == []
    assert len(rows(tmp_path / "out", "steps")) == STEPS


@pytest.mark.parametrize("damage", ['"reward": "high"', '"rollout": 1e400', '"step": 3, "metrics": [1]'])
def test_a_damaged_experience_is_named_and_nothing_is_left(damage: str, stage: JobStage, tmp_path: Path) -> None:
    with (stage.folder / "buffer/experience_buffer.jsonl").open("a") as file:
        file.write(f'{{"step": 4, {damage}}}\n')
    with pytest.raises(RunError, match="samples: "):
        export(stage, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.glob(".trinity-export-*")) == []


def test_a_folder_that_holds_something_is_refused(stage: JobStage, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no empty folder"):
        export(stage, tmp_path)
    (tmp_path / "empty").mkdir()
    export(stage, tmp_path / "empty")


def test_a_missing_extra_is_named(stage: JobStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # so that its import fails
    with pytest.raises(RunError, match=re.escape("needs pyarrow: pip install -e '.[parquet]'")):
        export(stage, tmp_path / "out")


def test_the_documented_columns_are_those_of_the_files(repository: Path) -> None:
    listed = {}
    for line in (repository / "docs/export.md").read_text().splitlines():
        if match := re.match(r"\| `(\w+)\.parquet` \| [^|]* \| ([^|]*) \|", line):
            listed[match[1]] = re.findall(r"`(\w+)`", match[2])
    tokens = {"samples": [*TABLES["samples"], *TOKENS]}
    assert listed == {name: list(columns) for name, columns in TABLES.items()} | tokens


def test_the_documented_questions_are_answered(
    stage: JobStage, tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(stage, tmp_path / "out")
    monkeypatch.chdir(tmp_path / "out")
    answers = [
        duckdb.sql(question).fetchall()
        for question in re.findall(r"```sql\n(.*?)```", (repository / "docs/export.md").read_text(), re.DOTALL)
    ]
    staleness, same, times, doubled = answers
    assert staleness == [(0, STEPS * GROUPS, 0.5)]
    assert same == []
    assert times == [("time/wait", 2.0), ("time/step", 1.0)]
    assert doubled == []
