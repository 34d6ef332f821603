"""`trinity run` with mode explore: one more explorer for a run that lives, here or elsewhere.

What the YAML leaves out (model, lengths, tasks) comes from the run. The explorer may come and go at any time.
"""

import asyncio
import contextlib
import json
import os
import signal
from typing import Any

from trinity.cli import services
from trinity.cli.children import Child, stop_all
from trinity.cli.devices import place, visible_gpus
from trinity.cli.display import Display, make_display
from trinity.cli.errors import RunError
from trinity.cli.job import Job, SupervisorRecord
from trinity.cli.services import Addresses
from trinity.cli.watch import Watcher
from trinity.config import Config, ConfigError, Problem, make_plan
from trinity.runtime import files, names
from trinity.runtime.broker import Bucket, connect
from trinity.runtime.errors import Unavailable

_WAIT_SECONDS = 120.0
_NATS_SECONDS = 20.0
_STOP_SECONDS = 6.0
_POLL_SECONDS = 1.0


def join(config: Config, source: str) -> None:
    """Run one explorer until the run ends. Raises ConfigError or RunError."""
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
        asyncio.run(_join(config, job))
    finally:
        lock.release()


async def _join(config: Config, job: Job) -> None:
    stop, received = asyncio.Event(), []

    def on_signal(signum: int) -> None:
        received.append(signum)
        stop.set()

    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, on_signal, signum)
    with make_display() as display:
        nats_url, about = await _find_run(job, display, stop)
        if about is not None:
            await _explore(config, job, nats_url, about, display, stop)
    if received:
        raise RunError(f"ended by {signal.Signals(received[0]).name}", 128 + received[0])


async def _find_run(job: Job, display: Display, stop: asyncio.Event) -> tuple[str, dict[str, Any] | None]:
    """NATS and description of the run to join; waits for it to begin. None after `stop`."""
    display.say(f"looking for the run of {job.folder}")
    deadline = asyncio.get_running_loop().time() + _WAIT_SECONDS
    given, url = os.environ.get("TRINITY_NATS_URL"), ""
    while not stop.is_set():
        main = job.records().get("main")
        url = given or (main.nats_url if main is not None else "")
        if url:
            with contextlib.suppress(Unavailable):
                async with await connect(url, "trinity-join", wait_seconds=_NATS_SECONDS) as broker:
                    bucket = await Bucket.open(broker, names.RUNS_BUCKET)
                    entry = await bucket.get(names.RunNames(job.token).job_key)
                    about = json.loads(entry.value) if entry.revision else None
                    if about is not None and about["online"]:
                        return url, about
        if asyncio.get_running_loop().time() > deadline:
            break
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _POLL_SECONDS)
    if stop.is_set():
        return url, None
    where = f"at {given} (TRINITY_NATS_URL)" if given else f"in {job.folder} (set TRINITY_NATS_URL for one elsewhere)"
    raise RunError(f"no live run to join within {_WAIT_SECONDS:g} s {where}")


async def _explore(
    config: Config, job: Job, nats_url: str, about: dict[str, Any], display: Display, stop: asyncio.Event
) -> None:
    run_config = Config.model_validate(about["config"])
    merged = run_config.model_copy(
        update={"mode": "explore", "explorer": config.explorer, "cluster": config.cluster,
                "checkpoint_root_dir": config.checkpoint_root_dir}
    )  # fmt: skip
    plan = make_plan(merged)
    name, addresses = config.explorer.name, Addresses(**about["addresses"])
    config_file = plan.job_dir / "run" / f"{name}.config.json"
    files.write_json(config_file, json.loads(merged.model_dump_json()))
    placement = place(plan, visible_gpus())
    child = services.explorer(plan, config_file, nats_url, addresses, plan.job_dir / "log", placement)
    changed = asyncio.Event()
    child.start()
    keeper = asyncio.create_task(child.keep_running(changed))
    record_name = f"explorer-{name}"
    watcher = Watcher(about["run"], Addresses(addresses.buffer, "", addresses.sync, addresses.trainer))
    display.say(f"explorer {name!r} joins {plan.config.project}/{plan.config.name}; log in {child.log_file}")
    try:
        await _until_run_ends(keeper, child, job, record_name, about["run"], nats_url, watcher, display, stop)
    finally:
        keeper.cancel()
        job.remove_record(record_name)
        await watcher.close()
        await stop_all([child], _STOP_SECONDS)


async def _until_run_ends(
    keeper: "asyncio.Task[str]",
    child: Child,
    job: Job,
    record_name: str,
    run: str,
    nats_url: str,
    watcher: Watcher,
    display: Display,
    stop: asyncio.Event,
) -> None:
    silent = 0
    while not stop.is_set():
        record = SupervisorRecord(os.getpid(), "explore", run, "", nats_url, [child.record()])
        job.write_record(record_name, record)
        if keeper.done():
            raise RunError(keeper.result())
        watcher.view.buffer = None
        view = await watcher.refresh()
        display.show(view, f"explorer {child.name}")
        silent = 0 if view.buffer is not None else silent + 1
        if view.finished or silent > 60 / _POLL_SECONDS or (silent > 3 and "main" not in job.records()):
            display.say("the run has ended")
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _POLL_SECONDS)
