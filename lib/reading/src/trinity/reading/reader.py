"""The stage of a job that a command is about, and its services: the buffer with log and ledger, and sync.

While the run is live, commands use its buffer. Otherwise they start a read-only buffer on the run's NATS and end it.
That NATS is given by --nats or TRINITY_NATS_URL, or is an embedded server on the store of the job, which is then
locked. Only a live run has a sync service.
"""

import asyncio
import contextlib
import json
import os
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from trinity.config import Config, load, make_plan
from trinity.config.run_record import Addresses, RunRecord
from trinity.reading import job as jobs
from trinity.reading import processes
from trinity.reading.children import Child, stop_all
from trinity.reading.client import Buffer, Scorers, Sync
from trinity.reading.errors import RunError, not_accepted
from trinity.reading.find import HAVE_JOB, AnnouncedRun, find_run
from trinity.reading.nats import NatsAccess
from trinity.reading.processes import open_nats
from trinity.reading.run_record import look_for_run
from trinity.runtime import files, logs, names, rpc, waits
from trinity.runtime.process import FileLock
from trinity.runtime.trust import identity
from trinity.runtime.trust.identity import Identity
from trinity.runtime.trust.roles import Role
from trinity.runtime.trust.tokens import make_tokens

_START_SECONDS = 60.0
_LOCK_SECONDS = 10.0
_POLL_SECONDS = 0.1
_STOP_SECONDS = 3.0

Service = TypeVar("Service")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class JobStage:
    """One stage of a job with the configuration of its last run. `stage` is empty for a job without stages.

    `folders`: job and stage folder; None for a run that only its NATS knows. `about` and `nats_url` belong to a run
    that --nats and --run name; `about` is None once it is not live. `yaml` is an additional --config.
    """

    stage: str
    config: Config
    folders: tuple[Path, Path] | None
    about: RunRecord | None = None
    nats_url: str = ""
    yaml: Path | None = None

    @property
    def job(self) -> Path:
        """Raises RunError for a run without folder."""
        return self._local()[0]

    @property
    def folder(self) -> Path:
        """Raises RunError for a run without folder."""
        return self._local()[1]

    def _local(self) -> tuple[Path, Path]:
        if self.folders is None:
            raise RunError(
                f"{self.name} is known only by its NATS, and this command reads its job folder: {HAVE_JOB}", 2
            )
        return self.folders

    @property
    def run(self) -> str:
        return names.run_id(self.config.project, self.config.name, self.config.group)

    @property
    def name(self) -> str:
        """Project and name, for display."""
        return f"{self.config.project}/{self.config.name}"

    @property
    def option(self) -> str:
        """The option that names this stage to a `trinity` command."""
        if self.folders is None:
            return shlex.join(["--nats", logs.without_credentials(self.nats_url), "--run", self.run])
        stage = ["--stage", self.stage] if self.stage else []
        return shlex.join(["--job", str(self.job), *stage])

    @property
    def config_file(self) -> Path:
        return self.yaml or self.folder / "config.json"

    def whole_job(self) -> jobs.Job:
        """Returns the job of this stage."""
        config = self.config
        name = config.name.removesuffix(f"/{self.stage}") if self.stage else config.name
        whole = jobs.Job(config.model_copy(update={"name": name}))
        whole.folder = self.job  # it may have been moved
        return whole


def find_job_stage(
    config: Path | None = None, job: Path | None = None, stage: str = "", nats: str = "", run: str = ""
) -> JobStage:
    """Returns the requested stage, else the live one, else the last trained one. Raises RunError if there is none."""
    logs.configure("look", level="ERROR")
    place = find_run(config, job, nats, run)
    if isinstance(place, AnnouncedRun):
        if stage not in ("", place.about.stage):
            raise RunError(f"--stage {stage}: {place.about.title} is in stage {place.about.stage!r}", code=2)
        return announced_stage(place)
    folder = place.absolute()
    jobs.identify(folder)
    found = {path.parent.name if path.parent != folder else "": path for path in stage_configs(folder)}
    if not found:
        raise RunError(f"no stage has begun in {folder}: no config.json")
    if stage and stage not in found:
        known = ", ".join(repr(name) for name in found if name)
        raise RunError(f"--stage {stage}: {folder} has {known or 'no stages'}", code=2)
    chosen = stage or _default_stage(folder, found)
    return JobStage(chosen, load(found[chosen], plugins_loaded=False), (folder, found[chosen].parent))


