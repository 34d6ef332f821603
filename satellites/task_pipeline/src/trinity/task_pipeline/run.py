"""The pipeline: read, filter, score, order, cut, write."""

import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trinity.config.errors import ConfigError, Problem
from trinity.config.plan import expand, make_plan
from trinity.config.schema import Config
from trinity.config.schema.buffer import TasksetConfig
from trinity.config.schema.pipeline import TaskPipelineConfig
from trinity.data import datasets, images
from trinity.data.data_files import FORMS, files_of_split
from trinity.data.datasets import DatasetError, Row
from trinity.task_pipeline import data_juicer, output
from trinity.task_pipeline.base import Candidate, Context, Input
from trinity.task_pipeline.checks import KEY, check_task_pipeline
from trinity.task_pipeline.names import OPERATORS, SCORE_OPERATORS
from trinity.task_pipeline.output import Manifest
from trinity.task_pipeline.scores import SCORES


@dataclass(frozen=True)
class PipelineStep:
    """Row counts before and after one operator, `min_score` or `top_k`."""

    name: str
    rows_in: int
    rows_out: int
    seconds: float


@dataclass(frozen=True)
class ProcessedTaskset:
    """One training taskset. `key` is its place in the YAML. `reused` is true for a file of an earlier start."""

    key: str
    name: str
    output: Path
    rows_in: int
    rows_out: int
    steps: tuple[PipelineStep, ...]
    seconds: float
    reused: bool


@dataclass(frozen=True)
class TaskPipelineResult:
    """All training tasksets of a stage, in the YAML's order. Empty for a stage without a task pipeline."""

    tasksets: tuple[ProcessedTaskset, ...] = ()

    @property
    def rows_in(self) -> int:
        return sum(taskset.rows_in for taskset in self.tasksets)

    @property
    def rows_out(self) -> int:
        return sum(taskset.rows_out for taskset in self.tasksets)

    @property
    def seconds(self) -> float:
        return sum(taskset.seconds for taskset in self.tasksets)


@dataclass(frozen=True)
class _Place:
    """A path with rows, and its key in the YAML."""

    key: str
    path: str
    split: str = ""
    subset: str = ""


@dataclass(frozen=True)
class _Work:
    """One taskset to process."""

    key: str
    taskset: TasksetConfig
    places: tuple[_Place, ...]
    output: Path


class _Refused(ValueError):
    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def run_pipeline(
    config: Config, job_dir: Path, source: str = "<config>", scratch: Path | None = None
) -> TaskPipelineResult:
    """Process each training taskset of a stage into a file. A file that the same pipeline made before is kept.

    With the folder `scratch`, new files are written there. Raises ConfigError with all problems.
    """
    pipeline = config.data_processor.task_pipeline
    if pipeline is None or config.mode not in ("both", "train"):
        return TaskPipelineResult()
    problems, done = list(check_task_pipeline(config)), []
    if not problems:
        project = Path(config.checkpoint_root_dir).expanduser().absolute() / config.project
        for work in _works(config, pipeline, job_dir):
            try:
                done.append(_process(pipeline, work, project, scratch))
            except _Refused as error:
                problems.append(error.problem)
    if problems:
        raise ConfigError(source, problems)
    return TaskPipelineResult(tuple(done))


def with_outputs(config: Config, result: TaskPipelineResult) -> Config:
    """The stage with the output files in place of its tasksets, and without a task pipeline."""
    if not result.tasksets:
        return config
    explorer_input = config.buffer.explorer_input
    given = [explorer_input.taskset] if explorer_input.taskset else explorer_input.tasksets
    changed = [
        taskset.model_copy(update={"path": str(made.output), "split": "train", "subset_name": None})
        for taskset, made in zip(given, result.tasksets, strict=True)
    ]
    update: dict[str, Any] = {"taskset": changed[0]} if explorer_input.taskset else {"tasksets": changed}
    buffer = config.buffer.model_copy(update={"explorer_input": explorer_input.model_copy(update=update)})
    processor = config.data_processor.model_copy(update={"task_pipeline": None})
    return config.model_copy(update={"buffer": buffer, "data_processor": processor})


