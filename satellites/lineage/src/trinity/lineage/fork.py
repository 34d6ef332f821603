"""`trinity fork` creates a run that continues from a step of another one, with other keys.

The fork's folder gets hard links to the checkpoint of the step and to the model, and <job>/fork/parts.bin with what the
parent's buffer gives: the ledger up to the step, and the groups that were sampled by then and not yet trained
(trinity.buffer.ledger.fork begins with them). Nothing in it needs the parent any more: the parent may run on, release
its log, remove its checkpoints or its folder.
"""

import contextlib
import hashlib
import os
import shlex
import shutil
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from pydantic import BaseModel

from trinity.commands import AsJson, Overrides, StageOption, command, group
from trinity.config import Config, dump, load, make_plan
from trinity.config.parents import FORK, Parent, Regrade
from trinity.lineage.replay_report import circumstances
from trinity.reading import job as jobs
from trinity.reading import run_record
from trinity.reading.errors import RunError
from trinity.reading.find import jobs_root
from trinity.reading.reader import JobStage, any_buffer, ask, find_job_stage
from trinity.reading.render import near, to_json
from trinity.runtime import files, names
from trinity.runtime.errors import InvalidInput
from trinity.study.bisect import metrics_by_step
from trinity.weights.checkpoint_manifest import MANIFEST, ManifestWriter, entries_of, verify
from trinity.weights.checkpoints import COMPLETE, checkpoint_folder, complete_steps

app = group()

PLUGINS = "plugins"  # folder of the file with a regrade's reward function
_STATE = "trainer_state.json"
_WAIT_SECONDS = 120.0  # for other forks of the run, which take about five each
# Keys that have an effect, or a note, where a YAML has them: config.json has them always, with their defaults.
_BY_PRESENCE = ("collective_timeout", "eval_interval", "full_interval", "gpu_memory_utilization", "repeat_times")
_LEFT_SECONDS = 24 * 3600.0  # no fork takes as long: a folder of one was left by a command that was killed


@dataclass(frozen=True)
class Fork:
    """A new fork. `groups`: number of groups that the parent sampled for later steps; `command` starts the fork."""

    parent: str
    step: int
    name: str
    job: str
    config: str
    command: str
    groups: int
    notes: list[str]


@command(app, "fork")
def fork(
    run: Annotated[str, typer.Argument(help="Job folder of the run, or <project>/<name> of one here")],
    overrides: Overrides = None,
    at: Annotated[int, typer.Option("--at", min=0, help="The last step that both share")] = 0,
    name: Annotated[str, typer.Option("--name", help="Name of the new run; else <name>-fork")] = "",
    stage: StageOption = "",
    as_json: AsJson = False,
) -> int:
    """Create a run that continues from a step of another one, with other keys."""
    if not at:
        raise RunError("give --at STEP, the last step that both runs share", 2)
    made = make_fork(find_parent(run, stage), at, overrides or [], name)
    print(to_json(asdict(made)) if as_json else _text(made))
    return 0


class Change(Protocol):
    """Changes the parts of a fork before anything begins with them. `through_step`: last step whose groups it wants."""

    through_step: int

    def __call__(self, config: Config, making: Path, parts: Path) -> Regrade: ...


