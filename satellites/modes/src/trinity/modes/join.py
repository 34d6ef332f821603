"""`trinity run` with mode explore: adds an explorer to a live run, here or elsewhere.

Lengths, sampling and tasks come from the run; code and paths never do (join_config.py). The explorer may bring tasksets
(own_tasks.py). It may come and go at any time.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine
from typing import Any

from trinity.cli.supervise.checks.hub_models import fetch_models
from trinity.cli.supervise.processes import services
from trinity.cli.supervise.processes.devices import busy_gpus, place
from trinity.cli.supervise.processes.endpoint import endpoint_problems, endpoint_settings
from trinity.cli.supervise.stage.disk import DiskWatch
from trinity.cli.supervise.stage.display import Display, make_display
from trinity.cli.supervise.stage.progress import starting
from trinity.config import Config, ConfigError, Problem, dump, make_plan
from trinity.config.run_record import Addresses, RunRecord
from trinity.modes.join_config import joined_config
from trinity.modes.own_tasks import own_tasks
from trinity.reading.accounts.device_log import DeviceLog
from trinity.reading.children import Child, stop_all
from trinity.reading.client import Watcher
from trinity.reading.ending import Ending, ended_by_signals
from trinity.reading.errors import RunError
from trinity.reading.job import Job, SupervisorRecord
from trinity.reading.nats import NatsAccess
from trinity.reading.run_record import local_addresses, look_for_run
from trinity.runtime import files
from trinity.runtime.devices import visible_gpus
from trinity.runtime.logs import without_credentials

_FINISHED_SECONDS = 30.0  # an explorer that is started before the trainer of a longer run waits so long
_STOP_SECONDS = 6.0
_POLL_SECONDS = 1.0


def join(config: Config, source: str) -> None:
    """Runs one explorer until the run ends. Raises ConfigError or RunError."""
    if problems := endpoint_problems(config):
        raise ConfigError(source, problems)
    job = Job(config)
    name = config.explorer.name
    for record in job.records().values():
        if name in (process.name for process in record.processes):
            problem = f"is {name!r}, which an explorer of this run has already; it must differ"
            raise ConfigError(source, [Problem("explorer.name", problem)])
    lock = job.lock(name)
    if not lock.acquire():
        raise RunError(f"explorer {name!r} of {job.folder} runs already (process {lock.owner()})")
    try:
        asyncio.run(_join(config, job, source))
    finally:
        lock.release()


async def _join(config: Config, job: Job, source: str) -> None:
    async def explore(nats: NatsAccess, about: RunRecord, display: Display, stop: Ending) -> bool:
        return await _explore(config, source, job, nats, about, display, stop)

    left = f"explorer {config.explorer.name!r} was stopped; others get its tasks"
    await join_stages(job, config.synchronizer.sync_timeout, explore, left)


async def join_stages(
    job: Job,
    seconds: float,
    stay: Callable[[NatsAccess, RunRecord, Display, Ending], Coroutine[Any, Any, bool]],
    left: str,
    *,
    offline: bool = False,
) -> None:
    """Joins each stage until the run is finished.

    A run that disappears may come back elsewhere within `seconds`. `stay` returns True once its stage is finished.
    `left`: the text after a signal. `offline`: see `find_run`.
    """
    stop = Ending("the same command joins the run again")
    with ended_by_signals(stop), make_display() as display:
        while not stop.is_set():
            nats, about = await find_run(job, display, stop, seconds, offline=offline)
            if about is None:
                return
            finished = await stay(nats, about, display, stop)
            if stop.is_set():
                display.say(left)
                return
            if finished and about.last:
                display.say("the run has ended")
                return
            display.say("the stage has ended" if finished else "the run is gone")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _POLL_SECONDS)


async def find_run(
    job: Job, display: Display, stop: asyncio.Event, seconds: float, *, offline: bool = False
) -> tuple[NatsAccess, RunRecord | None]:
    """Waits for the run to join. Returns its NATS and record; None after `stop`. Raises RunError after the time.

    `offline`: stages without explorers count too, which a machine of the trainer joins.
    """
    display.say(f"looking for the run of {job.folder}; this command may be started before it")
    deadline = asyncio.get_running_loop().time() + seconds
    finished_deadline = min(deadline, asyncio.get_running_loop().time() + _FINISHED_SECONDS)
    while not stop.is_set():
        nats, about = await look_for_run(job, offline=offline)
        if about is not None:
            return nats, about
        now = asyncio.get_running_loop().time()
        if now > finished_deadline and _is_finished(job):
            display.say(f"the run of {job.folder} is finished; there is nothing to join")
            return nats, None
        if now > deadline:
            given = os.environ.get("TRINITY_NATS_URL")
            where = (
                f"at {without_credentials(given)} (TRINITY_NATS_URL)"
                if given
                else f"in {job.folder} (TRINITY_NATS_URL finds others)"
            )
            raise RunError(f"no live run to join within {seconds:g} s (synchronizer.sync_timeout) {where}")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _POLL_SECONDS)
    return NatsAccess(""), None


def _is_finished(job: Job, since: float = 0.0) -> bool:
    """Returns True if the run finished after `since` (Unix time), as the job folder says. It may still be extended."""
    summary = job.folder / "summary.json"
    return summary.exists() and summary.stat().st_mtime >= since and "main" not in job.records()


async def _explore(
    config: Config,
    source: str,
    job: Job,
    nats: NatsAccess,
    about: RunRecord,
    display: Display,
    stop: Ending,
) -> bool:
    """Runs one explorer for one stage of a run. Returns True if the stage is finished."""
    merged = joined_config(config, about)
    plan = make_plan(merged)
    name, addresses = config.explorer.name, local_addresses(job, about)
    await asyncio.to_thread(fetch_models, plan)
    own = await asyncio.to_thread(own_tasks, config, plan, about, source)
    config_file = plan.job_dir / "run" / f"{name}.config.json"
    files.write_json(config_file, dump(merged), mode=0o600)
    placement = place(plan, visible_gpus(), job.taken_gpus())
    if busy := await asyncio.to_thread(busy_gpus, placement):
        display.say(f"warning: {busy}")
    serving = endpoint_settings(config, job)
    child = services.explorer(plan, config_file, nats, addresses, plan.job_dir / "log", placement, serving)
    child.log_mib, child.keeps_spare = config.monitor.log_mib, bool(child.gpus)
    changed = asyncio.Event()
    devices = DeviceLog(plan.job_dir, f"explorer-{name}")
    devices.begin(child.name, child.service, placement.devices_of(plan)["explorer"])
    child.on_event, child.say = devices.note, display.say
    child.continues = lambda: "others get its tasks"
    child.hold = DiskWatch([plan.job_dir], 0.0, None, display.say).hold
    child.start()
    beats = asyncio.create_task(devices.beat())
    keeper = asyncio.create_task(child.keep_running(changed))
    record_name = f"explorer-{name}"
    watcher = Watcher(about.run, Addresses(addresses.buffer, "", addresses.sync, addresses.trainer))
    offers = asyncio.gather(*(one.offer(addresses.buffer, display) for one in own))
    display.say(f"explorer {name!r} joins {plan.config.project}/{plan.config.name}; log in {child.log_file}")
    try:
        until_end = until_run_ends(keeper, child, job, record_name, about.run, nats, watcher, display, stop)
        return await _unless_refused(until_end, offers)
    finally:
        offers.cancel()
        keeper.cancel()
        beats.cancel()
        job.remove_record(record_name)
        await watcher.close()
        await stop_all([child], _STOP_SECONDS, stop.at_once)
        devices.end()


async def _unless_refused(until_end: Coroutine[Any, Any, bool], offers: "asyncio.Future[list[None]]") -> bool:
    """Returns the result of `until_end`. Raises RunError if the run refuses the explorer's tasks before that."""
    end = asyncio.create_task(until_end)
    try:
        either: tuple[asyncio.Future[Any], ...] = (end, offers)
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if offers.done():
            offers.result()
        return await end
    finally:
        end.cancel()


async def until_run_ends(
    keeper: "asyncio.Task[str]",
    child: Child,
    job: Job,
    record_name: str,
    run: str,
    nats: NatsAccess,
    watcher: Watcher,
    display: Display,
    stop: asyncio.Event,
    mode: str = "explore",
) -> bool:
    """Returns True once the run is finished; False if it no longer answers, or after `stop`."""
    silent, begin = 0, time.time()
    while not stop.is_set():
        record = SupervisorRecord(os.getpid(), mode, run, "", nats.url, [child.record()])
        with contextlib.suppress(OSError):  # a full disk; it is written again
            job.write_record(record_name, record)
        if child.finished:
            return True
        if keeper.done():
            raise RunError(keeper.result())
        watcher.view.buffer = None
        view = await watcher.refresh()
        display.show(view, f"{child.service} {child.name}", 0, starting([child]))
        silent = 0 if view.buffer is not None else silent + 1
        if view.finished:
            return True
        if silent > 60 / _POLL_SECONDS or (silent > 3 and "main" not in job.records()):
            return _is_finished(job, begin)  # its buffer may have ended since
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _POLL_SECONDS)
    return False