def run_stages(config: Config, source: str = "<config>") -> tuple[Config, tuple[TaskPipelineResult, ...]]:
    """The whole document after the pipelines of all its stages, and their results. Raises ConfigError."""
    stages, results = expand(config), []
    for index, stage in enumerate(stages):
        results.append(run_pipeline(stage, make_plan(stage).job_dir, source))
        stages[index] = with_outputs(stage, results[index])
    if not config.stages:
        return stages[0], tuple(results)
    changed = [
        given.model_copy(update={"buffer": stage.buffer, "data_processor": stage.data_processor})
        if result.tasksets
        else given
        for given, stage, result in zip(config.stages, stages, results, strict=True)
    ]
    return config.model_copy(update={"stages": changed}), tuple(results)


@contextmanager
def previewed(config: Config, job_dir: Path, source: str = "<config>") -> Iterator[tuple[Config, TaskPipelineResult]]:
    """Yields the stage after its pipeline. New files are in a temporary folder until the block ends."""
    with tempfile.TemporaryDirectory(prefix="trinity-tasks-") as folder:
        result = run_pipeline(config, job_dir, source, Path(folder))
        yield with_outputs(config, result), result


def describe(result: TaskPipelineResult, with_paths: bool = True) -> Iterator[str]:
    """Yields a line for each taskset. A preview has no paths, because its files are temporary."""
    for taskset in result.tasksets:
        counts = "".join(f", {step.name} {step.rows_out}" for step in taskset.steps)
        how = "made before" if taskset.reused else f"{taskset.seconds:.1f} s"
        place = f": {taskset.output}" if with_paths else ""
        rows = f"{taskset.rows_in} rows{counts}; {taskset.rows_out} rows remain"
        yield f"task pipeline of {taskset.name}: {rows} ({how}){place}"


def _works(config: Config, pipeline: TaskPipelineConfig, job_dir: Path) -> list[_Work]:
    source, tasksets = config.buffer.explorer_input, make_plan(config).tasksets
    names: list[str] = []
    for index, taskset in enumerate(tasksets):
        name = re.sub(r"[^\w.-]", "_", taskset.name)
        names.append(f"{name}-{index}" if name in names else name)
    works = []
    for index, (taskset, name) in enumerate(zip(tasksets, names, strict=True)):
        key = "buffer.explorer_input." + ("taskset" if source.taskset else f"tasksets.{index}")
        if not pipeline.inputs:
            places = [_Place(f"{key}.path", taskset.path, taskset.split, taskset.subset_name or "")]
        else:
            chosen = range(len(pipeline.inputs)) if len(tasksets) == 1 else [index]
            places = [_Place(f"{KEY}.inputs.{i}", pipeline.inputs[i]) for i in chosen]
        works.append(_Work(key, taskset, tuple(places), _output(pipeline, job_dir, name, len(tasksets) > 1)))
    return works


def _output(pipeline: TaskPipelineConfig, job_dir: Path, name: str, several: bool) -> Path:
    """<output> for one taskset, <stem>-<name>.<suffix> for several, <name>.jsonl in an output folder."""
    given = Path(pipeline.output).expanduser().absolute() if pipeline.output else job_dir / "buffer" / "tasks.jsonl"
    if given.suffix not in output.SUFFIXES:
        return given / f"{name}.jsonl"
    return given.with_name(f"{given.stem}-{name}{given.suffix}") if several else given