def make_fork(
    job_stage: JobStage, at: int, overrides: Sequence[str], name: str = "", change: Change | None = None
) -> Fork:
    """Creates the job folder of a fork. Raises RunError, and leaves nothing behind then."""
    suffix = "-fork" if change is None else "-regrade"
    run_record.check_folder(job_stage.job)
    checkpoint = _checkpoint(job_stage, at)
    config = _config(job_stage, at, overrides, name, suffix)
    if config.explorer.traffic is not None:
        raise RunError(
            f"{job_stage.name} learns from live traffic, whose recorded calls stay with it: no run can fork from it", 2
        )
    folder = jobs.make_folder(config)
    for left in folder.parent.glob(".*.fork-*"):
        with contextlib.suppress(FileNotFoundError):  # another command removes it
            if time.time() - left.stat().st_mtime > _LEFT_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
    making = folder.with_name(f".{folder.name}.fork-{uuid.uuid4().hex[:8]}")
    jobs.make_private(making)
    try:
        sealed = _link_checkpoint(checkpoint, making, at, job_stage, config)
        parts = making / "fork" / "parts.bin"
        groups, newest = _fetch_parts(job_stage, at, parts, change.through_step if change is not None else 0)
        regrade = change(config, making, parts) if change is not None else None
        values = _with_models(_without_defaults(dump(config), config), job_stage, making, folder)
        files.write_json(making / "fork.yaml", values, mode=0o600)
        parent = Parent(
            str(job_stage.job), job_stage.run, job_stage.name, job_stage.stage, at, tuple(overrides), sealed,
            time.time(), regrade, hashlib.sha256(parts.read_bytes()).hexdigest(),
        )  # fmt: skip
        files.write_json(making / FORK, asdict(parent))
        run_record.mark_folder(making)
        making.rename(folder)
    except OSError as error:
        if folder.exists():
            raise _taken(folder) from None
        raise RunError(f"the fork cannot be made in {folder.parent}: {error.strerror} ({error.filename})") from None
    finally:
        shutil.rmtree(making, ignore_errors=True)
    plugins = f" --plugin-dir {shlex.quote(near(folder / PLUGINS))}" if (folder / PLUGINS).exists() else ""
    return Fork(
        job_stage.name, at, f"{config.project}/{config.name}", str(folder), str(folder / "fork.yaml"),
        f"trinity run --config {shlex.quote(near(folder / 'fork.yaml'))}{plugins}", groups,
        _notes(job_stage, at, newest) if change is None else [],
    )  # fmt: skip


def find_parent(run: str, stage: str) -> JobStage:
    """Returns the stage of a job that a folder, or project and name, names. Raises RunError."""
    folder = next((path for path in (Path(run), jobs_root() / run) if path.is_dir()), None)
    if folder is None:
        raise RunError(f"{run} is no job folder, and {jobs_root().absolute()} has no such run; give its job folder", 2)
    folder = folder.absolute()
    if not stage and not (folder / "version.json").exists() and (folder.parent / "version.json").exists():
        folder, stage = folder.parent, folder.name
    return find_job_stage(job=folder, stage=stage)


def _checkpoint(job_stage: JobStage, at: int) -> Path:
    """Returns the checkpoint of a step: the run's, or that of an identical replay. Raises RunError with the fix."""
    replayed = [path.parent for path in job_stage.folder.glob(f"replay/*/global_step_{at}/{COMPLETE}")]
    equal = [path for path in replayed if (files.read_json(path.parent / "replay.json") or {}).get("identical")]
    found = next(
        (path for path in (checkpoint_folder(job_stage.folder, at), *equal) if (path / COMPLETE).exists()), None
    )
    if found is not None:
        return found
    noted = metrics_by_step(job_stage.folder).keys() | circumstances(job_stage.folder).keys()
    trained, kept = max(noted, default=0), complete_steps(job_stage.folder)
    there = f"the run keeps {', '.join(map(str, kept))}" if kept else "the run keeps none"
    if at > trained:
        raise RunError(f"step {at}: {job_stage.name} has trained {trained} steps; of checkpoints {there}", 2)
    before = max((step for step in kept if step < at), default=0)
    stage = f" --stage {job_stage.stage}" if job_stage.stage else ""
    again = f"`trinity replay --job {shlex.quote(near(job_stage.job))}{stage} --from-step {before + 1} --to-step {at}`"
    nearest = f"begin at {before}, or " if before else ""
    raise RunError(
        f"step {at}: there is no checkpoint of this step, {there}: {nearest}make one by {again}, while the log has "
        "these steps",
        2,
    )


