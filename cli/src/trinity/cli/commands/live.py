"""The services of a live stage, for commands that ask sync or change what is served."""

import os
from collections.abc import Awaitable
from dataclasses import asdict
from typing import TypeVar

import grpc
import grpc.aio

from trinity.cli.commands.reader import JobStage
from trinity.cli.errors import RunError
from trinity.cli.supervise import job as jobs
from trinity.cli.supervise.join import look_for_run
from trinity.cli.supervise.services import Addresses

CALL_SECONDS = 30.0

T = TypeVar("T")


async def live_services(job_stage: JobStage) -> Addresses:
    """Where the stage's services listen. RunError unless it is live and has a sync service."""
    found = await _find(job_stage)
    if found is None:
        raise RunError(_not_live(job_stage))
    if not found.sync:
        raise RunError(f"{job_stage.name} learns from a dataset; it has no explorers and no weight versions")
    return found


async def _find(job_stage: JobStage) -> Addresses | None:
    main = jobs.read_records(job_stage.job).get("main")
    if main is not None:
        if main.run != job_stage.run:
            return None
        known = {process.service: process.address for process in main.processes}
        return Addresses(**{name: known.get(name, "") for name in asdict(Addresses())})
    if os.environ.get("TRINITY_NATS_URL"):  # it may live on another machine
        _, about = await look_for_run(job_stage.whole_job())
        if about is not None and about["run"] == job_stage.run:
            return Addresses(**about["addresses"])
    return None


def _not_live(job_stage: JobStage) -> str:
    main = jobs.read_records(job_stage.job).get("main")
    if main is not None:
        return (
            f"stage {job_stage.stage!r} of {job_stage.job} does not run now, {main.stage!r} does; --stage names another"
        )
    return (
        f"{job_stage.name} does not run, and versions are the running sync service's: `trinity run` with the same "
        "YAML, then again; TRINITY_NATS_URL finds a run on another machine"
    )


async def answer(call: Awaitable[T], service: str) -> T:
    """What a service answers; RunError with its reason if it refuses."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            raise RunError(
                f"the {service} service does not answer ({error.details()}); `trinity status` shows the run"
            ) from None
        raise RunError(str(error.details())) from None
