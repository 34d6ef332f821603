"""`trinity serve`, and `trinity run` with mode serve: an OpenAI-compatible endpoint with the newest weights of a job.

With a live run it follows the LIVE version; otherwise it serves the newest checkpoint in the job folder.
"""

import asyncio
import contextlib
import json
import os
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trinity.cli.supervise.checks.adapters import served_adapters
from trinity.cli.supervise.checks.hub_models import fetch_models
from trinity.cli.supervise.checks.preflight import check_inputs
from trinity.cli.supervise.processes import services
from trinity.cli.supervise.processes.devices import place
from trinity.cli.supervise.processes.endpoint import endpoint_settings, serves
from trinity.cli.supervise.stage.display import make_display
from trinity.cli.supervise.stage.progress import clock, starting
from trinity.config import Config, ConfigError, Plan, Problem, dump, expand, make_plan
from trinity.config.run_record import Addresses, RunRecord
from trinity.modes.join_config import check_identity, own_model
from trinity.reading.children import Child, stop_all
from trinity.reading.client import Answers
from trinity.reading.ending import Ending, ended_by_signals
from trinity.reading.errors import RunError
from trinity.reading.job import Job, SupervisorRecord, identify
from trinity.reading.nats import NatsAccess
from trinity.reading.run_record import local_addresses, look_for_run
from trinity.runtime import files
from trinity.runtime.devices import visible_gpus

_STOP_SECONDS = 6.0
_POLL_SECONDS = 0.5


def serve(config: Config, source: str, job: Job | None = None, adapters: Sequence[str] = ()) -> None:
    """Serves until SIGINT or SIGTERM. `job`: of a stage's configuration. `adapters`: NAME=FOLDER, of the base model.

    Raises ConfigError or RunError.
    """
    asyncio.run(_serve(config, source, job or Job(config), adapters))


async def _serve(config: Config, source: str, job: Job, adapters: Sequence[str]) -> None:
    stop = Ending("the same command serves again")
    identify(job.folder, starts_services=True)
    with ended_by_signals(stop), make_display() as display:
        nats, about = await look_for_run(job)
        plan = _plan(config, about)
        beside = served_adapters(adapters, plan)
        if beside and about is not None:
            plan = _unmerged(plan)
        check_inputs(plan, source)
        await asyncio.to_thread(fetch_models, plan)
        if config.explorer.record and about is None:
            problem = "is true, and no run is live whose experience could be recorded; start one, or set it to false"
            raise ConfigError(source, [Problem("explorer.record", problem)])
        settings = endpoint_settings(config, job)
        if beside:
            settings["SERVE_ADAPTERS"] = json.dumps({name: str(folder) for name, folder in beside.items()})
        endpoint, keys = settings["SERVE_LISTEN"], settings["API_KEYS_FILE"]
        port = int(endpoint.rpartition(":")[2])
        child = _child(plan, nats, about, settings, job)
        child.log_mib = config.monitor.log_mib
        followed = f"the checkpoints in {plan.job_dir}" if not beside else "nothing: adapters need their base model"
        followed = f"the live run {about.run}" if about is not None else followed
        display.say(f"starting {plan.config.model.model_path}; following {followed}; log in {child.log_file}")
        child.say = display.say
        child.start()
        keeper = asyncio.create_task(child.keep_running(asyncio.Event()))
        record, name, began = f"serve-{port}", plan.config.name, time.monotonic()

        def show() -> None:
            display.show(Answers(), f"{plan.config.project}/{name}", starting=starting([child]))

        try:
            await _until_served(lambda: serves(plan.config, port, Path(keys)), keeper, stop, show)
            if not stop.is_set():
                display.show(Answers(), "")
                seconds = clock(time.monotonic() - began)
                display.say(f"serving http://{endpoint}/v1 after {seconds} (model {name}; API key in {keys})")
                display.say(f"try it, Ctrl-C ends it: {_example(endpoint, keys, name)}")
            with contextlib.suppress(OSError):  # a full disk
                job.write_record(record, SupervisorRecord(os.getpid(), "serve", "", "", nats.url, [child.record()]))
            while not stop.is_set() and not keeper.done():
                await asyncio.sleep(_POLL_SECONDS)
            if keeper.done():
                raise RunError(keeper.result())
        finally:
            keeper.cancel()
            job.remove_record(record)
            await stop_all([child], _STOP_SECONDS, stop.at_once)


def _plan(config: Config, about: RunRecord | None) -> Plan:
    """Returns the plan of the last stage, with the lengths of a live run. Raises RunError as join_config does."""
    stage = expand(config)[-1]
    changes: dict[str, Any] = {"mode": "serve"}
    if about is not None:
        check_identity(config, about)
        changes |= {"model": own_model(stage, about), "name": about.config.name}
    explorer = config.explorer.model_copy(update={"name": "serve"})
    return make_plan(stage.model_copy(update={**changes, "explorer": explorer, "stages": []}))


def _unmerged(plan: Plan) -> Plan:
    """Returns the plan of an endpoint that holds a live run's adapters beside others of the same base."""
    model = plan.config.model
    if model.lora is None:
        raise RunError("--adapter: the live run trains the whole model, not adapters of a base; serve without it", 2)
    lora = model.lora.model_copy(update={"merged": False})
    return make_plan(plan.config.model_copy(update={"model": model.model_copy(update={"lora_configs": [lora]})}))


def _child(plan: Plan, nats: NatsAccess, about: RunRecord | None, settings: dict[str, str], job: Job) -> Child:
    serving = dict(settings)
    addresses = local_addresses(job, about) if about is not None else Addresses()
    if about is None:
        serving["SERVE_FOLDER"] = str(plan.job_dir)
    config_file = plan.job_dir / "run" / "serve.config.json"
    files.write_json(config_file, dump(plan.config), mode=0o600)
    placement = place(plan, visible_gpus(), job.taken_gpus())
    log_dir = plan.job_dir / "log"
    return services.explorer(
        plan,
        config_file,
        nats if nats.url else NatsAccess("nats://127.0.0.1:1"),
        addresses,
        log_dir,
        placement,
        serving,
    )


def _example(endpoint: str, keys: str, name: str) -> str:
    """Returns a command of the shell that asks the model."""
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}]})
    key = f'"Authorization: Bearer $(head -1 {shlex.quote(keys)})"'
    return f"curl -s http://{endpoint}/v1/chat/completions -H {key} -H 'Content-Type: application/json' -d '{body}'"


async def _until_served(
    is_served: Callable[[], bool], keeper: "asyncio.Task[str]", stop: asyncio.Event, show: Callable[[], None]
) -> None:
    """Waits until the endpoint answers, and shows its start. Raises RunError if its process failed for good."""
    while not stop.is_set():
        show()
        if keeper.done():
            raise RunError(keeper.result())
        if await asyncio.to_thread(is_served):
            return
        await asyncio.sleep(_POLL_SECONDS)