def announced_stage(place: AnnouncedRun) -> JobStage:
    return JobStage(place.about.stage, place.about.config, None, place.about, place.nats_url)


def stage_configs(folder: Path) -> list[Path]:
    """Returns config files of the job and its stages, newest last."""
    return sorted(jobs.stage_configs(folder), key=lambda path: path.stat().st_mtime)


def _default_stage(folder: Path, found: dict[str, Path]) -> str:
    main = jobs.read_records(folder).get("main")
    if main is not None and main.stage in found:
        return main.stage
    trained = [name for name, path in found.items() if (path.parent / "monitor" / "batches.jsonl").exists()]
    return (trained or list(found))[-1]


@dataclass(frozen=True)
class Reader:
    """A serving buffer and its address."""

    address: str
    buffer: Buffer


@contextlib.asynccontextmanager
async def live_buffer(job_stage: JobStage) -> AsyncIterator[Reader | None]:
    """Yields the run's buffer; None if the stage is not live, or ends before the buffer serves."""
    here = _lives_here(job_stage)
    found = await _live_addresses(job_stage)
    async with contextlib.AsyncExitStack() as stack:
        reader = None
        if found is not None and found.buffer:
            with contextlib.suppress(_HasEnded):
                connected = _connected(found.buffer, job_stage.run, lambda: here and not _lives_here(job_stage))
                reader = await stack.enter_async_context(connected)
        yield reader


class _HasEnded(RunError):
    """The process of the buffer ended and has no successor."""


def _lives_here(job_stage: JobStage) -> bool:
    """Returns True if a `trinity run` of this machine runs the stage."""
    main = jobs.read_records(job_stage.job).get("main") if job_stage.folders is not None else None
    return main is not None and main.run == job_stage.run


@contextlib.asynccontextmanager
async def any_buffer(job_stage: JobStage, wait_seconds: float | None = None) -> AsyncIterator[Reader]:
    """Yields the run's buffer if the stage is live, else a read-only one."""
    async with contextlib.AsyncExitStack() as stack:
        reader = await stack.enter_async_context(live_buffer(job_stage))
        if reader is None:
            reader = await stack.enter_async_context(read_only_buffer(job_stage, wait_seconds=wait_seconds))
        yield reader


@contextlib.asynccontextmanager
async def read_only_buffer(
    job_stage: JobStage, log_dir: Path | None = None, wait_seconds: float | None = None
) -> AsyncIterator[Reader]:
    """Yields a read-only buffer of this command, separate from the live one.

    `log_dir`: folder of its logs; None discards them. `wait_seconds`: the longest wait for another command of the job.
    """
    async with contextlib.AsyncExitStack() as stack:
        folder = log_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trinity-")))
        if not has_own_tokens(job_stage, "buffer", folder) and not _is_certified():
            jobs.identify(job_stage.job, starts_services=True)
        lock = FileLock((folder if job_stage.nats_url else job_stage.job) / ".lock")
        stack.callback(lock.release)
        children: list[Child] = []
        stack.push_async_callback(stop_all, children, _STOP_SECONDS)
        nats = await _nats(job_stage, lock, children, wait_seconds or _LOCK_SECONDS)
        config_file = folder / "config.json" if job_stage.nats_url else job_stage.config_file
        if job_stage.nats_url:
            files.write_json(config_file, json.loads(job_stage.config.model_dump_json(exclude_unset=True)), mode=0o600)
        child = processes.reader_child(config_file, nats, job_stage.run, folder)
        child.start()
        children.append(child)
        try:
            reader = await stack.enter_async_context(
                _connected(child.address, job_stage.run, lambda: not child.is_running())
            )
        except _HasEnded:
            raise RunError(f"the run cannot be read: {child.last_error()}") from None
        yield reader


