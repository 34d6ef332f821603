"""The task pipeline on files: outputs, restarts, usage, stages."""

import base64
import json
import os
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from support.fakes.data.task_pipeline import (
    KEY,
    ROWS,
    Rows,
    checked,
    config_of,
    go,
    made,
    problems,
    rows_of,
    scores,
    write,
)
from trinity.config import Config, ConfigError, make_plan, parse
from trinity.data import images
from trinity.data.datasets import read
from trinity.task_pipeline import (
    TaskPipelineResult,
    check_task_pipeline,
    describe,
    previewed,
    run_stages,
    with_outputs,
)
from trinity.task_pipeline import run as pipeline_run

pytestmark = pytest.mark.core

# The whole


def test_rows_are_filtered_ordered_and_cut(tmp_path: Path) -> None:
    pipeline = {
        "operators": [{"name": "text_length_filter", "args": {"min_len": 4}}, {"name": "exact_dedup"}],
        "priority_weights": {"difficulty": -1},
        "top_k": 3,
    }
    config = config_of(tmp_path, write(tmp_path / "tasks.jsonl", ROWS), pipeline)
    result = go(config)
    (taskset,) = result.tasksets
    assert [(s.name, s.rows_in, s.rows_out) for s in taskset.steps] == [
        ("text_length_filter", 6, 5), ("exact_dedup", 5, 4), ("priority", 4, 4), ("top_k", 4, 3),
    ]  # fmt: skip
    assert (result.rows_in, result.rows_out, taskset.reused) == (6, 3, False) and result.seconds >= 0
    assert taskset.output == tmp_path / "jobs/p/n/buffer/tasks.jsonl"
    assert [row["a"] for row in made(config)] == ["3", "2", "5"]
    assert made(config)[0] == ROWS[3]  # whole rows, as they were
    assert not next(describe(result, with_paths=False)).endswith("jsonl")
    (line,) = describe(result)
    assert line.startswith(
        "task pipeline of taskset_0: 6 rows, text_length_filter 5, exact_dedup 4, priority 4, top_k 3"
    )


def test_equal_rows_stay_in_their_order_and_weights_add_up(tmp_path: Path) -> None:
    rows = [{"q": "x", "hard": hard, "good": good} for hard, good in ((0, 1), (1, 0), (0.5, 0.5), (1, 1), (0, 0))]
    file = write(tmp_path / "tasks.jsonl", rows)
    operators = [{"name": f"{score}_score", "args": {"column": column}}
                 for score, column in (("difficulty", "hard"), ("quality", "good"))]  # fmt: skip
    for number, (hard, good, expected) in enumerate(
        [(1, 1, [3, 0, 1, 2, 4]), (0.1, 0.2, [3, 0, 2, 1, 4]), (-1, 1, [0, 2, 3, 4, 1]), (0.5, 0.5, [3, 0, 1, 2, 4])]
    ):
        weights = {"quality": good, "difficulty": hard}
        pipeline = {"operators": operators, "priority_weights": weights, "output": str(tmp_path / f"{number}.jsonl")}
        assert made(config_of(tmp_path, file, pipeline)) == [rows[row] for row in expected]


def test_rows_below_the_least_sum_are_left_out(tmp_path: Path) -> None:
    rows = [{"q": "x", "hard": hard} for hard in (0.0, 0.5, 1.0)]
    operators = [{"name": "difficulty_score", "args": {"column": "hard"}}]
    pipeline: dict[str, Any] = {"operators": operators, "priority_weights": {"difficulty": 2.0}, "min_score": 1.0}
    config = config_of(tmp_path, write(tmp_path / "tasks.jsonl", rows), pipeline)
    assert made(config) == [rows[2], rows[1]]
    said = problems(config_of(tmp_path, tmp_path / "tasks.jsonl", {**pipeline, "min_score": 3.0}, name="other"))
    assert said == {f"{KEY}.min_score": "is 3.0, which leaves none of 3 rows; the best has 2"}


def test_a_restart_goes_on_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = {"operators": [{"name": "sample", "args": {"size": 3}}]}
    config = config_of(tmp_path, write(tmp_path / "tasks.jsonl", ROWS), pipeline)
    first = go(config)
    before = first.tasksets[0].output.stat().st_mtime_ns
    monkeypatch.setattr(pipeline_run, "_apply", None)  # it is not even tried
    again = go(config)
    assert again.tasksets[0].reused and again.tasksets[0].output.stat().st_mtime_ns == before
    assert again.tasksets[0].steps == first.tasksets[0].steps and again.rows_out == first.rows_out == 3
    assert "made before" in next(describe(again))


