"""`trinity replay`: train steps again from the ledger, and compare the result with the run.

A trainer begins at the run's newest checkpoint before the first step (the base model before step 1). A read-only buffer
serves it the same ledger entries from the same log. It publishes and commits nothing, and writes to
<stage>/replay/from_<step>/. Metrics of every step, and the last weights if the run kept a checkpoint of that step, are
compared bit for bit.

With --fresh the whole run is repeated from its first step, sampling included, in <stage>/replay/fresh/.
"""

import asyncio
import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from trinity.cli.commands.run import run
from trinity.cli.supervise.checks.preflight import check_model_folder
from trinity.cli.supervise.processes import services
from trinity.cli.supervise.processes.devices import Placement
from trinity.commands import AsJson, Overrides, command, group
from trinity.config import Config, ConfigError, dump, expand, load, make_plan
from trinity.config.run_record import Addresses
from trinity.lineage.bisect import bisect
from trinity.lineage.replay_report import Report, Step, Weights, circumstances, render
from trinity.reading.children import Child, stop_all
from trinity.reading.client import Buffer
from trinity.reading.errors import RunError
from trinity.reading.job import make_folder
from trinity.reading.reader import JobStage, any_buffer, ask, find_job_stage, read_only_buffer
from trinity.reading.render import to_json
from trinity.runtime import files, names
from trinity.runtime.devices import visible_gpus
from trinity.study.bisect import metrics_by_step
from trinity.weights.checkpoints import checkpoint_folder, complete_steps

app = group()

_STOP_SECONDS = 1.0  # nothing of a replay is worth waiting for
_POLL_SECONDS = 0.3


@dataclass(frozen=True)
class Wanted:
    """Steps `first` to `last` are trained from the checkpoint of step `begin`; 0: the base model."""

    first: int
    last: int
    begin: int

    @property
    def steps(self) -> range:
        """The steps that are trained."""
        return range(self.begin + 1, self.last + 1)


def find_trained(
    config: Path | None = None, job: Path | None = None, stage: str = "", nats: str = "", run: str = ""
) -> JobStage:
    """Like `find_job_stage`, for training steps again.

    For a run on NATS, --config adds the YAML and --job the job folder, by default the one below its
    checkpoint_root_dir.
    """
    if not (config and (nats or run)):
        return find_job_stage(config, job, stage, nats, run)
    found = find_job_stage(stage=stage, nats=nats, run=run)
    loaded = load(config, plugins_loaded=False)
    own = named_stage(loaded, found.stage)
    theirs = names.run_id(own.project, own.name, own.group)
    if theirs != found.run:
        raise RunError(f"--config {config} is of run {theirs}, and NATS says {found.run}: give the run's YAML", 2)
    whole = job.absolute() if job is not None else make_folder(loaded)
    folder = whole if own is loaded else whole / found.stage
    return replace(found, config=own, folders=(whole, folder), yaml=config)


def named_stage(config: Config, name: str) -> Config:
    """Returns the stage of that name, or the configuration itself if it has no such stage."""
    by_name = {one.stage_name: stage for one, stage in zip(config.stages, expand(config), strict=False)}
    return by_name.get(name, config)


@command(app, "replay", find_trained)
def replay(
    job_stage: JobStage,
    first: Annotated[int | None, typer.Option("--from-step", min=1, help="First step")] = None,
    overrides: Overrides = None,
    last: Annotated[int | None, typer.Option("--to-step", min=1, help="Last step; else the newest")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="All steps, sampling included (reproducible: true)")] = False,
    as_json: AsJson = False,
) -> int:
    """Train steps again from the ledger, and compare with what the run did."""
    check_given(job_stage)
    if fresh == (first is not None) or (fresh and last is not None):
        raise RunError("give --from-step K, with --to-step N or without; or only --fresh, for all steps", 2)
    if first is None:
        return _run_again(job_stage, overrides or [], as_json)
    trained = circumstances(job_stage.folder)
    newest = max(trained.keys() | metrics_by_step(job_stage.folder).keys(), default=0)
    if not newest and job_stage.nats_url:  # its job folder is not here
        newest = ask(any_buffer, job_stage, lambda reader: reader.buffer.newest_step())
    wanted = _wanted(job_stage, first, last, newest)
    placement, threads = placement_of(job_stage, wanted, trained)
    config = trainer_config(job_stage, overrides or [], _micro_batch_tokens(wanted, trained))
    check_model(job_stage, config)
    folder = new_folder(job_stage.folder, f"from_{first}")
    config_file = folder / "trainer.config.json"
    files.write_json(config_file, dump(config), mode=0o600)
    settings = {
        "REPLAY_FOLDER": str(folder),
        "REPLAY_FROM": str(first),
        "REPLAY_TO": str(wanted.last),
        **({"THREADS": str(threads)} if threads else {}),
    }
    if not as_json:
        print(_opening(job_stage, wanted, placement, folder), flush=True)
    groups = asyncio.run(_train(job_stage, wanted, config_file, placement, settings, folder, as_json))
    report = _report(job_stage, wanted, placement, folder, groups)
    files.write_json(folder / "replay.json", report.as_json())
    print(to_json(report.as_json()) if as_json else f"{render(report)}\nresults: {folder / 'replay.json'}")
    return 0 if report.identical else 1  # 1, too, if nothing could be compared


