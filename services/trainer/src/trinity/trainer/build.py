"""Builds the parts of a trainer process."""

import contextlib
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from trinity.config import Plan
from trinity.runtime import names, waits
from trinity.runtime.errors import InvalidInput
from trinity.trainer.data.client import BufferClient
from trinity.trainer.process.control import Control
from trinity.trainer.process.ranks import Ranks
from trinity.trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from trinity.trainer.engine import TrainEngine
    from trinity.trainer.loop import TrainLoop
    from trinity.trainer.weights.publisher import Publisher

_MEMORY = Path("/dev/shm")


def run_id_of(plan: Plan) -> str:
    return names.run_id(plan.config.project, plan.config.name, plan.config.group)


def weights_dir_of(plan: Plan, settings: TrainerSettings) -> Path:
    """Returns the folder of whole versions. With sync_method memory it is removed after the last step."""
    if settings.weights_dir is not None:
        return settings.weights_dir
    if plan.config.synchronizer.sync_method != "memory":
        return plan.job_dir / "weights"
    if not _MEMORY.is_dir():
        raise InvalidInput("synchronizer.sync_method", f"is memory, and this machine has no {_MEMORY}; use checkpoint")
    return _MEMORY / f"trinity-{run_id_of(plan)}"


def load_code(settings: TrainerSettings) -> None:
    """Imports what `train` needs: most of a start's time with a small model."""
    import torch
    import transformers.modeling_utils  # noqa: F401

    from trinity.runtime.devices import choose
    from trinity.trainer.engine import checkpoints, step  # noqa: F401
    from trinity.trainer.engine.deepspeed import import_deepspeed
    from trinity.trainer.process.devices import FIELD

    import_deepspeed(torch.device(choose(settings.device, FIELD, torch.cuda.is_available())))


