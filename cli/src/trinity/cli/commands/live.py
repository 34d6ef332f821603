"""The services of a live stage, for commands that ask sync or change what is served."""

import os
from collections.abc import Awaitable
from dataclasses import asdict
from typing import TypeVar

import grpc
import grpc.aio

from trinity.cli.commands.reader import Subject
from trinity.cli.errors import RunError
from trinity.cli.supervise import job as jobs
from trinity.cli.supervise.join import look_for_run
from trinity.cli.supervise.services import Addresses

CALL_SECONDS = 30.0

T = TypeVar("T")


async def live_services(subject: Subject) -> Addresses:
    """Where the stage's services listen. RunError unless it lives and has a sync service."""
    found = await _find(subject)
    if found is None:
        raise RunError(_not_live(subject))
    if not found.sync:
        raise RunError(f"{subject.name} learns from a dataset; it has no explorers and no weight versions")
    return found


async def _find(subject: Subject) -> Addresses | None:
    main = jobs.read_records(subject.job).get("main")
    if main is not None:
        if main.run != subject.run:
            return None
        known = {process.service: process.address for process in main.processes}
        return Addresses(**{name: known.get(name, "") for name in asdict(Addresses())})
    if os.environ.get("TRINITY_NATS_URL"):  # it may live on another machine
        _, about = await look_for_run(subject.whole_job())
        if about is not None and about["run"] == subject.run:
            return Addresses(**about["addresses"])
    return None


def _not_live(subject: Subject) -> str:
    main = jobs.read_records(subject.job).get("main")
    if main is not None:
        return f"stage {subject.stage!r} of {subject.job} does not run now, {main.stage!r} does; --stage names another"
    return (
        f"{subject.name} does not run, and versions are the running sync service's: `trinity run` with the same YAML, "
        "then again; TRINITY_NATS_URL finds a run on another machine"
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
