"""The buffer of a job, for commands that read its log and ledger.

While the run is live, this is the run's buffer. Otherwise the command starts a read-only buffer on the run's NATS and
ends it. That NATS is TRINITY_NATS_URL, or an embedded server on the job's store; then the job is locked meanwhile.
"""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from trinity.api.buffer.v1 import buffer_pb2_grpc
from trinity.cli.commands.status import find_job
from trinity.cli.errors import RunError, ending_well
from trinity.cli.supervise import job as jobs
from trinity.cli.supervise import services
from trinity.cli.supervise.children import Child, stop_all
from trinity.cli.supervise.join import look_for_run
from trinity.cli.supervise.supervisor import open_nats
from trinity.config import Plan, load, make_plan
from trinity.runtime import logs, names, rpc
from trinity.runtime.process import FileLock

_START_SECONDS = 60.0
_LOCK_SECONDS = 10.0
_CALL_SECONDS = 30.0
_POLL_SECONDS = 0.1
_STOP_SECONDS = 3.0

T = TypeVar("T")


@dataclass(frozen=True)
class JobStage:
    """One stage of a job with the configuration of its last run. `stage` is empty for a job without stages."""

    job: Path
    folder: Path
    stage: str
    plan: Plan

    @property
    def run(self) -> str:
        config = self.plan.config
        return names.run_id(config.project, config.name, config.group)

    @property
    def name(self) -> str:
        """Project and name, for display."""
        return f"{self.plan.config.project}/{self.plan.config.name}"

    @property
    def config_file(self) -> Path:
        return self.folder / "config.json"

    def whole_job(self) -> jobs.Job:
        """The job this is a stage of."""
        config = self.plan.config
        name = config.name.removesuffix(f"/{self.stage}") if self.stage else config.name
        whole = jobs.Job(config.model_copy(update={"name": name}))
        whole.folder = self.job  # it may have been moved
        return whole


def run_on_stage(config: Path | None, job: Path | None, stage: str, command: Callable[[JobStage], str | int]) -> int:
    """Run a command on a stage; returns the exit code. Text that `command` returns is printed."""

    def action() -> int:
        logs.configure("look", level="ERROR")
        found = command(find_job_stage(config, job, stage))
        if isinstance(found, int):
            return found
        print(found)
        return 0

    return ending_well(action)


def find_job_stage(config: Path | None, job: Path | None, stage: str) -> JobStage:
    """The requested stage, else the live one, else the last trained one. RunError if there is none."""
    folder = find_job(load(config, plugins_loaded=False) if config else None, job).absolute()
    found = {path.parent.name if path.parent != folder else "": path for path in _stage_configs(folder)}
    if not found:
        raise RunError(f"no stage has begun in {folder}: no config.json")
    if stage and stage not in found:
        known = ", ".join(repr(name) for name in found if name)
        raise RunError(f"--stage {stage}: {folder} has {known or 'no stages'}", code=2)
    chosen = stage or _default_stage(folder, found)
    return JobStage(folder, found[chosen].parent, chosen, make_plan(load(found[chosen], plugins_loaded=False)))


def _stage_configs(folder: Path) -> list[Path]:
    """Config files of the job and its stages, the newest last; without those of evaluations below them."""
    own = [path for path in jobs.stage_configs(folder) if folder in (path.parent, path.parent.parent)]
    return sorted(own, key=lambda path: path.stat().st_mtime)


def _default_stage(folder: Path, found: dict[str, Path]) -> str:
    main = jobs.read_records(folder).get("main")
    if main is not None and main.stage in found:
        return main.stage
    trained = [name for name, path in found.items() if (path.parent / "monitor" / "batches.jsonl").exists()]
    return (trained or list(found))[-1]


@dataclass(frozen=True)
class Reader:
    """A serving buffer. `is_live`: it is the run's own and can change the run."""

    address: str
    nats_url: str
    is_live: bool
    stub: buffer_pb2_grpc.BufferServiceStub


@contextlib.asynccontextmanager
async def live_buffer(job_stage: JobStage) -> AsyncIterator[Reader | None]:
    """The run's own buffer; None if the stage is not live."""
    address, url = await _live_address(job_stage)
    if not address:
        yield None
        return
    async with _connected(address, url, None) as reader:
        yield reader


