"""`trinity run` with mode bench: evaluate the checkpoints of a job, one after the other.

It starts a small run below <job>/bench: NATS, buffer, environment, sync service and explorer, but no trainer. This
process makes each checkpoint the next weight version and waits for its evaluation. The job is only read, except that
weights which a checkpoint lacks in Hugging Face form are converted first. Without a checkpoint only the base model is
evaluated.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trinity.cli.supervise.checks.preflight import check_inputs
from trinity.cli.supervise.processes import services
from trinity.cli.supervise.processes.devices import place
from trinity.cli.supervise.stage.display import Display, make_display
from trinity.cli.supervise.stage.progress import starting
from trinity.config import Config, Plan, dump, expand, make_plan
from trinity.config.run_record import Addresses
from trinity.plugins import satellites
from trinity.reading import job as jobs
from trinity.reading.children import Child, stop_all
from trinity.reading.client import NoAnswer, Sync, Watcher
from trinity.reading.ending import Ending, ended_by_signals
from trinity.reading.errors import RunError
from trinity.reading.processes import open_nats
from trinity.reading.render import table
from trinity.runtime import files, names, rpc
from trinity.runtime.devices import visible_gpus
from trinity.weights.checkpoint_manifest import verify, verify_model
from trinity.weights.checkpoints import CONVERTED, checkpoint_folder, has_weights, model_folder, step_of
from trinity.weights.manifest import Manifest, manifest_of_folder

_POLL_SECONDS = 1.0
_SYNC_SECONDS = 60.0
_STOP_SECONDS = 6.0

Keep = Callable[[list[dict[str, Any]]], None]  # results of one model, as soon as they are known


@dataclass(frozen=True)
class Candidate:
    """A model to evaluate. Step 0 is the base model."""

    step: int
    folder: Path


def bench(config: Config, source: str) -> None:
    """Evaluates, prints a table, and writes <job>/bench/<time>/bench.json after each model.

    Raises ConfigError or RunError. An interrupted or failed evaluation ends after the table of the earlier ones.
    """
    last_stage = expand(config)[-1]
    folder = make_plan(last_stage).job_dir
    stamp = time.strftime("%Y%m%d-%H%M%S")
    own = last_stage.model_copy(update={"mode": "bench", "name": f"{last_stage.name}/bench/{stamp}", "stages": []})
    plan = make_plan(own)
    check_inputs(plan, source)
    candidates = _candidates(plan, folder)
    file = plan.job_dir / "bench.json"
    results: list[dict[str, Any]] = []

    def keep(found: list[dict[str, Any]]) -> None:
        results.extend(found)
        files.write_json(file, {"job": str(folder), "results": results})

    try:
        asyncio.run(_bench(plan, jobs.Job(own), candidates, jobs.Job(config).taken_gpus(), keep))
    finally:
        if results:
            print(f"{render(results)}\nresults: {file}", flush=True)


def _candidates(plan: Plan, folder: Path) -> list[Candidate]:
    """Returns the base model if requested, and the job's checkpoints in order, or only the newest if requested.

    Raises InvalidInput for a checkpoint with files that its trainer did not write.
    """
    explorer = plan.config.explorer
    steps = sorted(step for path in folder.glob("global_step_*") if (step := step_of(path)) is not None)
    if explorer.bench_on_latest_checkpoint:
        steps = steps[-1:]
    if not steps and not explorer.eval_on_startup:
        problem = f"{folder} has no checkpoint (global_step_<n>) to evaluate"
        raise RunError(f"{problem}, and explorer.eval_on_startup: false leaves the base model out", code=2)
    unverified = plan.config.allow_unverified_checkpoint
    lacking = [step for step in steps if not has_weights(model_folder(folder, step))]
    for step in lacking if not unverified else ():
        verify(checkpoint_folder(folder, step), CONVERTED)
    if lacking:
        convert = satellites.find("convert")
        if convert is None:
            needed = f"{folder} has checkpoints that are not in Hugging Face form: {', '.join(map(str, lacking))}"
            raise RunError(f"{needed}; they are converted by {satellites.missing('convert')}", 2)
        base_model = Path(plan.config.model.model_path).expanduser()
        convert(folder, base_model if base_model.is_dir() else None, ",".join(map(str, lacking)), unverified)
        still = [str(step) for step in lacking if not has_weights(model_folder(folder, step))]
        if still:
            raise RunError(f"checkpoints {', '.join(still)} of {folder} have no weights and cannot be converted")
    for step in steps if not unverified else ():
        verify_model(model_folder(folder, step))
    base = [Candidate(0, Path(plan.config.model.model_path))] if explorer.eval_on_startup else []
    return base + [Candidate(step, model_folder(folder, step)) for step in steps]


def _what(candidates: list[Candidate]) -> str:
    if [one.step for one in candidates] == [0]:
        return f"the base model {candidates[0].folder}, as the job folder has no checkpoint"
    return f"{len(candidates)} model(s)"


async def _bench(plan: Plan, job: jobs.Job, candidates: list[Candidate], taken: set[str], keep: Keep) -> None:
    stop = Ending("the same command evaluates all from the beginning")
    others: list[Child] = []
    children: list[Child] = []
    jobs.identify(job.folder, starts_services=True)
    with ended_by_signals(stop), make_display() as display:
        try:
            nats = await open_nats(job, others, stop)
            config_file, log_dir = plan.job_dir / "config.json", plan.job_dir / "log"
            files.write_json(config_file, dump(plan.config), mode=0o600)
            children, addresses = services.infrastructure(plan, config_file, nats, log_dir, job.folder)
            placement = place(plan, visible_gpus(), taken)
            children.append(services.explorer(plan, config_file, nats, addresses, log_dir, placement))
            display.say(f"evaluating {_what(candidates)}; logs in {log_dir}")
            await _evaluate_all(plan, children, addresses, candidates, display, stop, keep)
        finally:
            await stop_all([*children, *others], _STOP_SECONDS)


async def _evaluate_all(
    plan: Plan,
    children: list[Child],
    addresses: Addresses,
    candidates: list[Candidate],
    display: Display,
    stop: asyncio.Event,
    keep: Keep,
) -> None:
    run = names.run_id(plan.config.project, plan.config.name, plan.config.group)
    for child in children:
        child.start()
    keepers = [asyncio.create_task(child.keep_running(asyncio.Event())) for child in children]
    watcher = Watcher(run, Addresses(addresses.buffer, "", addresses.sync, ""))
    try:
        await _publish(addresses.sync, Manifest(run, 0, 0, (), (), (), time.time(), plan.config.model.model_path))
        for candidate in candidates:
            if candidate.step:
                manifest = await asyncio.to_thread(manifest_of_folder, run, candidate.step, candidate.folder)
                await _publish(addresses.sync, manifest)
            found = await _evaluation(candidate.step, plan, children, keepers, watcher, display, stop)
            if found:
                keep(found)
            for result in found:
                display.say(f"step {result['step']} {result['taskset']}: {_figures(result['metrics'])}")
            if stop.is_set():
                break
    finally:
        for keeper in keepers:
            keeper.cancel()
        await watcher.close()


async def _publish(address: str, manifest: Manifest) -> None:
    """Publishes a manifest as the LIVE version; waits for a sync service that is starting."""
    deadline = asyncio.get_running_loop().time() + _SYNC_SECONDS
    async with rpc.channel(address) as channel:
        while True:
            try:
                await Sync(channel, manifest.run).publish(manifest)
                return
            except RunError as error:
                if not isinstance(error, NoAnswer) or asyncio.get_running_loop().time() > deadline:
                    raise RunError(f"step {manifest.step} cannot be served: {error}") from None
            await asyncio.sleep(_POLL_SECONDS)


async def _evaluation(
    step: int,
    plan: Plan,
    children: list[Child],
    keepers: "list[asyncio.Task[str]]",
    watcher: Watcher,
    display: Display,
    stop: asyncio.Event,
) -> list[dict[str, Any]]:
    """Returns the results of a step, one for each taskset, once all are complete."""
    expected = {taskset.name for taskset in plan.eval_tasksets}
    while not stop.is_set():
        view = await watcher.refresh()
        display.show(view, f"bench, step {step}", starting=starting(children))
        evaluations = view.buffer.evaluations if view.buffer is not None else []
        found = {one.taskset: dict(one.metrics) for one in evaluations if one.step == step}
        if found.keys() >= expected:
            return [{"step": step, "taskset": name, "metrics": found[name]} for name in sorted(expected)]
        for keeper in keepers:
            if keeper.done():
                raise RunError(keeper.result())
        await asyncio.sleep(_POLL_SECONDS)
    return []


def _figures(metrics: dict[str, float]) -> str:
    shown = sorted(name for name in metrics if name.startswith(("accuracy/", "answered/", "reward/")))
    return ", ".join(f"{name} {metrics[name]:.4f}" for name in shown)


def render(results: list[dict[str, Any]]) -> str:
    """Returns a table with a row for each step and taskset, and a column for each metric."""
    metrics = sorted({name for result in results for name in result["metrics"] if not name.endswith("_task_count")})
    columns = {"step": lambda one: one["step"] or "base", "taskset": lambda one: one["taskset"]}
    return table(results, columns | {name: partial(_metric, name) for name in metrics})


def _metric(name: str, result: dict[str, Any]) -> str:
    return f"{result['metrics'][name]:.4f}" if name in result["metrics"] else ""