def _run_again(job_stage: JobStage, overrides: Sequence[str], as_json: bool) -> int:
    """Runs the stage again from its beginning, and shows the first difference. Returns exit code 1 if there is one."""
    config = job_stage.config
    if not config.reproducible or config.mode != "both":
        problem = f"--fresh: {job_stage.name} was run with reproducible: {str(config.reproducible).lower()}, mode: "
        raise RunError(f"{problem}{config.mode}; a run repeats with reproducible: true, mode: both", 2)
    root = new_folder(job_stage.folder, "fresh")
    given = [*overrides, f"checkpoint_root_dir={json.dumps(str(root))}", f"name={json.dumps(f'{config.name}-fresh')}"]
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        run(given, job_stage.config_file)
    again = make_plan(load(job_stage.config_file, given, plugins_loaded=False)).job_dir
    return bisect(job_stage.folder, again, as_json)


def _wanted(job_stage: JobStage, first: int, last: int | None, newest: int) -> Wanted:
    """Raises RunError for steps that the run has not trained, and without a checkpoint to begin at."""
    if not newest:
        raise RunError(f"{job_stage.name} has trained no step yet: nothing to train again")
    last = newest if last is None else last
    if not 1 <= first <= last <= newest:
        raise RunError(
            f"--from-step {first} --to-step {last}: {job_stage.name} has trained steps 1 to {newest}; "
            "both must be among them, the first not after the last",
            code=2,
        )
    kept = complete_steps(job_stage.folder)
    begin = max((step for step in kept if step < first), default=0)
    if first > 1 and not begin:
        others = f"; the run keeps {', '.join(map(str, kept))}: begin at {kept[0] + 1} or later" if kept else ""
        raise RunError(
            f"--from-step {first}: no checkpoint of a step before it in {job_stage.folder}{others}. "
            "--from-step 1 begins at the base model"
        )
    return Wanted(first, last, begin)


def check_given(job_stage: JobStage) -> None:
    """Raises RunError for a run that NATS names without a YAML: NATS has neither its algorithm nor its model."""
    if job_stage.nats_url and job_stage.yaml is None:
        raise RunError(
            "training again needs what NATS does not have: give the run's YAML by --config; after the options, "
            "model.model_path=... where the model is here; and for checkpoints and metrics the job folder by --job",
            2,
        )


def placement_of(job_stage: JobStage, wanted: Wanted, trained: dict[int, dict[str, Any]]) -> tuple[Placement, int]:
    """Returns the run's number and kind of ranks, and CPU threads. Raises RunError if this machine has fewer."""
    found = {(e.get("ranks"), e.get("device"), e.get("threads")) for e in map(trained.get, wanted.steps) if e}
    if len(found) > 1:
        kinds = " and ".join(sorted(f"{ranks} rank(s) on {device}" for ranks, device, _ in found))
        raise RunError(
            f"the run trained steps {wanted.steps[0]} to {wanted.last} with {kinds}; choose steps of one of them"
        )
    ranks, device, threads = found.pop() if found else (None, None, None)
    if wanted.begin:
        state = files.read_json(checkpoint_folder(job_stage.folder, wanted.begin) / "trainer_state.json")
        saved = state.get("world_size") if isinstance(state, dict) else None
        ranks = ranks or (saved if type(saved) is int else None)
    ranks = ranks or 1
    free = [card for card in visible_gpus() if card not in job_stage.whole_job().taken_gpus()]
    if (device or ("cuda" if free else "cpu")) == "cpu":
        return Placement("cpu", [], [], ranks), threads or 0
    if len(free) < ranks:
        raise RunError(f"the run trained with {ranks} rank(s) on GPUs; here {len(free)} GPU(s) are free")
    return Placement("cuda", [], free[:ranks], ranks), threads or 0


def _micro_batch_tokens(wanted: Wanted, trained: dict[int, dict[str, Any]]) -> int | None:
    """Returns the micro-batch size that the run noted for these steps; None if it noted none or several."""
    found = {entry.get("micro_batch_tokens") for entry in map(trained.get, wanted.steps) if entry}
    return found.pop() if len(found) == 1 else None


