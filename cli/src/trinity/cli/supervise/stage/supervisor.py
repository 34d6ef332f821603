"""`trinity run`: check, lock, start, watch, sum up. Ctrl-C and SIGTERM end every child."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import structlog

from trinity.cli.supervise.checks.disk import disk_advice, disk_problems
from trinity.cli.supervise.checks.hub_models import fetch_models
from trinity.cli.supervise.checks.preflight import check_inputs, machine_problems
from trinity.cli.supervise.checks.task_rows import names_for
from trinity.cli.supervise.processes.devices import Placement, busy_gpus, place
from trinity.cli.supervise.stage.display import Display, Pages, make_display
from trinity.cli.supervise.stage.outcome import closing, last_lines
from trinity.cli.supervise.stage.stage import EXIT_SPENT, Stage
from trinity.config import Config, ConfigError, Plan, Problem, expand, flat, load, make_plan
from trinity.config.checks.weights import FOLDER
from trinity.config.workflows import EPISODE_WORKFLOWS, R3L_WORKFLOWS
from trinity.plugins import satellites
from trinity.reading import job as jobs
from trinity.reading import run_record
from trinity.reading.accounts.budget import Budget
from trinity.reading.children import Child, stop_all
from trinity.reading.ending import Ending, Interrupted, ended_by_signals
from trinity.reading.errors import RunError, expected_text, first_of
from trinity.reading.nats import NatsAccess
from trinity.reading.processes import open_nats
from trinity.reading.render import near
from trinity.runtime import files
from trinity.runtime.broker import Broker
from trinity.runtime.devices import visible_gpus
from trinity.runtime.errors import NotFound, PermissionDenied
from trinity.runtime.names import RunNames, run_id
from trinity.weights.checkpoint_manifest import verify_model
from trinity.weights.checkpoints import complete_steps, newest_model

log = structlog.get_logger(__name__)

_STOP_SECONDS = 2.0
_POLL_SECONDS = 1.0
_KILLED_SECONDS = 5.0
_READ_SECONDS = 15.0  # pages keep the buffer that reads a run for 10 s
_OF_THE_FOLDER = {"checkpoint_root_dir", "project", "group", "name"}  # keys by which a run is found


def run(config: Config, source: str, only: str = "", wait_seconds: float | None = None) -> None:
    """Runs all stages of a configuration, or only the stage `only`, once the stages before it are finished.

    `wait_seconds`: how long `only` waits for them; None: synchronizer.sync_timeout. Raises ConfigError before a process
    starts, RunError afterwards.
    """
    if only and only not in (names := [stage.stage_name for stage in config.stages]):
        raise RunError(f"--stage {only}: {source} has {', '.join(names) or 'no stages'}", 2)
    if only and not config.continue_from_checkpoint:
        raise RunError(f"--stage {only}: with continue_from_checkpoint: false each command begins another run", 2)
    config = jobs.fresh_name(config, time.strftime("%Y%m%d%H%M%S"))
    job = jobs.Job(config)
    run_record.check_folder(job.folder)
    if any(stage.data_processor.task_pipeline is not None for stage in expand(config)):
        pipeline = satellites.find("task_pipeline")
        config, processed = pipeline.run_stages(config, source)
        for line in (line for result in processed for line in pipeline.describe(result)):
            print(line)
    todo = _unfinished(config, source)
    deadline = time.monotonic() + (config.synchronizer.sync_timeout if wait_seconds is None else wait_seconds)
    if only:
        todo = [name for name in todo if name == f"{config.name}/{only}"]
    if not todo:
        print(f"nothing left to do: {job.folder} is finished (raise total_steps or total_epochs to continue)")
        if changed := _changed_keys(config, only):
            print(f"without effect on it: {', '.join(changed)}; name=... begins another run with them")
        return
    if only:
        _wait_for_stages_before(config, source, only, deadline)
    lock, read_until = job.lock(), time.monotonic() + _READ_SECONDS
    while not lock.acquire():
        reads = lock.doing() == jobs.READS
        # The stage before has its last checkpoint, and still evaluates; or `trinity ui` and others read.
        if time.monotonic() < (deadline if only else read_until if reads else 0.0):
            time.sleep(_POLL_SECONDS)
            continue
        if reads:
            raise RunError(f"process {lock.owner()} reads {job.folder}; end it, or try again after it")
        raise RunError(f"{job.folder} is in use by a live run (process {lock.owner()}); `trinity status` shows it")
    try:
        if (budget := Budget(config.budget.gpu_hours, job.folder)).is_spent():
            raise RunError(budget.text(), EXIT_SPENT)
        run_record.mark_folder(job.folder)
        jobs.identify(job.folder, starts_services=True)
        jobs.begin(job.folder)
        fetch_models(make_plan(expand(config)[0]))
        asyncio.run(_supervise(config, source, job, only))
    except Interrupted:
        raise
    except (Exception, BaseExceptionGroup) as error:
        reason = first_of(error)
        try:
            jobs.mark_failed(job.folder, expected_text(reason) or f"{type(reason).__name__}: {reason}")
        except OSError as unwritten:  # a full disk hides no reason
            print(f"failed.json cannot be written ({unwritten}); the reason of the end:", file=sys.stderr)
        raise
    finally:
        lock.release()


def _unfinished(config: Config, source: str) -> list[str]:
    """Returns the names of unfinished stages. Checks the first of them against model and data.

    The model of a later stage is made by the stage before it, so only its data is checked.
    """
    todo: list[str] = []
    for stage in expand(config):
        plan = make_plan(stage)
        if todo:
            plan = make_plan(stage.model_copy(update={"model": expand(config)[0].model}))
        last = check_inputs(plan, source)
        if jobs.finished_step(plan.job_dir) < last:
            todo.append(stage.name)
            if problems := [*_missing_packages(plan), *disk_problems(plan), *_moved_rows(plan)]:
                raise ConfigError(source, problems)
    return todo


def _changed_keys(config: Config, only: str) -> list[str]:
    """Returns the keys with other values than those of the finished stages. The values themselves may be secrets."""
    changed = set[str]()
    for number, stage in enumerate(expand(config)):
        if only in ("", stage.name.rpartition("/")[2]):
            made_before = {"model.model_path"} if number else set()  # the model that the stage before it makes
            changed |= _changes(make_plan(stage)) - made_before
    return sorted(changed)


def _changes(plan: Plan) -> set[str]:
    """Returns the keys with other values than at the last start of this stage."""
    file = plan.job_dir / "config.json"
    if not file.exists():
        return set()
    now, had = flat(plan.config), flat(load(file, plugins_loaded=False))
    return {key for key in now.keys() | had.keys() if now.get(key) != had.get(key)} - _OF_THE_FOLDER


def _moved_rows(plan: Plan) -> Iterable[Problem]:
    """Checks that the steps of a dataset keep their number of rows. Another number would skip or repeat rows."""
    sizes = {"buffer.train_batch_size", "buffer.batch_size"}
    for key in sorted(_changes(plan) & sizes) if plan.offline else ():
        had = make_plan(load(plan.job_dir / "config.json", plugins_loaded=False)).groups_per_step
        if had != plan.groups_per_step:
            what = f"makes steps of {plan.groups_per_step} rows, and {near(plan.job_dir)} began with steps of {had}"
            yield Problem(key, f"{what}; keep it, begin another run by name=..., or remove the folder")
            return


def _missing_packages(plan: Plan) -> Iterable[Problem]:
    """Checks packages of environments. They load sympy, so they are imported only for workflows that play episodes."""
    played = {"tool_call_workflow", *EPISODE_WORKFLOWS, *R3L_WORKFLOWS}
    if not any(
        names_for(plan, f".{key}", taskset)[0] in played for key, taskset in plan.config.buffer.explorer_input.by_key()
    ):
        return []
    from trinity.cli.supervise.checks.task_environments import missing_packages

    return missing_packages(plan)


def _wait_for_stages_before(config: Config, source: str, stage: str, deadline: float) -> None:
    """Waits until the stages before it have saved their last step.

    Raises RunError at the deadline (`time.monotonic`).
    """
    first = expand(config)[0].model
    for known, expanded in zip(config.stages, expand(config), strict=True):
        if known.stage_name == stage:
            return
        plan = make_plan(expanded.model_copy(update={"model": first}))
        last, said = check_inputs(plan, source), ""
        while (saved := _saved_step(plan.job_dir)) < last:
            state = f"stage {known.stage_name}, which has saved step {max(saved, 0)} of {last} in {plan.job_dir}"
            if time.monotonic() > deadline:
                raise RunError(f"stage {stage} has waited long enough for {state}; --wait sets the seconds")
            if state != said:
                print(f"stage {stage} waits for {state}", flush=True)
            said = state
            time.sleep(_POLL_SECONDS)


def _saved_step(folder: Path) -> int:
    """Returns the step at which a stage finished, or that of its newest checkpoint with a model; -1 without one."""
    found = newest_model(folder)
    return max(jobs.finished_step(folder), found[0] if found is not None else -1)


async def _supervise(config: Config, source: str, job: jobs.Job, only: str) -> None:
    stop = Ending()
    others: list[Child] = []
    with ended_by_signals(stop):
        try:
            with make_display() as display:
                nats = await open_nats(job, others, stop)
                if not stop.is_set():
                    async with await nats.connect("trinity-run", job.token) as broker:
                        await run_record.check(broker, job.token)
                        await _refuse_second(job)
                        await _refuse_steps_of_another_folder(config, job, broker)
                    pages = Pages(config, job.folder, display.say)
                    try:
                        await _run_stages(config, source, job, nats, others, display, stop, only, pages)
                    finally:
                        await pages.close()
        finally:
            job.remove_record("main")
            await stop_all(others, _STOP_SECONDS, stop.at_once)


async def _refuse_steps_of_another_folder(config: Config, job: jobs.Job, broker: Broker) -> None:
    """Raises RunError if NATS has steps of the run and the folder none: a new model would learn those, of an older
    one. Checkpoints in a store and forks continue in a new folder.
    """
    stages = expand(config)
    stored = any({*stage.trainer.checkpoint_storage} - {FOLDER} for stage in stages)
    continues = stored or jobs.is_job(job.folder) or (job.folder / "fork.yaml").exists()
    for stage in stages if os.environ.get("TRINITY_NATS_URL") and not continues else []:
        run = run_id(stage.project, stage.name, stage.group)
        with contextlib.suppress(NotFound, PermissionDenied):
            if (await broker.state(RunNames(run).batches_stream)).last_sequence:
                what = f"NATS has steps of {stage.project}/{stage.name}, and {near(job.folder)} has no run"
                raise RunError(f"{what}; give its job folder by checkpoint_root_dir, or another name by name=...", 2)


async def _refuse_second(job: jobs.Job) -> None:
    """Raises RunError if another machine runs the job on this NATS. Services of a killed command end within seconds."""
    if not os.environ.get("TRINITY_NATS_URL"):
        return
    deadline = time.monotonic() + _KILLED_SECONDS
    while (about := (await run_record.look_for_run(job, offline=True))[1]) is not None:
        if time.monotonic() > deadline:
            what = f"the run {about.title} is live elsewhere, with its trainer at {about.addresses.trainer}"
            raise RunError(f"{what}; join it by mode=train_node or mode=explore, or choose another name", 2)
        await asyncio.sleep(_POLL_SECONDS)


async def _run_stages(
    config: Config,
    source: str,
    job: jobs.Job,
    nats: NatsAccess,
    others: list[Child],
    display: Display,
    stop: Ending,
    only: str,
    pages: Pages,
) -> None:
    begin = time.monotonic()
    parts: list[dict[str, Any]] = []
    previous: Path | None = None
    stages = expand(config)
    names = [stage.stage_name for stage in config.stages]
    todo = stages[: names.index(only) + 1] if only else stages
    for stage_config in todo:
        plan = make_plan(_with_model(stage_config, previous))
        previous = plan.job_dir
        if only and stage_config is not todo[-1]:
            parts += [part] if (part := jobs.finished_summary(plan.job_dir)) else []
            continue
        last = check_inputs(plan, source)
        if jobs.finished_step(plan.job_dir) >= last:
            display.say(f"stage {plan.config.name} is finished, skipped")
            parts.append(jobs.finished_summary(plan.job_dir))
            continue
        if problems := [*machine_problems(plan), *disk_problems(plan), *_moved_rows(plan)]:
            raise ConfigError(source, problems)
        placement = place(plan, visible_gpus(), job.taken_gpus())
        changed = _changes(plan)
        stage = Stage(job, plan, nats, placement, display, last, is_last=stage_config is stages[-1])
        stage.prepare()
        display.say(_opening(plan, placement, last))
        if changed and (step := max(complete_steps(plan.job_dir), default=0)):
            display.say(f"the stage continues after step {step} with other values of {', '.join(sorted(changed))}")
        for sentence in filter(None, [*disk_advice(plan), await asyncio.to_thread(busy_gpus, placement)]):
            display.say(f"warning: {sentence}")
        await pages.start()
        part = await stage.run(others, stop)
        if stop.is_set():
            return
        # The earlier, shorter part of a resumed stage.
        part["wall_seconds"] += float(jobs.finished_summary(plan.job_dir).get("wall_seconds", 0.0))
        jobs.mark_finished(plan.job_dir, last, part)
        parts.append(part)
        display.say(f"stage {plan.config.name} is finished: {closing(part)}")
    if todo[-1] is not stages[-1]:
        return  # a summary says that the run is finished
    summary = _summary(config, parts, time.monotonic() - begin)
    files.write_json(job.folder / "summary.json", summary)
    for line in last_lines(job.folder, previous, summary):
        display.say(line)


def _with_model(config: Config, previous: Path | None) -> Config:
    """Starts a later stage from the last model of the one before it.

    Raises InvalidInput for files that no trainer wrote.
    """
    if previous is None:
        return config
    found = newest_model(previous)
    if found is None:
        problem = Problem("stages", f"the stage before {config.name} left no model in {previous}")
        raise ConfigError(str(previous), [problem])
    if not config.allow_unverified_checkpoint:
        verify_model(found[1])
    return config.model_copy(update={"model": config.model.model_copy(update={"model_path": str(found[1])})})


def _opening(plan: Plan, placement: Placement, last: int) -> str:
    gpus = dict.fromkeys(placement.explorer + placement.trainer)
    where = "CPU" if placement.device == "cpu" else f"GPUs {','.join(gpus)}"
    if split := placement.split:
        where += f", which engine and trainer share ({split.engine:.1f} and {split.trainer:.1f} GiB of each)"
    kind = plan.config.algorithm.algorithm_type
    size = plan.groups_per_step
    unit = "rows" if plan.offline else f"groups of {plan.config.algorithm.repeat_times}"
    return (
        f"stage {plan.config.name}: {kind}, {last} steps of {size} {unit}, on {where}; "
        f"logs in {near(plan.job_dir / 'log')}"
    )


def _summary(config: Config, parts: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Returns the last stage's values at the top level, and all stages below."""
    main = {key: value for key, value in parts[-1].items() if key not in ("stage", "evaluations")}
    main["wall_seconds"] = round(max(seconds, sum(part["wall_seconds"] for part in parts)), 1)
    return {"project": config.project, "name": config.name, **main, "stages": parts}