def test_a_crash_between_manifest_and_file_is_made_good(tmp_path: Path) -> None:
    config = config_of(tmp_path, write(tmp_path / "tasks.jsonl", ROWS), {"top_k": 2})
    file = go(config).tasksets[0].output
    rows = file.read_bytes()
    file.unlink()
    assert not go(config).tasksets[0].reused and file.read_bytes() == rows


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_another_file_at_the_output_is_never_replaced(tmp_path: Path, suffix: str) -> None:
    source, output = write(tmp_path / "tasks.jsonl", ROWS), tmp_path / f"out/made.{suffix}"
    pipeline: dict[str, Any] = {"top_k": 2, "output": str(output)}
    output.parent.mkdir()
    output.write_text("precious")
    said = f"{str(output)!r} exists already, "
    fix = "; delete it, or give another output"
    config = config_of(tmp_path, source, pipeline)
    assert problems(config) == {f"{KEY}.output": f"{said}and no task pipeline made it{fix}"}
    assert output.read_text() == "precious"
    output.unlink()
    assert made(config) == ROWS[:2]
    assert problems(config_of(tmp_path, source, {**pipeline, "top_k": 3})) == {
        f"{KEY}.output": f"{said}made with other top_k{fix}"
    }
    other = {"operators": [{"name": "exact_dedup"}], "priority_weights": {"quality": 1.0}}
    assert problems(config_of(tmp_path, source, {**pipeline, **other})) == {
        f"{KEY}.output": f"{said}made with other operators, priority_weights{fix}"
    }
    write(source, ROWS[1:])
    assert problems(config) == {f"{KEY}.output": f"{said}made from other input{fix}"}
    write(source, ROWS)
    assert go(config).tasksets[0].reused
    output.write_bytes(output.read_bytes() + b"\n")
    assert problems(config) == {f"{KEY}.output": f"{said}and was changed since a task pipeline made it{fix}"}


def test_in_the_job_folder_another_name_is_the_fix(tmp_path: Path) -> None:
    source = write(tmp_path / "tasks.jsonl", ROWS)
    go(config_of(tmp_path, source, {"top_k": 2}))
    assert "; delete it, or give the run another name" in str(problems(config_of(tmp_path, source, {"top_k": 3})))
    assert made(config_of(tmp_path, source, {"top_k": 3}, name="m")) == ROWS[:3]


def test_tasksets_are_processed_each_on_its_own_and_evaluation_is_never_touched(tmp_path: Path) -> None:
    for name in ("x", "y"):
        write(tmp_path / f"{name}.jsonl", [{**row, "of": name} for row in ROWS])
    tasksets = [
        {"path": str(tmp_path / "x.jsonl"), "name": "easy/one"},
        {"path": str(tmp_path / "y.jsonl"), "weight": 2},
    ]
    config = config_of(tmp_path, tasksets, {"top_k": 2, "output": str(tmp_path / "out/made.jsonl")})
    evaluation = [{"path": str(tmp_path / "x.jsonl"), "name": "e"}]
    source = config.buffer.explorer_input
    source = type(source).model_validate({**source.model_dump(), "eval_tasksets": evaluation})
    config = config.model_copy(update={"buffer": config.buffer.model_copy(update={"explorer_input": source})})
    result = go(config)
    assert [t.output.name for t in result.tasksets] == ["made-easy_one.jsonl", "made-taskset_1.jsonl"]
    assert [t.key for t in result.tasksets] == ["buffer.explorer_input.tasksets.0", "buffer.explorer_input.tasksets.1"]
    processed = with_outputs(config, result)
    after = processed.buffer.explorer_input
    assert [read(t.path)[0]["of"] for t in after.tasksets] == ["x", "y"]
    assert [(t.name, t.weight, len(read(t.path))) for t in after.tasksets] == [("easy/one", 1, 2), ("", 2, 2)]
    assert after.eval_tasksets == config.buffer.explorer_input.eval_tasksets
    assert processed.data_processor.task_pipeline is None and go(processed) == TaskPipelineResult()


