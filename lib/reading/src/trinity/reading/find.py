"""Finds the run that a command is about: a job folder here, or a live run that only its NATS knows.

Configurations, NATS and gRPC are imported where they are used: most commands about a finished run need none.
"""

import asyncio
import contextlib
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trinity.reading import job as jobs
from trinity.reading.errors import RunError
from trinity.reading.nats import NatsAccess
from trinity.reading.render import near, visible
from trinity.runtime import names
from trinity.runtime.errors import NotFound, PermissionDenied
from trinity.runtime.names import IS_RUN

if TYPE_CHECKING:
    from trinity.config.run_record import RunRecord

_CONNECT_SECONDS = 10.0
HAVE_JOB = "give --job or --config, on a machine that has the folder"


@dataclass(frozen=True)
class AnnouncedRun:
    """A live run, and the NATS that knows it."""

    nats_url: str
    about: "RunRecord"


@dataclass(frozen=True)
class RunOnNats:
    """A run by its id, live or not, and the NATS that knows it."""

    nats_url: str
    run: str


class NotLive(RunError):
    """No live run has the given name."""


def find_job(config: Path | None = None, job: Path | None = None) -> Path:
    """Returns the given job folder, else the newest live one, else the newest. Raises RunError if there is none."""
    if config is not None and job is not None:
        raise RunError(f"--config {config} and --job {job} each name a run: give one of them", code=2)
    if config is not None:
        from trinity.config import load

        job = jobs.Job(load(config, plugins_loaded=False)).folder
    if job is None:
        found = jobs_here()
        if not found:
            raise RunError(f"no run below {jobs_root().absolute()}; name one by --config or --job")
        return found[0]
    began = jobs.is_job(job)
    if not (job / "version.json").exists():
        if began and (job.absolute().parent / "version.json").exists():
            raise RunError(f"{job} is the folder of a stage; give its job's: --job {job.absolute().parent}", code=2)
        if below := sorted(job.glob("*/**/version.json")):
            others = f", or one of {len(below) - 1} others" if below[1:] else ""
            raise RunError(f"{job} is no job but holds jobs; give one: --job {below[0].parent}{others}", code=2)
    if not began:
        fork = job / "fork.yaml"
        begins = f"; trinity run --config {shlex.quote(near(fork))} begins it" if fork.exists() else ""
        raise RunError(f"no run has begun in {job}{begins}")
    return job


def find_run(config: Path | None = None, job: Path | None = None, nats: str = "", run: str = "") -> Path | AnnouncedRun:
    """Returns the job folder of a run, or the live run that --nats and --run name.

    Without options it is the newest one here or, if there is none, the only one on the NATS of TRINITY_NATS_URL.
    """
    url = _given_url(nats, run)
    if url and (config or job):
        raise RunError("give --config or --job for a run with a folder here, or --nats and --run, not both", code=2)
    if not url and config is None and job is None and not jobs_here():
        url = os.environ.get("TRINITY_NATS_URL", "")
    return _find_announced(url, run) if url else find_job(config, job)


def find_log(config: Path | None = None, job: Path | None = None, nats: str = "", run: str = "") -> Path | RunOnNats:
    """Finds the log lines of a run: in its job folder, or on the NATS of a run, live or ended."""
    try:
        place = find_run(config, job, nats, run)
    except NotLive as problem:
        if not run:
            raise
        return asyncio.run(_find_lines(_given_url(nats, run), run, problem))
    return RunOnNats(place.nats_url, place.about.run) if isinstance(place, AnnouncedRun) else place


async def _find_lines(url: str, run: str, problem: NotLive) -> RunOnNats:
    """Finds a run whose lines NATS has, by id or <project>/<name>. Raises the given problem if there is none."""
    project, _, name = run.partition("/")
    async with await NatsAccess(url).connect("trinity", "", wait_seconds=_CONNECT_SECONDS) as broker:
        for known in (run, names.run_id(project, name)):
            if IS_RUN.fullmatch(known):
                with contextlib.suppress(NotFound, PermissionDenied):
                    await broker.state(names.RunNames(known).lines_stream)
                    return RunOnNats(url, known)
    raise problem


def _given_url(nats: str, run: str) -> str:
    """Returns the NATS that --nats, or with --run TRINITY_NATS_URL, names; empty without both options.

    Raises RunError if --run has no NATS.
    """
    url = nats or (os.environ.get("TRINITY_NATS_URL", "") if run else "")
    if run and not url:
        raise RunError(f"--run {visible(run)}: name the run's NATS by --nats or TRINITY_NATS_URL", code=2)
    return url


def _find_announced(url: str, run: str) -> AnnouncedRun:
    """Returns the live run of a name or id, or the only one. Raises RunError if there is none, or several.

    From now on this command has the identity that TRINITY_TLS_* or TRINITY_IDENTITY_FOLDER names.
    """
    from trinity.runtime import logs

    logs.configure("look", level="ERROR")
    jobs.identify(None)
    records, problems = asyncio.run(_read(url))
    found = [about for about in records if _is_called(about, run)]
    if len(found) == 1:
        return AnnouncedRun(url, found[0])
    at = f"at {logs.without_credentials(url)}"
    listed = visible(", ".join(sorted(f"{about.title} ({about.run})" for about in records)))
    if found:
        raise RunError(f"several runs live {at}: {listed}; name one by --run", code=2)
    wanted = visible(f" {run}" if run else "")
    others = f"; there are: {listed}" if listed else "".join(f"; {problem}" for problem in problems)
    raise NotLive(f"no run{wanted} lives {at}{others}")


async def announced_now(run: AnnouncedRun) -> "RunRecord | None":
    """Returns the record that a run announces now, else of another stage of its job; None if neither is live.

    Raises RunError or Unavailable without an answer of its NATS.
    """
    records, _ = await _read(run.nats_url)
    known = {about.run: about for about in records if _job_of(about) == _job_of(run.about)}
    return known.get(run.about.run) or next(iter(known.values()), None)


def _job_of(about: "RunRecord") -> tuple[str, str, str]:
    config = about.config
    return config.project, config.group, config.name.removesuffix(f"/{about.stage}")


async def _read(url: str) -> "tuple[list[RunRecord], list[str]]":
    from trinity.reading.run_record import live_runs

    async with await NatsAccess(url).connect("trinity", "", wait_seconds=_CONNECT_SECONDS) as broker:
        return await live_runs(broker)


def _is_called(about: "RunRecord", wanted: str) -> bool:
    """Returns True if a name matches a run: its id, or the name of the run or its job, with or without project.

    An empty name matches every run.
    """
    known = {about.run}
    for name in (about.config.name, about.config.name.removesuffix(f"/{about.stage}")):
        known |= {name, f"{about.config.project}/{name}"}
    return not wanted or wanted in known


def jobs_here(root: Path | None = None) -> list[Path]:
    """Returns job folders below `root`, else below that of this machine's runs; live ones first."""
    root = root or jobs_root()
    return [*jobs.live_jobs(root), *jobs.known_jobs(root)]


def jobs_root() -> Path:
    """Returns the root folder of the runs on this machine."""
    return Path(os.environ.get("TRINITY_CHECKPOINT_ROOT_DIR", "./checkpoints")).expanduser()