def has_own_tokens(job_stage: JobStage, service: str, folder: Path) -> bool:
    """Makes tokens for this command and a service that it starts, below the folder. Returns True if it did.

    It does so only if this machine has no identity of the run for such a service: no certificate and no tokens of the
    job.
    """
    has_certificate = f"TRINITY_{service.upper()}_TLS_CERT" in os.environ
    if has_certificate if _is_certified() else not job_stage.nats_url:
        return False
    make_tokens(folder / "identity")
    identity.configure(Identity(Role.OPERATOR, folder / "identity"))
    return True


def _is_certified() -> bool:
    own = identity.own()
    return own is not None and own.tls is not None


@contextlib.asynccontextmanager
async def scorers(plugin_dirs: Sequence[Path], reward_bound: float) -> AsyncIterator[Scorers]:
    """Yields the scoring functions of an environment service of this command, installed ones and those of plugins."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trinity-")))
        make_tokens(folder / "identity")
        identity.configure(Identity(Role.EXPLORER, folder / "identity"))
        settings = {"PLUGIN_DIRS": os.pathsep.join(str(one.absolute()) for one in plugin_dirs)}
        child = processes.service_child("environment", folder, settings)
        stack.push_async_callback(stop_all, [child], _STOP_SECONDS)
        channel = await stack.enter_async_context(rpc.channel(child.address))
        starting, starts = asyncio.Lock(), 0

        async def serve() -> int:
            nonlocal starts
            async with starting:
                if not child.is_running():
                    child.start()
                    starts += 1
                    try:
                        await _until_serving(channel, child.address, lambda: not child.is_running())
                    except _HasEnded:
                        raise RunError(f"the environment service does not start: {child.last_error()}") from None
                return starts

        await serve()
        yield Scorers(channel, reward_bound, serve)


async def live_services(job_stage: JobStage) -> Addresses:
    """Returns the addresses of the services of the stage. Raises RunError unless it is live and has a sync service."""
    if make_plan(job_stage.config).offline:
        raise RunError(
            f"{job_stage.name} learns from a dataset, without explorers: it publishes no versions and has no providers"
        )
    found = await _live_addresses(job_stage)
    if found is None:
        raise RunError(not_live(job_stage, "only its running services know this") + ", then again; "
                       "TRINITY_NATS_URL finds a run on another machine")  # fmt: skip
    if not found.sync:
        raise RunError(f"{job_stage.name} does not announce its sync service: set TRINITY_BUFFER_SYNC_ADDRESS")
    return found


@contextlib.asynccontextmanager
async def live_sync(job_stage: JobStage) -> AsyncIterator[Sync]:
    """Yields the sync service of a live stage. Raises RunError if the stage is not live."""
    addresses = await live_services(job_stage)
    async with rpc.channel(addresses.sync) as channel:
        yield Sync(channel, job_stage.run)


def ask(
    service: Callable[[JobStage], AbstractAsyncContextManager[Service]],
    job_stage: JobStage,
    question: Callable[[Service], Awaitable[Answer]],
) -> Answer:
    """Opens a service of the stage (`any_buffer` or `live_sync`) and returns its answer.

    Raises RunError for a refusal, or if it is away.
    """

    async def asked() -> Answer:
        async with service(job_stage) as open_service:
            return await question(open_service)

    return asyncio.run(asked())


def not_live(job_stage: JobStage, why: str) -> str:
    """Returns the error that a command needs a live stage, with the fix."""
    main = jobs.read_records(job_stage.job).get("main") if job_stage.folders is not None else None
    if main is not None:
        return (
            f"stage {job_stage.stage!r} of {job_stage.job} does not run now, {main.stage!r} does; --stage names another"
        )
    state, more = "does not run", ""
    if job_stage.folders is not None and _is_finished(job_stage):
        state, more = "has finished", " and more steps (buffer.total_steps=...)"
    return f"{job_stage.name} {state}, and {why}: `trinity run` with the same YAML{more}"


def _is_finished(job_stage: JobStage) -> bool:
    """Returns True if `trinity run` with the same YAML would skip the stage."""
    finished = jobs.finished_step(job_stage.folder)
    return finished >= 0 and finished >= (make_plan(job_stage.config).total_steps or 0)


async def _live_addresses(job_stage: JobStage) -> Addresses | None:
    """Returns the addresses of the services of a live stage; None if it is not live."""
    if job_stage.folders is None:
        return job_stage.about.addresses if job_stage.about is not None else None
    main = jobs.read_records(job_stage.job).get("main")
    if main is not None:
        known = {process.service: process.address for process in main.processes}
        found = Addresses(**{name: known.get(name, "") for name in asdict(Addresses())})
        return found if main.run == job_stage.run else None
    if os.environ.get("TRINITY_NATS_URL"):  # it may live on another machine
        _, about = await look_for_run(job_stage.whole_job())
        if about is not None and about.run == job_stage.run:
            return about.addresses
    return None


async def _nats(job_stage: JobStage, lock: FileLock, children: list[Child], wait_seconds: float) -> NatsAccess:
    """Returns the run's NATS. If no process runs it, starts it and locks the job."""
    if job_stage.nats_url:
        return NatsAccess(job_stage.nats_url)
    embedded = not os.environ.get("TRINITY_NATS_URL")
    with waits.waiting(
        f"another command that uses {job_stage.job}",
        limit_seconds=wait_seconds,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    ):
        deadline = asyncio.get_running_loop().time() + wait_seconds
        while (main := jobs.read_records(job_stage.job).get("main")) is None and embedded and not _locked(lock):
            if asyncio.get_running_loop().time() > deadline:
                what = f"{job_stage.job} is in use by another command (process {lock.owner()})"
                raise RunError(f"{what}; try again after it")
            await asyncio.sleep(_POLL_SECONDS)
    if main is not None:
        return main.nats()
    if embedded and not (job_stage.job / "nats" / "store").is_dir():
        raise RunError(f"{job_stage.job} has no NATS store; set TRINITY_NATS_URL to the NATS that the run used")
    return await open_nats(job_stage.whole_job(), children, asyncio.Event())


