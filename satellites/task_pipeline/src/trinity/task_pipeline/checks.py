"""Checks of data_processor.task_pipeline that read no files."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trinity.config.errors import Problem, did_you_mean
from trinity.config.hints import problems_in
from trinity.config.schema import Config
from trinity.config.schema.pipeline import TaskPipelineConfig
from trinity.data.data_files import FORMS, is_data
from trinity.plugins.declarations import ALGORITHMS
from trinity.task_pipeline import data_juicer
from trinity.task_pipeline.names import SCORE_OPERATORS, known
from trinity.task_pipeline.output import SUFFIXES
from trinity.task_pipeline.scores import SCORES

KEY = "data_processor.task_pipeline"


def check_task_pipeline(config: Config) -> Iterator[Problem]:
    """Problems of one stage: unknown names and arguments, wrong values, settings without effect."""
    pipeline = config.data_processor.task_pipeline
    if pipeline is None:
        return
    algorithm = ALGORITHMS.get(config.algorithm.algorithm_type)
    if algorithm is not None and algorithm.offline:
        yield Problem(
            KEY,
            f"is given, but {config.algorithm.algorithm_type} has no tasksets; set it in a stage with tasksets: "
            "stages.<i>.data_processor",
        )
    yield from _check_operators(pipeline)
    yield from _check_priority(pipeline)
    yield from _check_files(pipeline, config)


def _check_operators(pipeline: TaskPipelineConfig) -> Iterator[Problem]:
    kinds, seen = known(), set()
    for index, operator in enumerate(pipeline.operators):
        place, name = f"{KEY}.operators.{index}", operator.name
        if name not in kinds:
            yield from _check_foreign(place, name, kinds)
            continue
        for argument, problem in problems_in(operator.args, kinds[name]):
            yield Problem(f"{place}.args.{argument}".rstrip("."), problem)
        if name in SCORE_OPERATORS:
            score = SCORE_OPERATORS[name].name
            if name in seen:
                yield Problem(f"{place}.name", f"is {name!r}, which another operator is already; a score is made once")
            if not pipeline.priority_weights.get(score):
                what = f"is {name!r}, which has no effect: priority_weights gives {score!r} no weight"
                yield Problem(f"{place}.name", what)
        seen.add(name)


def _check_foreign(place: str, name: str, kinds: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of a name that is not ours: it must be an operator of data-juicer."""
    installed = data_juicer.is_installed()
    theirs = data_juicer.known() if installed else []
    if name not in theirs:
        near = did_you_mean(name, [*kinds, *theirs], "")
        names = f"known: {', '.join(sorted(kinds))}; {'and those of data-juicer' if installed else data_juicer.INSTALL}"
        what = f"is {name!r}, which is not registered; {near}{' ' if near else ''}{names}"
        yield Problem(f"{place}.name", what)


def _check_priority(pipeline: TaskPipelineConfig) -> Iterator[Problem]:
    place = f"{KEY}.priority_weights"
    for score in pipeline.priority_weights:
        if score not in SCORES:
            near = did_you_mean(score, SCORES, f"known: {', '.join(sorted(SCORES))}")
            yield Problem(f"{place}.{score}", f"is no score; {near}")
    if pipeline.top_k == 0:
        yield Problem(f"{KEY}.top_k", "is 0, which keeps no row; -1 keeps all")
    if pipeline.min_score is not None and not any(pipeline.priority_weights.values()):
        yield Problem(
            f"{KEY}.min_score", f"is {pipeline.min_score}, but priority_weights has no score to compare with it"
        )


def _check_files(pipeline: TaskPipelineConfig, config: Config) -> Iterator[Problem]:
    source = config.buffer.explorer_input
    tasksets = 1 if source.taskset else len(source.tasksets)
    if pipeline.inputs and tasksets > 1 and len(pipeline.inputs) != tasksets:
        yield Problem(
            f"{KEY}.inputs",
            f"has {len(pipeline.inputs)} files for {tasksets} tasksets; give one for each, in their order",
        )
    for index, path in enumerate(pipeline.inputs):
        if not is_data(Path(path)):
            yield Problem(f"{KEY}.inputs.{index}", f"is {path!r}, must be a local file: {FORMS}")
    if pipeline.output is not None and Path(pipeline.output).suffix not in ("", *SUFFIXES):
        what = f"is {pipeline.output!r}, must end in {' or '.join(SUFFIXES)}, or in neither for a folder"
        yield Problem(f"{KEY}.output", what)