def _process(pipeline: TaskPipelineConfig, work: _Work, project: Path, scratch: Path | None) -> ProcessedTaskset:
    begin = time.monotonic()
    fields = tuple(pipeline.target_fields) or (work.taskset.format.prompt_key,)
    about = {
        "operators": [{"name": operator.name, "args": operator.args} for operator in pipeline.operators],
        "target_fields": list(fields),
        "priority_weights": dict(pipeline.priority_weights),
        "top_k": pipeline.top_k,
        "min_score": pipeline.min_score,
    }
    inputs = [_input(place, work) for place in work.places]
    with _naming(f"{KEY}.output"):
        found = _made_before(pipeline, work, about, [one.digest for one in inputs])
    if found is not None:
        steps = tuple(PipelineStep(**step) for step in found.steps)
        rows_in = sum(one["rows"] for one in found.inputs)
        return ProcessedTaskset(
            work.key, work.taskset.name, work.output, rows_in, len(found.rows), steps, found.seconds, reused=True
        )
    candidates, inputs = _read(work, inputs)
    rows_in, context = len(candidates), Context(fields, tuple(inputs), project, pipeline.num_process)
    candidates, steps = _apply(pipeline, candidates, context)
    manifest = Manifest(
        pipeline=about,
        inputs=[_about(one) for one in inputs],
        rows=[candidate.number for candidate in candidates],
        steps=[asdict(step) for step in steps],
        seconds=round(time.monotonic() - begin, 3),
        digest="",
    )
    target = scratch / work.output.name if scratch else work.output
    with _naming(f"{KEY}.output"):
        output.write(target, [candidate.row for candidate in candidates], manifest)
    return ProcessedTaskset(
        work.key, work.taskset.name, target, rows_in, len(candidates), steps, manifest.seconds, reused=False
    )


@contextmanager
def _naming(key: str) -> Iterator[None]:
    """Turns errors of data in this block into a refusal that names this key."""
    try:
        yield
    except DatasetError as error:
        raise _Refused(error.at(key)) from error
    except ModuleNotFoundError as error:
        raise _Refused(Problem(key, f"needs {error.name}; `pip install {error.name}`")) from error
    except OSError as error:
        raise _Refused(Problem(key, f"cannot be used: {error}")) from error


def _input(place: _Place, work: _Work) -> Input:
    """Path, digest and date of an input; its rows are read later. Raises _Refused."""
    path = Path(place.path).expanduser()
    if not path.exists():
        local = path.is_absolute() or place.path.startswith((".", "~")) or path.suffix or place.path.count("/") != 1
        why = "does not exist" if local else "is no file or folder here, and hub datasets cannot be processed"
        what = f"{place.path!r} {why}; give a local file ({FORMS}), or a folder of them"
        raise _Refused(Problem(place.key, what))
    if not path.is_dir() and not path.is_file():  # a pipe might never end
        raise _Refused(Problem(place.key, f"{place.path!r} is neither a file nor a folder"))
    with _naming(place.key):
        folder = path.is_dir()
        files = files_of_split(path, place.split or "train", place.subset or None) if folder else [path]
        digest, changed = output.digest_of(files), max(file.stat().st_mtime for file in files)
    if folder and work.output.parent.resolve() in {file.parent.resolve() for file in files}:
        what = f"{str(work.output)!r} would lie among the files of {place.path!r} and might be read with them; "
        raise _Refused(Problem(f"{KEY}.output", f"{what}give a place outside of that folder"))
    return Input(
        path=path.resolve(),
        split=place.split if folder else "",
        subset=place.subset if folder else "",
        digest=digest,
        first=0,
        rows=0,
        changed=changed,
    )


def _read(work: _Work, inputs: Sequence[Input]) -> tuple[list[Candidate], list[Input]]:
    rows: list[Row] = []
    counted = []
    for place, one in zip(work.places, inputs, strict=True):
        with _naming(place.key):
            found = datasets.read(str(one.path), place.split or "train", place.subset or None)
        counted.append(replace(one, first=len(rows), rows=len(found)))
        key = work.taskset.format.image_key
        folder = one.path if one.path.is_dir() else one.path.parent  # of relative paths of images
        rows.extend({**row, key: images.with_folder(row[key], folder)} if key in row else row for row in found)
    return [Candidate(number, row) for number, row in enumerate(rows)], counted