def _config(job_stage: JobStage, at: int, overrides: Sequence[str], name: str, suffix: str) -> Config:
    """Returns the configuration of the fork. Raises RunError for keys that a fork cannot change."""
    parent = job_stage.config
    fixed = {"name": "give --name", "stages": "a fork has one stage", "mode": "a fork keeps its parent's"}
    for key, why in fixed.items():
        if given := next((one for one in overrides if one.partition("=")[0].split(".")[0] == key), ""):
            raise RunError(f"{given}: {why}", 2)
    # With false the new run would begin in another folder, without the checkpoint.
    config = load(job_stage.config_file, [*overrides, "continue_from_checkpoint=true"], plugins_loaded=False)
    whole = _whole_name(job_stage)
    if not any(one.startswith("checkpoint_root_dir=") for one in overrides):
        config = config.model_copy(update={"checkpoint_root_dir": str(_root(job_stage, whole))})
    before, after = make_plan(parent).groups_per_step, make_plan(config).groups_per_step
    if before != after:
        raise RunError(f"buffer.batch_size: a step of {job_stage.name} has {before} groups, and a fork keeps that", 2)
    last = make_plan(config).total_steps
    if last is not None and last <= at:
        raise RunError(f"step {at}: the fork would end at step {last}; add buffer.total_steps={at + 1} or more", 2)
    if not name:
        return _free_name(config, f"{whole}{suffix}")
    config = config.model_copy(update={"name": name, "stages": []})
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise RunError(f"--name {name!r}: must be a name without empty parts", 2)
    folder = jobs.make_folder(config)
    if folder.exists():
        raise _taken(folder)
    if job := next((one for one in folder.parents[: name.count("/")] if jobs.is_job(one)), None):
        raise RunError(f"--name {name}: {job} is the job folder of another run; choose a name outside of it", 2)
    return config


def _whole_name(job_stage: JobStage) -> str:
    """Returns the name of the job, which that of a stage extends."""
    name = job_stage.config.name
    return name.removesuffix(f"/{job_stage.stage}") if job_stage.stage else name


def _root(job_stage: JobStage, whole: str) -> Path:
    """Returns the folder of all runs, in which the parent's job folder lies now: it may have been moved."""
    config = job_stage.config
    parts = [config.project, *([config.group] if config.group else []), *whole.split("/")]
    if list(job_stage.job.parts[-len(parts) :]) == parts:
        return Path(*job_stage.job.parts[: -len(parts)])
    return Path(config.checkpoint_root_dir).expanduser().absolute()


def _free_name(config: Config, name: str) -> Config:
    number = 1
    while True:
        named = config.model_copy(update={"name": name if number == 1 else f"{name}-{number}", "stages": []})
        if not jobs.make_folder(named).exists():
            return named
        number += 1


def _taken(folder: Path) -> RunError:
    return RunError(f"--name: {folder} exists; choose another name", 2)


def _link_checkpoint(source: Path, job: Path, step: int, parent: JobStage, config: Config) -> str:
    """Links a checkpoint into a job folder, as one of the new run. Returns SHA-256 of the parent's manifest.

    Raises RunError for a file that is not as the manifest says, unless the configuration allows it.
    """
    target = checkpoint_folder(job, step)
    try:
        manifest = (source / MANIFEST).read_bytes()
        _link_tree(source, target, leave={COMPLETE})
        missing = next((name for name in entries_of(target) if not (target / name).is_file()), "")
        buckets = [place for place in parent.config.trainer.checkpoint_storage if place != "folder"]
        if missing and buckets:
            raise RunError(
                f"step {step}: {source} has no {missing}; the run keeps such files in {' and '.join(buckets)}, below "
                f"{parent.run}/checkpoints/global_step_{step}: download them into the folder, or begin at another step"
            )
        if not config.allow_unverified_checkpoint:
            verify(target)
    except FileNotFoundError as error:
        raise RunError(
            f"the checkpoint {source} is not whole ({error.filename} is gone): begin at a newer step"
        ) from None
    except InvalidInput as error:
        raise RunError(f"step {step}: {str(error).replace(str(target), str(source))}") from None
    state = files.read_json(target / _STATE)
    if not isinstance(state, dict):
        raise RunError(f"{source / _STATE} is damaged: begin at another step")
    state = {**state, "run": names.run_id(config.project, config.name, config.group), "rollback": 0}
    files.write_json(target / _STATE, state)  # replaces the link, not the parent's file
    ManifestWriter(target, [_STATE]).write()
    (target / COMPLETE).touch()
    files.write_json(job / "trainer_meta.json", {"latest_iteration": step, **state})
    files.write_atomic(job / "latest_checkpointed_iteration.txt", str(step).encode())
    return hashlib.sha256(manifest).hexdigest()