def _locked(lock: FileLock) -> bool:
    """Acquires the lock of a job to read it. Raises RunError where this user may not write."""
    try:
        return lock.acquire(jobs.READS)
    except OSError as error:
        why = "the ledger is read by a nats-server on the store of the job folder, and this user cannot write there"
        fix = "copy the folder, and name the copy by --job"
        raise RunError(f"{lock.path.parent}: {error.strerror}: {why}; {fix}") from None


@contextlib.asynccontextmanager
async def _connected(address: str, run: str, has_ended: Callable[[], bool]) -> AsyncIterator[Reader]:
    async with rpc.channel(address) as channel:
        await _until_serving(channel, address, has_ended)
        yield Reader(address, Buffer(channel, run))


async def _until_serving(channel: grpc.aio.Channel, address: str, has_ended: Callable[[], bool]) -> None:
    """Raises _HasEnded if the buffer ends first, RunError at the timeout. The buffer of a live run may restart."""
    deadline = asyncio.get_running_loop().time() + _START_SECONDS
    while asyncio.get_running_loop().time() < deadline:
        try:
            found = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
            if found.status == health_pb2.HealthCheckResponse.SERVING:
                return
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise not_accepted(str(error.details())) from None
        if has_ended():
            raise _HasEnded(f"the service at {address} has ended")
        await asyncio.sleep(_POLL_SECONDS)
    raise RunError(
        f"the service at {address} does not serve within {_START_SECONDS:g} s; `trinity status` shows a live run"
    )
