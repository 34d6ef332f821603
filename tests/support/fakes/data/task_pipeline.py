"""Rows, configs and runs of the task pipeline."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from trinity.config import Config, ConfigError, make_plan, parse
from trinity.data.datasets import read
from trinity.task_pipeline import (
    TaskPipelineResult,
    check_task_pipeline,
    run_pipeline,
    with_outputs,
)
from trinity.task_pipeline.base import Candidate, Context
from trinity.task_pipeline.names import OPERATORS
from trinity.task_pipeline.scores import SCORES

Rows = list[dict[str, Any]]
KEY = "data_processor.task_pipeline"
CONTEXT = Context(fields=("q",))


def rows_of(*texts: str) -> Rows:
    return [{"q": text, "a": str(number)} for number, text in enumerate(texts)]


ROWS = rows_of("one two three four", "one", "a b c d e f g h", "one two three", "One two  three", "nine ten eleven")


def left(name: str, rows: Rows, context: Context = CONTEXT, **args: Any) -> list[int]:
    """Numbers of the rows that an operator leaves."""
    candidates = [Candidate(number, row) for number, row in enumerate(rows)]
    return [candidate.number for candidate in OPERATORS[name].model_validate(args).apply(candidates, context)]


def scores(name: str, rows: Rows, context: Context = CONTEXT, **args: Any) -> list[float]:
    candidates = [Candidate(number, row) for number, row in enumerate(rows)]
    found = SCORES[name].model_validate(args).values(candidates, context)
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
    return parse(yaml.safe_dump({**text, **more}), checks=[check_task_pipeline])


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