def trainer_config(job_stage: JobStage, overrides: Sequence[str], micro_batch_tokens: int | None = None) -> Config:
    """Returns the stage's configuration for a trainer, in the present folder of the job.

    micro_batch_tokens: used if neither the configuration nor the command line sets it.
    """
    config = named_stage(load(job_stage.config_file, overrides, plugins_loaded=False), job_stage.stage)
    below = make_plan(config).job_dir.relative_to(Path(config.checkpoint_root_dir).expanduser().absolute())
    if not str(job_stage.folder).endswith(f"/{below}"):
        raise RunError(f"{job_stage.folder} does not end in {below}, as the run's name says; it cannot have another")
    return config.model_copy(
        update={
            "mode": "train",
            "checkpoint_root_dir": str(job_stage.folder)[: -len(str(below)) - 1],
            "trainer": config.trainer.model_copy(
                update={
                    "save_hf_checkpoint": "last",
                    "max_token_len_per_gpu": config.trainer.max_token_len_per_gpu or micro_batch_tokens,
                }
            ),
            "buffer": config.buffer.model_copy(update={"save_experiences": False}),
            "monitor": config.monitor.model_copy(update={"monitor_type": "none", "monitor_args": None}),
        }
    )


def check_model(job_stage: JobStage, config: Config) -> None:
    """Raises ConfigError unless this machine has the model, as far as its path tells."""
    if problems := check_model_folder("model.model_path", config.model.model_path):
        raise ConfigError(str(job_stage.config_file), problems)


def new_folder(stage_folder: Path, name: str) -> Path:
    """Returns <stage>/replay/<name>, or the next free one with a number."""
    number = 1
    while True:
        folder = stage_folder / "replay" / (name if number == 1 else f"{name}_{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
        except OSError as error:
            raise RunError(f"{folder} cannot be made: {error.strerror}; --job names another job folder", 2) from None


def _opening(job_stage: JobStage, wanted: Wanted, placement: Placement, folder: Path) -> str:
    begin = f"the checkpoint of step {wanted.begin}" if wanted.begin else "the base model"
    where = f"{placement.trainer_ranks} rank(s) on {'the CPU' if placement.device == 'cpu' else 'GPUs'}"
    steps = f"steps {wanted.steps[0]} to {wanted.last}"
    return f"{job_stage.name}: training {steps} again from {begin}, {where}; logs in {folder / 'log'}"


async def _train(
    job_stage: JobStage,
    wanted: Wanted,
    config_file: Path,
    placement: Placement,
    settings: dict[str, str],
    folder: Path,
    quiet: bool,
) -> dict[int, int]:
    """Runs the trainer to its end. Returns the number of groups (or rows) of each step. Raises RunError if it fails."""
    async with read_only_buffer(job_stage, folder / "log") as reader:
        try:
            groups = await _check_ledger(reader.buffer, wanted)
        except RunError:
            shutil.rmtree(folder)  # nothing was trained
            raise
        addresses = Addresses(buffer=reader.address)
        child = services.trainer(config_file, addresses, folder / "log", placement, settings)
        await run_to_end(child, None if quiet else partial(_say_steps, folder, set()))
    return groups


async def _check_ledger(buffer: Buffer, wanted: Wanted) -> dict[int, int]:
    """Checks that every step has an entry and that its experience still exists."""
    sizes = {}
    for step in wanted.steps:
        entry = await buffer.entry(step)
        sizes[step] = len(entry["groups"]) or len(entry["rows"])
    await buffer.rewind(wanted.begin)
    return sizes


def _say_steps(folder: Path, said: set[int]) -> None:
    for step in sorted(metrics_by_step(folder).keys() - said):
        said.add(step)
        print(f"step {step} is trained again", flush=True)


async def run_to_end(child: Child, on_poll: Callable[[], None] | None = None) -> None:
    """Starts the trainer of a replay and waits until it ends; calls `on_poll` meanwhile and once afterwards.

    Raises RunError if it fails.
    """
    child.start()
    try:
        running = True
        while running:
            await asyncio.sleep(_POLL_SECONDS)
            running = child.is_running()
            if on_poll is not None:
                on_poll()
    finally:
        await stop_all([child], _STOP_SECONDS)
    if not child.has_finished():
        raise RunError(f"the replay failed: {child.last_error()} (see {child.log_file})")


def _report(job_stage: JobStage, wanted: Wanted, placement: Placement, folder: Path, groups: dict[int, int]) -> Report:
    original, again = metrics_by_step(job_stage.folder), metrics_by_step(folder)
    return Report(
        run=job_stage.run,
        folder=str(folder),
        begin=wanted.begin,
        ranks=placement.trainer_ranks,
        device=placement.device,
        steps=[Step(step, groups[step], original.get(step), again.get(step)) for step in wanted.steps],
        weights=Weights.read(folder / "weights.json"),
    )
