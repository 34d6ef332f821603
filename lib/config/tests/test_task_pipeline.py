"""Rows of tasksets are filtered, scored, ordered and cut before a run starts, the same way every time."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity.config import Config, ConfigError, make_plan, parse
from trinity.config.datasets import DatasetError, read
from trinity.config.task_pipeline import (
    TaskPipelineResult,
    check_task_pipeline,
    describe,
    operator_args,
    previewed,
    run_pipeline,
    run_stages,
    with_outputs,
)
from trinity.config.task_pipeline import output as outputs
from trinity.config.task_pipeline import run as pipeline_run
from trinity.config.task_pipeline.base import Context, Entry
from trinity.config.task_pipeline.names import OPERATORS, SCORE_OPERATORS
from trinity.config.task_pipeline.scores import SCORES
from trinity.config.task_pipeline.texts import normalised, quality, repeated_share, symbol_share, text_of

Rows = list[dict[str, Any]]
KEY = "data_processor.task_pipeline"
CONTEXT = Context(fields=("q",))


def rows_of(*texts: str) -> Rows:
    return [{"q": text, "a": str(number)} for number, text in enumerate(texts)]


def left(name: str, rows: Rows, context: Context = CONTEXT, **args: Any) -> list[int]:
    """Numbers of the rows that an operator leaves."""
    entries = [Entry(number, row) for number, row in enumerate(rows)]
    return [entry.number for entry in OPERATORS[name].model_validate(args).apply(entries, context)]


def scores(name: str, rows: Rows, context: Context = CONTEXT, **args: Any) -> list[float]:
    entries = [Entry(number, row) for number, row in enumerate(rows)]
    found = SCORES[name].model_validate(args).values(entries, context)
    assert all(0 <= value <= 1 for value in found)
    return [round(value, 6) for value in found]


def write(file: Path, rows: Rows) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def config_of(root: Path, tasksets: Any, pipeline: dict[str, Any] | None, **more: Any) -> Config:
    """A run with these tasksets (one path, or a list of sections) and this pipeline."""
    source = {"tasksets": tasksets} if isinstance(tasksets, list) else {"taskset": {"path": str(tasksets)}}
    for taskset in source.get("tasksets", [source.get("taskset")]):
        taskset.setdefault("format", {"prompt_key": "q", "response_key": "a"})
    text = {
        "project": "p",
        "name": "n",
        "checkpoint_root_dir": str(root / "jobs"),
        "model": {"model_path": "m", "max_prompt_tokens": 16, "max_response_tokens": 16},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 2},
        "buffer": {"batch_size": 2, "explorer_input": source},
        "data_processor": {"task_pipeline": pipeline},
    }
    return parse(yaml.safe_dump({**text, **more}))


def go(config: Config) -> TaskPipelineResult:
    return run_pipeline(config, make_plan(config).job_dir)


def made(config: Config) -> Rows:
    """The rows that a run with one taskset gets."""
    processed = with_outputs(config, go(config))
    taskset = processed.buffer.explorer_input.taskset
    assert taskset is not None
    return list(read(taskset.path, taskset.split, taskset.subset_name))


def problems(config: Config) -> dict[str, str]:
    with pytest.raises(ConfigError) as refused:
        go(config)
    return {problem.path: problem.message for problem in refused.value.problems}


def checked(tmp_path: Path, pipeline: dict[str, Any], **more: Any) -> dict[str, str]:
    config = config_of(tmp_path, "tasks.jsonl", None, **more)
    section = type(config.data_processor).model_validate({"task_pipeline": pipeline})
    found = check_task_pipeline(config.model_copy(update={"data_processor": section}))
    return {problem.path: problem.message for problem in found}


# Operators


@pytest.mark.parametrize(
    ("name", "args", "texts", "expected"),
    [
        ("text_length_filter", {}, ["short", "long enough"], [1]),
        ("text_length_filter", {"min_len": 2, "max_len": 3}, ["a", "ab", "abc", "abcd", "数学题"], [1, 2, 4]),
        ("words_num_filter", {"min_num": 2, "max_num": 3}, ["one", "one two", " a  b\nc ", "a b c d"], [1, 2]),
        ("alphanumeric_filter", {}, ["a...", "a....", "", "数学？"], [0, 3]),
        ("alphanumeric_filter", {"min_ratio": 0, "max_ratio": 0.5}, ["ab", "a.", ""], [1, 2]),
        ("symbols_filter", {"max_ratio": 0.25}, ["abc#", "ab##", "a, b! c?", "", "é√√√"], [0, 2, 3]),
        ("repetition_filter", {"ngram": 1}, ["a a a", "a b a", "", "a b c"], [1, 2, 3]),
        ("repetition_filter", {"unit": "character", "ngram": 2, "max_ratio": 0.0}, ["abab", "abcd", "x"], [1, 2]),
        ("exact_dedup", {}, ["What is  1+1?", "what is 1+1?", "What is 1+2?", "Ｗhat is 1+1?"], [0, 2]),
        ("exact_dedup", {"lowercase": False}, ["A b", "a b", "A\nb"], [0, 1]),
        ("exact_dedup", {"ignore_punctuation": True}, ["is it 1?", "Is it: 1", "is it 2?"], [0, 2]),
    ],
)  # fmt: skip
def test_texts_are_filtered_by_length_content_and_repetition(
    name: str, args: dict[str, Any], texts: list[str], expected: list[int]
) -> None:
    assert left(name, rows_of(*texts), **args) == expected


def test_target_fields_are_joined_and_an_operator_may_choose_its_own() -> None:
    rows = [{"q": "abc", "a": "de"}, {"q": "abc"}, {"q": "abc", "a": None}, {"q": "a", "a": "cdefg"}]
    both = Context(fields=("q", "a"))
    assert left("text_length_filter", rows, both, min_len=6) == [0, 3]  # "abc\nde"
    assert left("text_length_filter", rows, both, min_len=3, fields=["q"]) == [0, 1, 2]
    with pytest.raises(DatasetError, match="no row has a column 'question'; they have q, a"):
        left("text_length_filter", rows, Context(fields=("question",)))
    assert text_of([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]) == "hi\nyo"
    assert text_of({"a": [1, "é"]}) == '{"a": [1, "é"]}' and text_of(None) == "" and text_of(3) == "3"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"op": "==", "value": 3}, [2]),
        ({"value": "x"}, [3]),
        ({"op": "!=", "value": 3}, [0, 1, 3, 4, 5]),
        ({"op": "in", "value": [1, "x"]}, [0, 3]),
        ({"op": "exists"}, [0, 1, 2, 3]),
        ({"op": "exists", "value": False}, [4, 5]),
    ],
)
def test_rows_are_filtered_by_a_column(args: dict[str, Any], expected: list[int]) -> None:
    rows: Rows = [{"v": 1}, {"v": 2}, {"v": 3}, {"v": "x"}, {"v": None}, {"w": 1}]
    assert left("field_filter", rows, column="v", **args) == expected


@pytest.mark.parametrize(("op", "expected"), [("<", [0]), ("<=", [0, 1]), (">", [2]), (">=", [1, 2])])
def test_numbers_of_a_column_are_compared_also_inside_of_it(op: str, expected: list[int]) -> None:
    rows: Rows = [{"v": 1}, {"v": 2.0}, {"v": 3}, {"v": None}]
    assert left("field_filter", rows, column="v", op=op, value=2) == expected
    nested: Rows = [{"meta": row} for row in rows]
    assert left("field_filter", nested, column="meta.v", op=op, value=2) == expected
    assert left("field_filter", [{"meta.v": row["v"]} for row in rows], column="meta.v", op=op, value=2) == expected


def test_a_column_may_contain_a_text_or_an_element() -> None:
    rows: Rows = [{"v": "algebra"}, {"v": ["algebra", "easy"]}, {"v": "geometry"}]
    assert left("field_filter", rows, column="v", op="contains", value="algebra") == [0, 1]


def test_values_that_cannot_be_compared_are_refused_with_their_row() -> None:
    rows: Rows = [{"v": 1}, {"v": "Level 5"}]
    with pytest.raises(DatasetError, match=r"row 1: 'v' is 'Level 5', which cannot be compared: > 3"):
        left("field_filter", rows, column="v", op=">", value=3)
    with pytest.raises(DatasetError, match="no row has a column 'lvl'; they have v"):
        left("field_filter", rows, column="lvl", value=3)


def test_a_sample_is_drawn_by_its_seed_and_keeps_the_order() -> None:
    rows = rows_of(*map(str, range(100)))
    first = left("sample", rows, size=10)
    assert first == sorted(first) == left("sample", rows, size=10) and len(set(first)) == 10
    assert left("sample", rows, size=10, seed=7) != first
    assert len(left("sample", rows, ratio=0.25)) == 25 and len(left("sample", rows, size=1000)) == 100


def grams(text: str, size: int) -> set[str]:
    text = normalised(text)
    return {text[i : i + size] for i in range(max(1, len(text) - size + 1))}


@settings(max_examples=150, deadline=None)
@given(
    texts=st.lists(st.text("ab c", max_size=12), max_size=14),
    size=st.integers(1, 3),
    threshold=st.sampled_from([0.1, 0.34, 0.5, 0.75, 0.8, 1.0]),
)
def test_near_duplicates_are_those_that_comparing_all_pairs_finds(
    texts: list[str], size: int, threshold: float
) -> None:
    kept: list[int] = []
    for number, text in enumerate(texts):
        sets = [(grams(text, size), grams(texts[other], size)) for other in kept]
        if all(len(a & b) / len(a | b) < threshold - 1e-12 for a, b in sets):
            kept.append(number)
    assert left("near_dedup", rows_of(*texts), ngram=size, threshold=threshold) == kept


def test_near_duplicates_by_words() -> None:
    texts = [
        "Tom has three apples and two pears",
        "tom has three  apples and two plums",
        "A train leaves at noon today",
    ]
    assert left("near_dedup", rows_of(*texts), unit="word", ngram=2, threshold=0.7) == [0, 2]
    assert left("near_dedup", rows_of(*texts), unit="word", ngram=2, threshold=0.8) == [0, 1, 2]


# Scores


def test_difficulty_is_the_logarithm_of_the_length() -> None:
    rows = rows_of("abc", "abcdefg", "abcdefghijklmno")  # 3, 7, 15 characters: logarithms of 4, 8, 16
    assert scores("difficulty", rows) == [0.0, 0.5, 1.0]
    assert scores("difficulty", rows, reverse=True) == [1.0, 0.5, 0.0]
    assert scores("difficulty", rows_of("abc", "xyz")) == [0.0, 0.0]


def test_difficulty_is_a_pass_rate_or_a_level() -> None:
    rows: Rows = [{"rate": 0.25, "level": "hard"}, {"rate": 0.5, "level": "easy"}, {"rate": 0.75, "level": "medium"}]
    assert scores("difficulty", rows, column="rate") == [0.0, 0.5, 1.0]
    assert scores("difficulty", rows, column="rate", low=0, high=1, reverse=True) == [0.75, 0.5, 0.25]
    assert scores("difficulty", rows, column="rate", low=0.5) == [0.0, 0.0, 1.0]
    assert scores("difficulty", rows, column="level", levels=["easy", "medium", "hard"]) == [1.0, 0.0, 0.5]
    with pytest.raises(DatasetError, match=r"row 0: 'level' is 'hard', must be a number; levels gives an order"):
        scores("difficulty", rows, column="level")
    with pytest.raises(DatasetError, match=r"row 2: 'level' is 'medium', none of levels"):
        scores("difficulty", rows, column="level", levels=["easy", "hard"])
    with pytest.raises(DatasetError, match=r"row 0: 'pass' is missing"):
        scores("quality", rows, column="pass")


def test_quality_is_the_mean_of_three_shares() -> None:
    assert symbol_share("ab#%") == 0.5 and repeated_share("a b a b a b", "word", 2) == pytest.approx(3 / 5)
    assert quality("seven plus two") == 1.0
    assert quality("") == quality(" \n") == 0.0
    assert quality("ab##") == pytest.approx((0.5 + 1 + 0.5) / 3)
    assert quality("x y x y x y") == pytest.approx((1 + 0.5 + 1) / 3)
    assert scores("quality", rows_of("seven plus two", "ab##")) == [1.0, round(2 / 3, 6)]


def test_what_data_juicer_said_of_every_row_goes_before_the_formula() -> None:
    entries = [
        Entry(number, row, {"llm_difficulty_score": 0.2 + number}) for number, row in enumerate(rows_of("a", "b"))
    ]
    score = SCORES["difficulty"]()
    assert score.values(entries, CONTEXT) == [0.2, 1.0]
    assert score.values([*entries, Entry(2, {"q": "abcdef"})], CONTEXT)[0] == 0.0  # it did not see the third


def test_diversity_is_the_distance_to_what_was_chosen_before() -> None:
    rows = rows_of("aaaa bbbb", "aaaa bbbb", "cccc dddd", "aaaa bbbb cccc", "")
    found = scores("diversity", rows)
    assert found[0] == 1.0 and found[1] == 0.0
    assert found[2] > found[3] > 0 and found[4] == 1.0
    assert scores("diversity", rows, centers=1)[1:3] == [0.0, found[2]]
    assert scores("diversity", rows[:1]) == [1.0] and scores("diversity", []) == []


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(st.text("abcd", min_size=1, max_size=9), min_size=1, max_size=12), centers=st.integers(1, 12))
def test_diversity_is_a_farthest_first_traversal(texts: list[str], centers: int) -> None:
    found = scores("diversity", rows_of(*texts), ngram=2, centers=centers)
    whole = scores("diversity", rows_of(*texts), ngram=2)
    assert found[0] == 1.0 and scores("diversity", rows_of(*texts, texts[0]), ngram=2)[-1] == 0.0
    best = sorted(whole, reverse=True)[:centers]
    assert sorted(found, reverse=True)[: len(best)] == best  # the first `centers` are chosen alike
    assert all(one >= other for one, other in zip(found, whole, strict=True))


def test_the_order_does_not_depend_on_the_number_of_threads() -> None:
    code = (
        "import random\nfrom trinity.config.task_pipeline.base import Context, Entry\n"
        "from trinity.config.task_pipeline.scores import SCORES\nrng = random.Random(1)\n"
        "texts = [' '.join(str(rng.randrange(50)) for _ in range(rng.randrange(900))) for _ in range(60)]\n"
        "rows = [Entry(number, {'q': text}) for number, text in enumerate(texts)]\n"
        "print(SCORES['diversity']().values(rows, Context(fields=('q',))))"
    )
    found = set()
    for threads in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
            env={**os.environ, "OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1


# The whole

ROWS = rows_of("one two three four", "one", "a b c d e f g h", "one two three", "One two  three", "nine ten eleven")


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
    assert (result.rows_in, result.rows_out, taskset.reused) == (6, 3, False) and result.seconds > 0
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
    assert problems(config) == {f"{KEY}.output": f"{said}made of other input{fix}"}
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
    assert checked(tmp_path, {"inputs": ["x.csv"]}) == {
        f"{KEY}.inputs.0": "is 'x.csv', must be a local file: .jsonl, .json, .parquet"
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
            "'./none.jsonl' does not exist; give a local jsonl, json or parquet file, or a folder of them",
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
    assert problem.path == KEY and "sft has no tasksets; give it in the stage that has" in problem.message


# Checks


@pytest.mark.parametrize(
    ("operator", "place", "said"),
    [
        ({"name": "text_lenght_filter"}, "name", "did you mean 'text_length_filter' or "),
        ({"name": "text_length_filter", "args": {"min_length": 3}}, "args.min_length", "has no such argument; did you"),
        ({"name": "text_length_filter", "args": {"min_len": -1}}, "args.min_len", "is -1: input should be greater"),
        ({"name": "text_length_filter", "args": {"min_len": "3"}}, "args.min_len", "is '3': input should be a valid"),
        ({"name": "text_length_filter", "args": {"min_len": True}}, "args", "min_len is true, must be a number"),
        ({"name": "text_length_filter", "args": {"fields": "q"}}, "args.fields", "is 'q': input should be a valid"),
        ({"name": "field_filter"}, "args", "field_filter needs column"),
        ({"name": "field_filter", "args": {"column": "c"}}, "args", "value is missing; '==' compares with it"),
        ({"name": "field_filter", "args": {"column": "c", "op": "in", "value": 3}}, "args", "in takes a list"),
        ({"name": "field_filter", "args": {"column": "c", "op": "is"}}, "args.op", "is 'is': input should be '=='"),
        ({"name": "field_filter", "args": {"column": "c", "op": "exists", "value": 0}}, "args", "takes true or false"),
        ({"name": "sample"}, "args", "needs either size or ratio"),
        ({"name": "sample", "args": {"size": 2, "ratio": 0.5}}, "args", "needs either size or ratio"),
        ({"name": "near_dedup", "args": {"threshold": 1.5}}, "args.threshold", "is 1.5: input should be less than or"),
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
        ({"priority_weights": {"quality": math.inf}}, "priority_weights.quality", "is inf, must be a finite number"),
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
from trinity.config.datasets import DatasetError
from trinity.config.task_pipeline import data_juicer
from trinity.config.task_pipeline.base import Context, Entry
from trinity.config.task_pipeline.scores import SCORES
entries = [Entry(number, {"q": text, "a": number}) for number, text in enumerate(("a", "abcdefgh", "abcd"))]
entries[1].row["x"] = 1
one, two = Context(fields=("q",)), Context(fields=("q", "a"))
left = data_juicer.apply("llm_difficulty_score_filter", {"min_score": 0.4}, entries, one)
said = []
for name, context in (("upper_mapper", two), ("needy_mapper", one)):
    try:
        data_juicer.apply(name, {}, entries, context)
    except DatasetError as error:
        said.append(error.message)
print(json.dumps({
    "known": data_juicer.known(),
    "left": [[entry.number, entry.row] for entry in left],
    "difficulty": SCORES["difficulty"]().values(left, one),
    "upper": [entry.row for entry in data_juicer.apply("upper_mapper", {}, entries, one)],
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
    assert "upper_mapper edits the text, which is made of several columns; give text_key" in found["said"][0]
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
        "import sys, trinity.config.task_pipeline\n"
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
