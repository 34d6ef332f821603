"""`trinity run` with mode train_node: adds this machine's ranks to the trainer of a live run.

It finds the run as an explorer does (join.py). The trainer on the first machine admits the node, and compares its YAML.
"""

import asyncio
import socket

from trinity.cli.supervise.processes import services
from trinity.cli.supervise.processes.devices import place
from trinity.cli.supervise.stage.disk import DiskWatch
from trinity.cli.supervise.stage.display import Display
from trinity.config import Config, dump, expand, make_plan
from trinity.config.run_record import Addresses, RunRecord
from trinity.modes.join import join_stages, until_run_ends
from trinity.modes.join_config import check_identity, own_model
from trinity.reading.accounts.device_log import DeviceLog
from trinity.reading.children import stop_all
from trinity.reading.client import Watcher
from trinity.reading.ending import Ending
from trinity.reading.errors import RunError
from trinity.reading.job import Job
from trinity.reading.nats import NatsAccess
from trinity.reading.run_record import local_addresses
from trinity.runtime import files
from trinity.runtime.devices import visible_gpus
from trinity.runtime.trust.roles import Role

_STOP_SECONDS = 2.0


def join_as_node(config: Config, source: str) -> None:
    """Trains as a further node until the run ends. Raises ConfigError or RunError."""
    if config.cluster.nodes < 2:
        raise RunError(
            f"cluster.node_num: is {config.cluster.node_num} in {source}; mode train_node needs 2 or more", 2
        )
    job, name = Job(config), config.cluster.node_name or socket.gethostname()
    lock = job.lock(f"node-{name}")
    if not lock.acquire():
        raise RunError(f"node {name!r} of {job.folder} runs already (process {lock.owner()}); set cluster.node_name")
    try:
        asyncio.run(_join(config, job, name))
    finally:
        lock.release()


async def _join(config: Config, job: Job, name: str) -> None:
    async def train(nats: NatsAccess, about: RunRecord, display: Display, stop: Ending) -> bool:
        return await _train(config, job, name, nats, about, display, stop)

    left = f"node {name!r} has left; the others continue at the newest checkpoint"
    await join_stages(job, config.synchronizer.sync_timeout, train, left, offline=True)


async def _train(
    config: Config, job: Job, name: str, nats: NatsAccess, about: RunRecord, display: Display, stop: Ending
) -> bool:
    """Runs the ranks of this machine for one stage of a run. Returns True if the stage is finished."""
    plan = make_plan(node_config(config, about))
    addresses = local_addresses(job, about)
    if not addresses.trainer:
        raise RunError(f"the record of run {about.run} names no trainer; start it with the same version of Trinity")
    instance, log_dir = f"trainer-{name}", plan.job_dir / "log"
    config_file = plan.job_dir / "run" / f"{instance}.config.json"
    files.write_json(config_file, dump(plan.config), mode=0o600)
    placement = place(make_plan(plan.config.model_copy(update={"mode": "train"})), visible_gpus(), job.taken_gpus())
    broker = nats.settings(Role.TRAINER, about.run)
    child = services.trainer(config_file, addresses, log_dir, placement, broker=broker, instance=instance)
    child.log_mib, child.stopped_seconds = config.monitor.log_mib, config.cluster.node_timeout
    changed = asyncio.Event()
    devices = DeviceLog(plan.job_dir, instance)
    devices.begin(child.name, child.service, float(placement.trainer_ranks))
    child.on_event, child.say = devices.note, display.say
    child.hold = DiskWatch([plan.job_dir], 0.0, None, display.say).hold
    child.start()
    beats = asyncio.create_task(devices.beat())
    keeper = asyncio.create_task(child.keep_running(changed))
    watcher = Watcher(about.run, Addresses(addresses.buffer, "", "", addresses.trainer))
    display.say(
        f"node {name!r} joins the trainer of {about.title} at {addresses.trainer} with {placement.trainer_ranks} "
        f"rank(s); log in {child.log_file}"
    )
    try:
        return await until_run_ends(
            keeper, child, job, f"node-{name}", about.run, nats, watcher, display, stop, "train_node"
        )
    finally:
        if stop.is_set():
            display.say(f"{stop.signal}: the trainer saves a checkpoint, then this node leaves; Ctrl-C ends it at once")
        keeper.cancel()
        await stop_all([child], services.NODE_DRAIN_SECONDS if stop.is_set() else _STOP_SECONDS, stop.at_once)
        beats.cancel()
        job.remove_record(f"node-{name}")
        await watcher.close()
        devices.end()


def node_config(config: Config, about: RunRecord) -> Config:
    """Returns the stage of this YAML that the run trains now, with the run's mode.

    Raises RunError if the record is another run's, or names another model than this YAML or the job folder.
    """
    check_identity(config, about)
    stage = next((one for one in expand(config) if one.name == about.config.name), None)
    if stage is None:
        raise RunError(f"the run trains stage {about.config.name}, which this YAML has not; use the run's YAML", 2)
    return stage.model_copy(update={"mode": about.config.mode, "model": own_model(stage, about)})