def _about(one: Input) -> dict[str, Any]:
    return {
        "path": str(one.path),
        "split": one.split,
        "subset": one.subset,
        "digest": one.digest,
        "first": one.first,
        "rows": one.rows,
    }


def _made_before(
    pipeline: TaskPipelineConfig, work: _Work, about: dict[str, Any], digests: Sequence[str]
) -> Manifest | None:
    """The manifest of a file that this pipeline made from this input. Returns None without a file."""
    if not work.output.exists():
        return None
    manifest = output.read_manifest(work.output)
    if manifest is None:
        why = "and no task pipeline made it"
    elif not work.output.is_file() or output.digest_of([work.output]) != manifest.digest:
        why = "and was changed since a task pipeline made it"
    else:
        why = manifest.differs(about, digests)
    if not why:
        return manifest
    other = "another output" if pipeline.output else "the run another name"
    raise _Refused(Problem(f"{KEY}.output", f"{str(work.output)!r} exists already, {why}; delete it, or give {other}"))


def _apply(
    pipeline: TaskPipelineConfig, candidates: list[Candidate], context: Context
) -> tuple[list[Candidate], tuple[PipelineStep, ...]]:
    """The rows that all operators keep, in the order of their priority."""
    steps: list[PipelineStep] = []
    for index, operator in enumerate(pipeline.operators):
        name, begin = operator.name, time.monotonic()
        if name in SCORE_OPERATORS:
            continue
        key = f"{KEY}.operators.{index}"
        with _naming(key):
            if name in OPERATORS:
                left = OPERATORS[name].model_validate(operator.args).apply(candidates, context)
            else:
                left = data_juicer.apply(name, operator.args, candidates, context)
        if not left:
            raise _Refused(Problem(key, f"{name} leaves none of {len(candidates)} rows; its args are {operator.args}"))
        steps.append(PipelineStep(name, len(candidates), len(left), round(time.monotonic() - begin, 3)))
        candidates = left
    if any(pipeline.priority_weights.values()):
        candidates, more = _order(pipeline, candidates, context)
        steps += more
    if pipeline.top_k >= 0:
        steps.append(PipelineStep("top_k", len(candidates), min(pipeline.top_k, len(candidates)), 0.0))
        candidates = candidates[: pipeline.top_k]
    return candidates, tuple(steps)


def _order(
    pipeline: TaskPipelineConfig, candidates: list[Candidate], context: Context
) -> tuple[list[Candidate], list[PipelineStep]]:
    """Rows by the weighted sum of their scores, highest first. Equal rows keep the order of the input."""
    begin, totals = time.monotonic(), [0.0] * len(candidates)
    places = {operator.name: index for index, operator in enumerate(pipeline.operators)}
    for score, weight in sorted(pipeline.priority_weights.items()):
        if not weight:
            continue
        index = places.get(f"{score}_score")
        args = {} if index is None else pipeline.operators[index].args
        with _naming(f"{KEY}.priority_weights.{score}" if index is None else f"{KEY}.operators.{index}"):
            values = SCORES[score].model_validate(args).values(candidates, context)
        totals = [total + weight * value for total, value in zip(totals, values, strict=True)]
    totals = [round(total, 12) for total in totals]  # sums that are equal on paper are ties
    order = sorted(range(len(candidates)), key=lambda place: (-totals[place], candidates[place].number))
    steps = [PipelineStep("priority", len(candidates), len(candidates), round(time.monotonic() - begin, 3))]
    if pipeline.min_score is not None:
        order = [place for place in order if totals[place] >= pipeline.min_score]
        steps.append(PipelineStep("min_score", len(candidates), len(order), 0.0))
        if not order:
            what = (
                f"is {pipeline.min_score}, which leaves none of {len(candidates)} rows; the best has {max(totals):.4g}"
            )
            raise _Refused(Problem(f"{KEY}.min_score", what))
    return [candidates[place] for place in order], steps