def _link_tree(source: Path, target: Path, leave: Collection[str] = ()) -> None:
    """Links every file below a folder."""
    for root, _, found in os.walk(source):
        place = target / Path(root).relative_to(source)
        place.mkdir(parents=True, exist_ok=True)
        for name in found:
            if Path(root) != source or name not in leave:
                link(Path(root, name).resolve(), place / name)


def link(source: str | Path, target: str | Path) -> None:
    """Links a file, or copies it to another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _fetch_parts(job_stage: JobStage, step: int, path: Path, through: int) -> tuple[int, int]:
    """Writes what the parent's buffer gives. Returns how many groups, and the newest step of the ledger among them."""
    path.parent.mkdir()
    sizes: list[int] = []

    async def fetch(reader: Any) -> int:
        newest = await reader.buffer.newest_step()
        with path.open("wb") as file:
            async for part in reader.buffer.fork_parts(step, through):
                file.write(len(part).to_bytes(4, "little") + part)
                sizes.append(len(part))
            file.flush()
            os.fsync(file.fileno())
        return int(newest)

    try:
        newest = ask(partial(any_buffer, wait_seconds=_WAIT_SECONDS), job_stage, fetch)
    except RunError as error:
        kept = ", ".join(str(one) for one in complete_steps(job_stage.folder)) or "none"
        raise RunError(f"step {step}: {error}; checkpoints of the run: {kept}", error.code) from None
    entries = min(newest, max(through, make_plan(job_stage.config).staleness.open_batches(step)))
    return max(0, len(sizes) - max(step, entries)), newest


def _without_defaults(values: Any, section: Any) -> Any:
    """Returns the values of a section without those of _BY_PRESENCE that are their key's default."""
    if isinstance(section, list):
        return [_without_defaults(*pair) for pair in zip(values, section, strict=True)]
    if not isinstance(section, BaseModel):
        return values
    fields = type(section).model_fields
    kept = [name for name in values if name not in _BY_PRESENCE or values[name] != fields[name].default]
    return {name: _without_defaults(values[name], getattr(section, name)) for name in kept}


def _with_models(values: dict[str, Any], job_stage: JobStage, making: Path, folder: Path) -> dict[str, Any]:
    """Links model folders that lie in the parent's job folder into the fork's, and names them there.

    The configuration may name them where the job folder lay before it was moved.
    """
    parent = job_stage.job
    configured = jobs.make_folder(job_stage.config.model_copy(update={"name": _whole_name(job_stage)}))
    places = [parent.resolve(), configured.resolve()]

    def inside(value: str) -> Path | None:
        path = Path(value).expanduser().resolve()
        found = [parent / path.relative_to(place) for place in places if path.is_relative_to(place)]
        return next((one for one in found if one.is_dir()), None)

    def linked(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return {inner: linked(found, inner) for inner, found in value.items()}
        if isinstance(value, list):
            return [linked(found, f"{key}_{index}") for index, found in enumerate(value)]
        if isinstance(value, str) and (found := inside(value)) is not None:
            _link_tree(found, making / "models" / key)
            return str(folder / "models" / key)
        return value

    return {**values, "model": linked(values.get("model", {}), "model")}


def _notes(job_stage: JobStage, at: int, newest: int) -> list[str]:
    plan = make_plan(job_stage.config)
    needed = min(plan.staleness.open_batches(at - 1), plan.total_steps or newest)
    if plan.offline or newest >= needed:
        return []
    return [
        f"the run has come to step {newest}: tasks up to step {needed} that it has given out are sampled again, by "
        f"weights of step {at}, and so steps {newest + 1} and later may differ from the run's"
    ]


def _text(made: Fork) -> str:
    lines = [
        f"{made.name} continues from step {made.step} of {made.parent}, with {made.groups} groups that it had sampled",
        *(f"note: {note}" for note in made.notes),
        f"run it by: {made.command}",
    ]
    return "\n".join(lines)