def train(plan: Plan, settings: TrainerSettings, ranks: Ranks, control: Control) -> None:
    """Loads everything and runs the loop; blocks until it ends. Heavy imports happen here.

    Rank 0 of a finished run also waits for the end of the last evaluation, since a supervisor such as compose may end
    all processes with the trainer.
    """
    waits.phase("loads torch and DeepSpeed")
    import torch

    from trinity.runtime.devices import host_memory
    from trinity.trainer.engine import TrainEngine
    from trinity.trainer.process import devices
    from trinity.trainer.process.exchange import Exchange
    from trinity.trainer.replay import train_bad_step

    device = devices.choose(settings.device, ranks)
    if device == "cpu":
        torch.set_num_threads(settings.threads or max(1, torch.get_num_threads() // ranks.here))
    try:
        engine = TrainEngine(plan, ranks, device, settings.gpu_memory_gib, control.together)
    except torch.OutOfMemoryError as error:
        card = devices.card_of(torch.device("cuda", ranks.local_rank))
        raise devices.no_room(plan, ranks, card, host_memory(), error) from None
    with contextlib.ExitStack() as stack:
        buffer = publisher = None
        if ranks.is_first:
            buffer = stack.enter_context(contextlib.closing(BufferClient(settings.buffer_address, run_id_of(plan))))
            if not plan.offline and settings.replay_folder is None:
                publisher = make_publisher(plan, settings, engine)
        with contextlib.closing(publisher) if publisher is not None else contextlib.nullcontext():
            if settings.replay_folder is not None and settings.replay_bad_step:
                exchange = Exchange(ranks, together=control.together)
                train_bad_step(
                    plan, run_id_of(plan), settings.replay_bad_step, settings.replay_folder, engine, exchange
                )
                control.update(step=settings.replay_bad_step, state="finished", waiting_for="")
            else:
                make_loop(plan, settings, ranks, engine, control, buffer, publisher).run()
        engine.close()  # after an error other ranks may be in a collective, and end with this process
        if control.progress.state == "finished" and buffer is not None and publisher is not None:
            buffer.wait_until_finished(publisher.live_version, lambda: control.stopping)


def make_loop(
    plan: Plan,
    settings: TrainerSettings,
    ranks: Ranks,
    engine: "TrainEngine",
    control: Control,
    buffer: BufferClient | None,
    publisher: "Publisher | None",
) -> "TrainLoop":
    """Makes the loop of a run, or with `settings.replay_folder` of a replay. Only rank 0 has buffer and publisher."""
    from trinity.trainer.data.source import BatchSource
    from trinity.trainer.engine.checkpoint_store import CheckpointStore
    from trinity.trainer.engine.checkpoints import Checkpoints
    from trinity.trainer.engine.step import StepTrainer
    from trinity.trainer.loop import Observer, TrainLoop
    from trinity.trainer.observers import Experiences, Notes, StepMonitor
    from trinity.trainer.process.exchange import Exchange
    from trinity.trainer.process.times import StepTimes
    from trinity.trainer.publishing import NoVersions, VersionPublisher
    from trinity.trainer.replay import ReplayCheckpoints

    replay, last_step = settings.replay_folder, settings.replay_to if settings.replay_folder else None
    engine.on_micro_batch(control.moved)
    exchange, aside = (Exchange(ranks, together=control.together) for _ in range(2))
    folder, times = replay or plan.job_dir, StepTimes()
    store = CheckpointStore(folder) if replay else CheckpointStore.of(plan, run_id_of(plan))
    versions: NoVersions | VersionPublisher = NoVersions()
    if not plan.offline and replay is None:
        versions = VersionPublisher(plan, exchange, engine, control, publisher, store, times)
    commit = buffer.commit if buffer is not None and replay is None else None
    run = run_id_of(plan)
    own = Checkpoints(plan, run, exchange, aside, engine, control, store, times, commit, lambda: versions.rollback)
    checkpoints: Checkpoints | ReplayCheckpoints = own
    if replay is not None:
        checkpoints = ReplayCheckpoints(plan, replay, settings.replay_from, settings.replay_to, own)
    observers: list[Observer] = []
    if ranks.is_first:
        notes = Notes(folder, engine, ranks, checkpoints.schedule_end, lambda: versions.rollback)
        observers = [StepMonitor(plan, folder, control, times), notes]
    if ranks.is_first and plan.config.buffer.save_experiences:
        observers.append(Experiences(folder, plan.config.monitor.experiences_bytes))
    batches = BatchSource(exchange, control, buffer, times, versions.poll, last_step)
    records = plan.config.buffer.save_experiences and plan.config.buffer.save_token_values and not plan.offline
    trainer = StepTrainer(plan, engine, ranks.is_first, folder, checkpoints.schedule_end, records)
    return TrainLoop(control, batches, trainer, versions, checkpoints, observers)


def make_publisher(plan: Plan, settings: TrainerSettings, engine: "TrainEngine") -> "Publisher":
    """Makes rank 0's publisher, and starts to claim the run."""
    from trinity.trainer.publishing import allowed_by
    from trinity.trainer.weights.claim import Claim
    from trinity.trainer.weights.collective import CollectiveSender
    from trinity.trainer.weights.publisher import Publisher
    from trinity.trainer.weights.verification import VerificationResults
    from trinity.trainer.weights.version_stores import VersionStores
    from trinity.weights.client import BlockingSyncClient
    from trinity.weights.stores import open_store

    run, sync, folder = run_id_of(plan), plan.config.synchronizer, weights_dir_of(plan, settings)
    stores = [open_store(entry, run, folder=folder, nats_url=settings.nats_url) for entry in sync.storage]
    client = BlockingSyncClient(settings.sync_address, run)
    claim = Claim(client)
    claim.start()
    collective = None
    if sync.sync_method == "nccl":
        host = settings.collective_host or own_host(settings.sync_address)
        size = sync.bucket_mib * 1024**2
        collective = CollectiveSender(client.ask, host, engine.device, size, sync.collective_timeout)

    return Publisher(
        client,
        claim,
        VerificationResults(
            client,
            lambda: claim.renew().withdrawn,
            sync.on_rejected == "stop",
            allowed_by(plan, engine),
            seconds=0.1 if plan.config.reproducible else 1.0,  # each publish waits for it
        ),
        VersionStores(folder, run, stores, sync.full_interval if engine.lora is None else 1, settings.nats_url),
        sync.versions_to_keep,
        removes_files=sync.sync_method == "memory",
        collective=collective,
        lora=engine.lora,
    )


def own_host(sync_address: str) -> str:
    """Returns the address at which explorers reach this machine: the local end of the route to the sync service."""
    host, _, port = sync_address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        try:
            probe.connect((host.strip("[]") or "127.0.0.1", int(port)))
        except (OSError, ValueError):
            return socket.gethostname()
        return str(probe.getsockname()[0])