def test_inputs_take_the_place_of_the_paths(tmp_path: Path) -> None:
    files = [str(write(tmp_path / f"{name}.jsonl", rows)) for name, rows in (("x", ROWS[:2]), ("y", ROWS[2:3]))]
    pipeline: dict[str, Any] = {"inputs": files, "output": str(tmp_path / "made")}
    config = config_of(tmp_path, "owner/nowhere", pipeline)
    assert made(config) == ROWS[:3] and go(config).tasksets[0].output == tmp_path / "made/taskset_0.jsonl"
    config = config_of(tmp_path, [{"path": "a"}, {"path": "b"}], {**pipeline, "output": str(tmp_path / "two")})
    assert [t.rows_out for t in go(config).tasksets] == [2, 1]
    assert checked(tmp_path, {"inputs": ["x.xml"]}) == {
        f"{KEY}.inputs.0": "is 'x.xml', must be a local file: jsonl, json, csv, tsv, parquet or arrow"
    }
    with pytest.raises(ConfigError, match="has 3 files for 2 tasksets; give one for each"):
        go(config_of(tmp_path, [{"path": "a"}, {"path": "b"}], {"inputs": [*files, files[0]]}))


def test_a_folder_is_read_by_split_and_subset_and_never_written_into(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    write(folder / "main/train-0.jsonl", ROWS[:2])
    write(folder / "main/train-1.jsonl", ROWS[2:4])
    write(folder / "main/test.jsonl", ROWS[4:])
    taskset = {"path": str(folder), "subset_name": "main"}
    config = config_of(tmp_path, [taskset], {"top_k": 3})
    processed = with_outputs(config, go(config)).buffer.explorer_input.tasksets[0]
    assert read(processed.path, processed.split, processed.subset_name) == ROWS[:3]
    said = problems(config_of(tmp_path, [taskset], {"output": str(folder / "main/train.few.jsonl")}))
    assert "would lie among the files of" in said[f"{KEY}.output"]
    assert "give a place outside of that folder" in said[f"{KEY}.output"]


def test_parquet_is_read_and_written_with_the_columns_of_all_rows(tmp_path: Path) -> None:
    rows: Rows = [{"q": "a"}, {"q": "b", "extra": 1}]
    config = config_of(tmp_path, write(tmp_path / "t.jsonl", rows), {"output": str(tmp_path / "made.parquet")})
    assert made(config) == [{"q": "a", "extra": None}, {"q": "b", "extra": 1}]
    again = config_of(tmp_path, tmp_path / "made.parquet", {"output": str(tmp_path / "again.jsonl")})
    assert made(again) == made(config)
    write(tmp_path / "t.jsonl", [{"q": "a", "v": 1}, {"q": "b", "v": "x"}])
    said = problems(config_of(tmp_path, tmp_path / "t.jsonl", {"output": str(tmp_path / "mixed.parquet")}))
    assert (
        "the rows do not fit into parquet" in said[f"{KEY}.output"] and "end output in .jsonl" in said[f"{KEY}.output"]
    )


def test_images_survive(tmp_path: Path) -> None:
    """Their paths are relative to the folder of the dataset, and JSON has no bytes."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.png").write_bytes(b"an image")
    (tmp_path / "images").mkdir()
    parts = [{"type": "text", "text": "a.png"}, {"type": "image_url", "image_url": {"url": "a.png"}}]
    columns: list[Any] = [
        "a.png",
        b"an image",
        [{"bytes": b"an image", "path": "gone.png"}, {"bytes": None, "path": "a.png"}],
        {"path": "a.png"},
        [{"role": "user", "content": parts}],
        f"data:image/png;base64,{base64.b64encode(b'an image').decode()}",
    ]
    for number, value in enumerate(columns):
        rows = [{"q": "a", "image": value}]
        file = tmp_path / f"data/{number}.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        for suffix in ("jsonl", "parquet"):
            form = {"prompt_key": "q", "response_key": "a", "image_key": "image"}
            taskset = {"name": "t", "path": str(file), "format": form, "default_workflow_type": "simple_mm_workflow"}
            output = {"output": str(tmp_path / f"images/{number}.{suffix}")}
            (done,) = go(config_of(tmp_path, [taskset], output)).tasksets
            (row,) = read(str(done.output), "train")
            found = images.of_row(row, "image", tmp_path / "images")
            assert set(found) == {b"an image"}, (number, suffix)


def test_any_text_survives(tmp_path: Path) -> None:
    rows = rows_of("数学 \u2028 é", "half \ud800 a pair", '"\\\n')
    assert made(config_of(tmp_path, write(tmp_path / "t.jsonl", rows), {"top_k": 5})) == rows


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            "openai/gsm8k",
            "'openai/gsm8k' is no file or folder here, and hub datasets cannot be processed; give a local",
        ),
        (
            "./none.jsonl",
            "'./none.jsonl' does not exist; give a local file (jsonl, json, csv, tsv, parquet or arrow), or a folder",
        ),
    ],
)
def test_what_is_no_local_file_is_refused_by_its_key(tmp_path: Path, path: str, said: str) -> None:
    assert said in problems(config_of(tmp_path, path, {"top_k": 1}))["buffer.explorer_input.taskset.path"]
    inputs = {"inputs": [str(write(tmp_path / "t.jsonl", ROWS)), "./none.jsonl"]}
    assert "does not exist" in problems(config_of(tmp_path, "t", inputs))[f"{KEY}.inputs.1"]
    (tmp_path / "t.jsonl").write_text('{"a": 1}\n{"a": \n')
    assert "line 2: is not JSON" in problems(config_of(tmp_path, tmp_path / "t.jsonl", {}))[
        "buffer.explorer_input.taskset.path"
    ]  # fmt: skip


def test_what_goes_wrong_with_rows_names_the_operator(tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", ROWS)
    operators: list[dict[str, Any]] = [{"name": "exact_dedup"}, {"name": "text_length_filter", "args": {"min_len": 99}}]
    assert problems(config_of(tmp_path, file, {"operators": operators})) == {
        f"{KEY}.operators.1": "text_length_filter leaves none of 5 rows; its args are {'min_len': 99}"
    }
    operators = [{"name": "field_filter", "args": {"column": "level", "value": 1}}]
    said = problems(config_of(tmp_path, file, {"operators": operators}))
    assert said == {f"{KEY}.operators.0": "no row has a column 'level'; they have q, a"}
    said = problems(config_of(tmp_path, file, {"target_fields": ["x"], "priority_weights": {"quality": 1}}))
    assert said == {f"{KEY}.priority_weights.quality": "no row has a column 'x'; they have q, a"}
    operators = [{"name": "quality_score", "args": {"column": "q"}}]
    said = problems(config_of(tmp_path, file, {"operators": operators, "priority_weights": {"quality": 1}}))
    assert said == {f"{KEY}.operators.0": "row 0: 'q' is 'one two three four', must be a number"}


def test_an_output_that_cannot_be_written_is_a_problem_of_the_output(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    output = str(tmp_path / "file/made.jsonl")
    said = problems(config_of(tmp_path, write(tmp_path / "t.jsonl", ROWS), {"output": output}))
    assert "cannot be used: " in said[f"{KEY}.output"] and str(tmp_path / "file") in said[f"{KEY}.output"]


# How often earlier runs trained a row


def record(stage: Path, config: dict[str, Any] | Config, trained: list[tuple[int, str]]) -> None:
    """What a trainer and a supervisor leave in a stage's folder."""
    text = config.model_dump_json() if isinstance(config, Config) else json.dumps(config)
    stage.mkdir(parents=True, exist_ok=True)
    (stage / "config.json").write_text(text)
    lines = [{"step": step, "task_id": task, "rollout": rollout} for step, task in trained for rollout in range(2)]
    write(stage / "buffer/experience_buffer.jsonl", lines)


def test_usage_counts_the_steps_that_trained_a_row_in_earlier_runs(tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", rows_of(*"abcdef"))
    plain = config_of(tmp_path, file, None, name="plain")
    tasks = [(1, "taskset_0/0/0/0"), (1, "taskset_0/0/1/1"), (2, "taskset_0/1/6/0"), (2, "taskset_0/0/2/99")]
    record(make_plan(plain).job_dir, plain, [*tasks, tasks[0], (3, "other/0/0/5"), (3, "nothing")])
    ordered = config_of(tmp_path, file, {"priority_weights": {"difficulty": 1}, "top_k": 3,
                        "operators": [{"name": "difficulty_score", "args": {"column": "a", "low": 0, "high": 9}}]},
                        name="ordered")  # fmt: skip
    write(file, [{**row, "a": float(row["a"])} for row in rows_of(*"abcdef")])
    os.utime(file, (1, 1))
    processed = with_outputs(ordered, go(ordered))  # rows 5, 4, 3
    record(make_plan(ordered).job_dir / "stage", processed, [(1, "taskset_0/0/0/0"), (1, "taskset_0/0/1/1")])
    with (make_plan(plain).job_dir / "buffer/experience_buffer.jsonl").open("a") as cut:
        cut.write('{"step": 9, "task_id": "taskset_0/0/0/')
    config = config_of(tmp_path, file, {"priority_weights": {"usage_frequency": 1}})
    assert [row["q"] for row in made(config)] == ["a", "b", "e", "f", "c", "d"]  # 2, 1, 1, 1, 0, 0
    rare = config_of(tmp_path, file, {"priority_weights": {"usage_frequency": -1}}, name="rare")
    assert [row["q"] for row in made(rare)] == ["c", "d", "b", "e", "f", "a"]
    args = {"folders": [str(make_plan(ordered).job_dir)]}
    only = {"operators": [{"name": "usage_frequency_score", "args": args}], "priority_weights": {"usage_frequency": 1}}
    assert [row["q"] for row in made(config_of(tmp_path, file, only, name="only"))][:2] == ["e", "f"]
    elsewhere = config_of(tmp_path, file, {"priority_weights": {"usage_frequency": 1}}, project="elsewhere")
    assert [row["q"] for row in made(elsewhere)] == list("abcdef")


def test_what_cannot_be_told_apart_is_not_counted(tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", rows_of(*"abc"))
    plain = config_of(tmp_path, file, None, name="plain")
    record(make_plan(plain).job_dir, plain, [(1, "taskset_0/0/1/1")])
    record(tmp_path / "jobs/p/strange", {"buffer": []}, [(1, "taskset_0/0/1/2")])
    os.utime(make_plan(plain).job_dir / "config.json", (1, 1))  # the file was written after that run had begun
    config = config_of(tmp_path, file, {"priority_weights": {"usage_frequency": 1}})
    assert [row["q"] for row in made(config)] == list("abc")
    operators = [{"name": "usage_frequency_score", "args": {"folders": ["/none"]}}]
    pipeline = {"operators": operators, "priority_weights": {"usage_frequency": 1}}
    said = problems(config_of(tmp_path, file, pipeline, name="m"))
    assert said == {f"{KEY}.operators.0": "folder '/none' does not exist; folders are job folders of earlier runs"}


def test_usage_may_be_a_column(tmp_path: Path) -> None:
    assert scores("usage_frequency", [{"n": 2}, {"n": 4}, {"n": 0}], column="n") == [0.5, 1.0, 0.0]
    assert scores("usage_frequency", [{"n": 2}, {"n": 4}], column="n") == [
        0.5,
        1.0,
    ]  # of the greatest, not of the range


# Stages, previews, what is no business of the pipeline


def test_each_stage_has_its_own_pipeline(tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", ROWS)
    stages = [
        {"stage_name": "plain"},
        {"stage_name": "few", "data_processor": {"task_pipeline": {"top_k": 2}}},
    ]
    config = config_of(tmp_path, file, None, stages=stages)
    processed, results = run_stages(config)
    assert [result.rows_out for result in results] == [0, 2]
    assert processed.stages[0] == config.stages[0]
    buffer = processed.stages[1].buffer
    assert buffer is not None and buffer.explorer_input.taskset is not None
    assert buffer.explorer_input.taskset.path == str(tmp_path / "jobs/p/n/few/buffer/tasks.jsonl")
    assert parse(processed.model_dump_json()).model_dump() == processed.model_dump()  # what services read
    assert run_stages(processed)[1] == (TaskPipelineResult(), TaskPipelineResult())
    one, results = run_stages(config_of(tmp_path, file, {"top_k": 1}, name="one"))
    assert len(results) == 1 and one.data_processor.task_pipeline is None


def test_a_preview_leaves_nothing_behind(tmp_path: Path) -> None:
    config = config_of(tmp_path, write(tmp_path / "t.jsonl", ROWS), {"top_k": 2})
    job = make_plan(config).job_dir
    with previewed(config, job) as (processed, result):
        taskset = processed.buffer.explorer_input.taskset
        assert taskset is not None and read(taskset.path) == ROWS[:2] and result.rows_out == 2
    assert not job.exists() and not Path(taskset.path).exists()
    real = go(config).tasksets[0].output
    with previewed(config, job) as (_, result):
        assert result.tasksets[0].reused and result.tasksets[0].output == real
    real.write_text("other")
    with pytest.raises(ConfigError, match="was changed since"), previewed(config, job):
        pass


@pytest.mark.parametrize("mode", ["bench", "serve", "explore"])
def test_modes_that_train_nothing_process_nothing(tmp_path: Path, mode: str) -> None:
    config = config_of(tmp_path, tmp_path / "none.jsonl", {"top_k": 2}).model_copy(update={"mode": mode})
    assert go(config) == TaskPipelineResult()
    assert with_outputs(config, TaskPipelineResult()) is config


def test_an_algorithm_without_tasksets_cannot_have_one(tmp_path: Path) -> None:
    said = checked(tmp_path, {"top_k": 1}, algorithm={"algorithm_type": "grpo"})
    assert said == {}
    config = config_of(tmp_path, "t.jsonl", {"top_k": 1})
    config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"algorithm_type": "sft"})})
    (problem,) = check_task_pipeline(config)
    assert problem.path == KEY and "sft has no tasksets; set it in a stage with tasksets" in problem.message