@contextlib.asynccontextmanager
async def any_buffer(job_stage: JobStage) -> AsyncIterator[Reader]:
    """The run's own buffer if the stage is live, else a read-only one."""
    async with contextlib.AsyncExitStack() as stack:
        reader = await stack.enter_async_context(live_buffer(job_stage))
        if reader is None:
            reader = await stack.enter_async_context(read_only_buffer(job_stage))
        yield reader


@contextlib.asynccontextmanager
async def read_only_buffer(job_stage: JobStage, log_dir: Path | None = None) -> AsyncIterator[Reader]:
    """A read-only buffer of this command, separate from the live run's. `log_dir`: of its logs; None: not kept."""
    async with contextlib.AsyncExitStack() as stack:
        folder = log_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trinity-")))
        lock = FileLock(job_stage.job / ".lock")
        stack.callback(lock.release)
        children: list[Child] = []
        stack.push_async_callback(stop_all, children, _STOP_SECONDS)
        url = await _nats(job_stage, lock, children)
        child = services.reader(job_stage.config_file, url, folder)
        child.start()
        children.append(child)
        yield await stack.enter_async_context(_connected(child.address, url, child))


async def answer(call: Awaitable[T]) -> T:
    """What a buffer answers; RunError with its reason if it refuses."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            raise RunError(f"the buffer does not answer ({error.details()}); `trinity status` shows the run") from None
        raise RunError(str(error.details())) from None


async def _live_address(job_stage: JobStage) -> tuple[str, str]:
    """Addresses of the run's own buffer and NATS; empty if the stage is not live."""
    main = jobs.read_records(job_stage.job).get("main")
    if main is not None:
        if main.run != job_stage.run:
            return "", ""
        return next((process.address for process in main.processes if process.service == "buffer"), ""), main.nats_url
    if os.environ.get("TRINITY_NATS_URL"):  # it may live on another machine
        url, about = await look_for_run(job_stage.whole_job())
        if about is not None and about["run"] == job_stage.run:
            return str(about["addresses"]["buffer"]), url
    return "", ""


async def _nats(job_stage: JobStage, lock: FileLock, children: list[Child]) -> str:
    """The URL of the run's NATS. If no process runs it, it is started here and the job is locked."""
    deadline = asyncio.get_running_loop().time() + _LOCK_SECONDS
    embedded = not os.environ.get("TRINITY_NATS_URL")
    while True:
        main = jobs.read_records(job_stage.job).get("main")
        if main is not None:
            return main.nats_url
        if not embedded or lock.acquire():
            break
        if asyncio.get_running_loop().time() > deadline:
            raise RunError(f"{job_stage.job} is in use by another command (process {lock.owner()}); try again after it")
        await asyncio.sleep(_POLL_SECONDS)
    if embedded and not (job_stage.job / "nats" / "store").is_dir():
        raise RunError(f"{job_stage.job} has no NATS store; set TRINITY_NATS_URL to the NATS that the run used")
    return await open_nats(job_stage.whole_job(), children, asyncio.Event())


@contextlib.asynccontextmanager
async def _connected(address: str, nats_url: str, child: Child | None) -> AsyncIterator[Reader]:
    async with rpc.channel(address) as channel:
        await _until_serving(channel, child)
        yield Reader(address, nats_url, child is None, buffer_pb2_grpc.BufferServiceStub(channel))


async def _until_serving(channel: grpc.aio.Channel, child: Child | None) -> None:
    """RunError if a child ends first or at the timeout. `child` None: the buffer of a live run, which may restart."""
    deadline = asyncio.get_running_loop().time() + _START_SECONDS
    while asyncio.get_running_loop().time() < deadline:
        with contextlib.suppress(grpc.aio.AioRpcError):
            found = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
            if found.status == health_pb2.HealthCheckResponse.SERVING:
                return
        if child is not None and not child.is_running():
            raise RunError(f"the run cannot be read: {child.last_error()}")
        await asyncio.sleep(_POLL_SECONDS)
    raise RunError(f"the buffer does not serve within {_START_SECONDS:g} s; `trinity status` shows a live run")
